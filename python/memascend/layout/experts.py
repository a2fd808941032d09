"""The layout of experts that are read one by one: tensors of shape (experts, rows, columns) within layers.

These are the fused experts of transformers, whose modules `use_experts_implementation` prepares (5.0 and later). The
names of that interface are used here alone. A module that lacks one of them has no such experts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from memascend.errors import DataError
from memascend.layout.tables import first_in_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

#: Implementations that take the experts of a tensor one after the other. Others gather a copy for each token.
IMPLEMENTATIONS = ("eager", "grouped_mm")
#: Classes that keep experts fused without that interface, and give all tokens to each, by `torch.bmm`.
BATCHED = ("Llama4TextExperts",)
#: Classes that do so, and multiply by the experts one after the other.
SINGLE = ("JetMoeParallelExperts", "LongcatFlashExperts")
#: Before this version of PyTorch, transformers asks for the address of the experts, or multiplies by a function of its
#: own.
GROUPED_FROM = "2.11"
#: Smaller tensors of experts stay with their layer, in whose packs they lie.
EXPERTS_BYTES_MIN = 64 * 1024


def find_experts(model: nn.Module) -> set[torch.Tensor]:
    """Return the experts of a model that can be read one by one.

    Raises DataError, a ValueError, with the reason, where there are none.
    """
    adapted, in_layers = _adapted(model), first_in_layers(model)
    reasons: dict[str, None] = {}
    experts = set()
    for module, name, parameter in fused_experts(model):
        if parameter.nbytes < EXPERTS_BYTES_MIN or parameter not in in_layers:
            continue
        reason = _reason_against(module, parameter, adapted)
        if reason is None:
            experts.add(parameter)
        else:
            reasons[f"{type(module).__name__}.{name} {reason}"] = None
    if experts:
        return experts
    why = "; ".join(reasons) or "its layers have no experts that transformers keeps fused in one tensor"
    raise DataError(
        f"experts='pieces' (--experts pieces): {type(model).__name__} has no experts that can be read one by one: "
        f"{why}. Leave it out, with which the experts are read with their layer"
    )


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has experts that can be read one by one."""
    try:
        return bool(find_experts(model))
    except DataError:
        return False


def adapted_experts(model: nn.Module) -> list[str]:
    """Return the names of fused experts' parameters that have adapters of PEFT, in their modules."""
    adapted = _adapted(model)
    return [name for _, name, parameter in fused_experts(model) if parameter in adapted]


def fused_experts(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the parameters of fused experts, with their modules and names there."""
    for module in model.modules():
        number, kind = getattr(module, "num_experts", None), type(module).__name__
        by_interface = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
        if not (by_interface or kind in BATCHED + SINGLE):
            continue
        for name, parameter in module._parameters.items():
            # Some experts without weights are counted in one tensor, and not in the other.
            if parameter is not None and parameter.ndim == 3 and (kind in SINGLE or len(parameter) == number):
                yield module, name, parameter


def _reason_against(module: nn.Module, parameter: torch.Tensor, adapted: set[torch.Tensor]) -> str | None:
    """Say why experts are not read one by one; None where they can be."""
    if parameter in adapted:
        return "has adapters, which are added to all experts at once"
    if type(module).__name__ in BATCHED + SINGLE:
        return None
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return f"is computed by {implementation!r} (set_experts_implementation('grouped_mm') or 'eager')"
    if implementation == "grouped_mm" and torch.torch_version.TorchVersion(torch.__version__) < GROUPED_FROM:
        return "is computed by 'grouped_mm', for which PyTorch 2.11 is needed (set_experts_implementation('eager'))"
    return None


def _adapted(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters of modules that PEFT has wrapped."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return set()
    wrapped = (module.get_base_layer() for module in model.modules() if isinstance(module, tuners.BaseTunerLayer))
    return {parameter for module in wrapped for parameter in module.parameters(recurse=False)}
