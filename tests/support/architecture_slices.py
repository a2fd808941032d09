"""One architecture of transformers, its layers on slices of the batch or parts on tiles, offloaded and in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import architecture_runs
import bit_equality
import small_models
import torch
import transformers
from torch.utils import _pytree as pytree

import memascend
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


@dataclass(frozen=True)
class Cut:
    """A way to have less at once."""

    option: str
    size: int
    in_memory: Callable[[nn.Module, int], nn.Module]
    #: The notice about layers that are not cut.
    said: str


#: The most that tiles may be off the values in float64, as a multiple of the whole's distance: 2.4 for ViTMAE.
NEAR = 8
#: Micro-batches of one row, and tiles of three tokens.
SLICES = Cut("micro_batch_size", 1, memascend.run_in_slices, "whole batch")
TILES = Cut("tile_tokens", 3, memascend.run_in_tiles, "whole sequences")


def run(pipe: Any, name: str, room: Path) -> None:
    """Send the outcome of the architecture `name` on slices and then on tiles, and the reasons."""
    architecture_runs._keep_quiet()
    try:
        found = architecture_runs.find(getattr(transformers, name))
    except (architecture_runs.NotBuiltError, architecture_runs.NotTrainedError) as error:
        for _ in (SLICES, TILES):
            pipe.send(("not trained", str(error)))
        return
    for cut in (SLICES, TILES):
        pipe.send(outcome(*found, room / cut.option, cut))


def outcome(pristine: nn.Module, inputs: dict[str, Any], room: Path, cut: Cut) -> tuple[str, str]:
    """Return what becomes of a model, and why.

    "cut"; "partly" where some layers are not; "whole" where none is; "none" where it has no repeated layer that is
    called with more than a slice or a tile; "refused"; "wrong"; "not trained" where two runs in memory differ.
    """
    gradients = sum(1 for _ in pristine.parameters()) if cut is TILES else 0
    whole, in_parts = (_evaluated(pristine, inputs, cut, applied) for applied in (False, True))
    if (far := _apart(whole, in_parts, gradients)) and not _as_near(whole, in_parts, _exact(pristine, inputs, cut)):
        return "wrong", f"they do not compute as the whole does: {far}"
    in_memory, model = cut.in_memory(copy.deepcopy(pristine), cut.size), copy.deepcopy(pristine)
    expected = architecture_runs.train(in_memory, inputs)
    try:
        memascend.offload(model, store=room, **{cut.option: cut.size}, **architecture_runs.WHERE)
        wrong = bit_equality.differing(architecture_runs.train(model, inputs), expected)
        notices = [notice for notice in memascend.stats(model)["notices"] if cut.said in notice]
        some = _has_cut(model, cut)
        memascend.close(model)
    except memascend.MemascendError as error:
        return "refused", architecture_runs.reason_of(error, room)
    if wrong:
        again = architecture_runs.train(cut.in_memory(copy.deepcopy(pristine), cut.size), inputs)
        if bit_equality.differing(again, expected):
            return "not trained", "in memory, too, two runs differ"
        return "wrong", architecture_runs.told(wrong, expected)
    why = notices[0].partition(": ")[2] if notices else ""
    return {(True, False): "cut", (True, True): "partly", (False, True): "whole"}.get((some, bool(why)), "none"), why


def _has_cut(model: nn.Module, cut: Cut) -> bool:
    """Return whether some layers of an offloaded model run on slices, or parts with matrices on tiles."""
    session = offload_of(model)
    if cut is TILES:
        assert session.tiling is not None
        return any(reasons is None for reasons in session.tiling._whole.values())
    assert session.slicing is not None
    return any(not isinstance(joins, str) for joins in session.slicing._tried.values())


def _evaluated(pristine: nn.Module, inputs: dict[str, Any], cut: Cut, applied: bool) -> list[torch.Tensor]:
    """Return the outputs of a model without dropout and without a cache, cut or not; for tiles its gradients too."""
    model = copy.deepcopy(pristine).eval()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    if applied:
        cut.in_memory(model, cut.size)
    architecture_runs.seed(20)
    with torch.set_grad_enabled(cut is TILES):
        outputs = model(**architecture_runs.fresh(inputs))
    tensors = [tensor.detach() for tensor in small_models.tensors_of(outputs)]
    if cut is not TILES:
        return tensors
    small_models.loss_of(outputs).backward()
    return tensors + [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _apart(whole: list[torch.Tensor], sliced: list[torch.Tensor], gradients: int) -> str:
    """Say where two outputs differ by more than roundings; the last `gradients` of them are gradients.

    A gradient that is zero but for roundings has the roundings of the products whose sum it is: as of a bias of keys,
    and all of them where the outputs are normalised, and with them the loss.
    """
    if [tensor.shape for tensor in whole] != [tensor.shape for tensor in sliced]:
        return "other shapes"
    first = len(whole) - gradients
    rounding = max(1e-6 * _largest(whole[first:]), 1e-7 * _largest(whole[:first]))
    for number, (one, other) in enumerate(zip(whole, sliced, strict=True)):
        if one.is_floating_point():
            largest = _largest([one])
            least = 1e-3 * largest + 1e-9 + (rounding if number >= first else 0.0)
            if not torch.allclose(one, other, rtol=1e-2, atol=least, equal_nan=True):
                return f"output {number} is off by {(one - other).abs().max():.3g}, of {largest:.3g}"
    return ""


def _exact(pristine: nn.Module, inputs: dict[str, Any], cut: Cut) -> list[torch.Tensor]:
    """Return the outputs of a model in float64, not cut; for tiles its gradients too."""
    wide = pytree.tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, inputs)
    return _evaluated(copy.deepcopy(pristine).double(), wide, cut, applied=False)


def _as_near(whole: list[torch.Tensor], in_parts: list[torch.Tensor], exact: list[torch.Tensor]) -> bool:
    """Return whether outputs are as near to those in float64 as the whole's are, to some times their distance.

    So a gradient is judged that is smaller than the roundings of either, as of ViTMAE's class token: it begins as
    zeros, and a norm makes the loss depend on nothing.
    """
    if [tensor.shape for tensor in whole] != [tensor.shape for tensor in in_parts]:
        return False
    for one, other, true in zip(whole, in_parts, exact, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
        elif one.numel() and not (other - true).abs().max() <= NEAR * (one - true).abs().max():
            return False
    return True


def _largest(tensors: list[torch.Tensor]) -> float:
    """Return the largest finite magnitude of floating-point tensors, 0 if there is none."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return max((float(one.abs().nan_to_num(posinf=0, neginf=0).max()) for one in floats), default=0.0)
