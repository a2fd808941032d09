"""The parameters of an offloaded module, as programs ask for them, assign them and convert them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from memascend.autograd.proxies import is_proxy
from memascend.errors import MemascendError
from memascend.layout.registry import place_of
from memascend.session.copying import refuse_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memascend.session.replaced import Replacements


def wrapped_by(wrapper: str) -> str:
    """Say that a wrapper of PyTorch's for several processes cannot have an offloaded model."""
    return (
        f"{wrapper} cannot divide or copy an offloaded model, whose parameters are on SSD: leave it out, and call the "
        "model that memascend.offload(model, process_group=...) returns, which divides its store over the ranks"
    )


class WatchedParameters(dict):
    """A module's `_parameters`: during a pass, a parameter whose unit is absent is fetched when it is asked for."""

    __slots__ = ("lookup",)

    lookup: Callable[[nn.Parameter], None]

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        # A compiled layer has its parameters before it runs. Fetching while Dynamo traces would
        # compile the layer anew whenever another unit is resident.
        if parameter is not None and not torch.compiler.is_dynamo_compiling():
            self.lookup(parameter)
        return parameter

    def __setitem__(self, name: str, parameter: Any) -> None:
        distributed: Any = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(parameter, distributed.DTensor):
            raise MemascendError(wrapped_by("fully_shard"))
        super().__setitem__(name, parameter)

    def __reduce__(self) -> Any:
        raise MemascendError(
            "an offloaded model cannot be pickled: use memascend.save_pretrained(model, directory), or torch.save of "
            "its state_dict(), which takes it into memory"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        refuse_copy()


def guard(module: nn.Module, replaced: Replacements, is_offloaded: Callable[[nn.Parameter], bool]) -> RemovableHandle:
    """Refuse to convert or to replace the offloaded parameters of a module by its own methods, until it is taken back.

    Returns the hook that has to be removed beside what is `replaced`.
    """
    apply = module._apply

    def apply_unless_converting(fn: Callable, recurse: bool = True) -> nn.Module:
        own = [p for p in module._parameters.values() if p is not None and is_offloaded(p)]
        if all([_leaves_alone(fn, parameter) for parameter in own]):
            return apply(lambda tensor: tensor if is_proxy(tensor) else fn(tensor), recurse)
        return apply(fn, recurse)

    def refuse_assign(_: nn.Module, _state: Any, prefix: str, metadata: dict[str, Any], *_rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise MemascendError(
                f"load_state_dict(assign=True) would replace the parameters of {prefix or 'the model'}, which are "
                "on SSD: use assign=False, which copies the values there"
            )

    replaced.replace(module, "_apply", apply_unless_converting)
    return module.register_load_state_dict_pre_hook(refuse_assign)


def _leaves_alone(fn: Callable, parameter: nn.Parameter) -> bool:
    """Return whether `fn`, which `Module._apply` is to call, leaves the parameter as it is.

    Raises MemascendError if it gives the parameter another dtype, device or order of elements in memory.
    """
    probe = torch.ones((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    converted = fn(probe.clone())
    kinds = [(tensor.dtype, tensor.device, tensor.stride()) for tensor in (probe, converted)]
    if kinds[0] != kinds[1]:
        located = place_of(parameter)
        name = "a parameter" if located is None else located[1].name
        dtype, device, stride = kinds[1]
        order = "" if stride == probe.stride() else " in another memory format"
        raise MemascendError(
            f"{name} is on SSD as {probe.dtype} for {probe.device} and cannot become {dtype} on {device}{order}: "
            "convert the model before memascend.offload, or give dtype= to memascend.from_pretrained"
        )
    return torch.equal(probe, converted) and not converted.is_shared()
