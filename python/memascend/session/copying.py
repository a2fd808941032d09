"""Copies of frozen modules of an offloaded model, as PEFT makes of `modules_to_save`: ordinary modules in memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from memascend.autograd.proxies import copy_of
from memascend.errors import MemascendError
from memascend.vocabulary.fused import HeadWeight

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def refuse_copy() -> Any:
    """Raise MemascendError for the copy of a whole model, or of what is trained."""
    # A copy would share the original's forward, and train no parameters of its own.
    raise MemascendError(
        "a module of an offloaded model cannot be copied: its parameters are on SSD. For an average of the weights "
        "(EMA, torch.optim.swa_utils.AveragedModel) copy the model before memascend.offload: "
        "average.update_parameters(model) then reads the weights, and the average is whole in memory. Or average "
        "the files of memascend.save_checkpoint and memascend export. A part of the model whose parameters are frozen "
        "can be copied (PEFT's modules_to_save)"
    )


def copy_of_module(
    module: nn.Module,
    memo: dict[int, Any],
    replaced: Sequence[tuple[str, Any]],
    own_hooks: Collection[int],
    tables: Collection[nn.Parameter],
) -> nn.Module:
    """Return a copy of a frozen module, with its values in memory and without anything of its session.

    Args:
        memo: `copy.deepcopy`'s memo.
        replaced: the module's attributes that the session has replaced, each with its previous entry in `__dict__`.
        own_hooks: the ids of hooks of `load_state_dict` that the session has added.
        tables: weights with which a loss is computed in pieces: with a copy of them it is too.

    Raises MemascendError where a parameter is trained.
    """
    if any(parameter.requires_grad for parameter in module.parameters()):
        refuse_copy()
    state = dict(module.__dict__)
    for name, previous in reversed(replaced):
        if previous is None:
            state.pop(name, None)
        else:
            state[name] = previous
    state["_parameters"] = {
        name: None if parameter is None else _copy_of_parameter(parameter, memo, tables)
        for name, parameter in module._parameters.items()
    }
    hooks = state["_load_state_dict_pre_hooks"]
    state["_load_state_dict_pre_hooks"] = type(hooks)(
        (key, hook) for key, hook in hooks.items() if key not in own_hooks
    )
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
    return twin


def _copy_of_parameter(parameter: nn.Parameter, memo: dict[int, Any], tables: Collection[nn.Parameter]) -> nn.Parameter:
    """Return an ordinary parameter with the values of one that is on SSD; one of several modules has one copy."""
    if id(parameter) not in memo:
        twin = nn.Parameter(copy_of(parameter), requires_grad=False)
        if parameter in tables:
            twin.__class__ = HeadWeight
        memo[id(parameter)] = twin
        memo[id(twin)] = twin  # The values that follow in the state are copied too.
    twin = memo[id(parameter)]
    assert isinstance(twin, nn.Parameter)
    return twin
