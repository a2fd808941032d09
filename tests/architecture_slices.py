"""One architecture of transformers whose layers run on slices of its batch, offloaded and in memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import architecture_runs
import bits
import small_models
import torch
import transformers

import memascend

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def run(pipe: Any, name: str, room: Path) -> None:
    """Send what becomes of the architecture `name` with micro-batches of one row, and why."""
    architecture_runs._keep_quiet()
    pipe.send(outcome(name, room))


def outcome(name: str, room: Path) -> tuple[str, str]:
    """Return "sliced", "whole" where some layers see the whole batch, "refused", "wrong" or "not trained", and why."""
    try:
        pristine, inputs = architecture_runs.find(getattr(transformers, name))
    except (architecture_runs.NotBuiltError, architecture_runs.NotTrainedError) as error:
        return "not trained", str(error)
    if far := _apart(_evaluated(pristine, inputs, sliced=False), _evaluated(pristine, inputs, sliced=True)):
        return "wrong", f"slices do not compute what the whole batch does: {far}"
    in_memory, model = memascend.run_in_slices(copy.deepcopy(pristine), 1), copy.deepcopy(pristine)
    expected = architecture_runs.train(in_memory, inputs)
    try:
        memascend.offload(model, store=room / "store", micro_batch_size=1, **architecture_runs.WHERE)
        wrong = bits.differing(architecture_runs.train(model, inputs), expected)
        notices = [notice for notice in memascend.stats(model)["notices"] if "whole batch" in notice]
        memascend.close(model)
    except memascend.MemascendError as error:
        return "refused", architecture_runs.reason_of(error, room)
    if wrong:
        again = architecture_runs.train(memascend.run_in_slices(copy.deepcopy(pristine), 1), inputs)
        if bits.differing(again, expected):
            return "not trained", "in memory, too, two runs differ"
        return "wrong", architecture_runs.told(wrong, expected)
    return ("whole", notices[0]) if notices else ("sliced", "")


def _evaluated(pristine: nn.Module, inputs: dict[str, Any], sliced: bool) -> list[torch.Tensor]:
    """Return what a model computes without dropout and without a cache, on slices or not."""
    model = copy.deepcopy(pristine).eval()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    if sliced:
        memascend.run_in_slices(model, 1)
    architecture_runs.seed(20)
    with torch.no_grad():
        return list(small_models.tensors_of(model(**architecture_runs.fresh(inputs))))


def _apart(whole: list[torch.Tensor], sliced: list[torch.Tensor]) -> str:
    """Say where two outputs differ by more than roundings."""
    if [tensor.shape for tensor in whole] != [tensor.shape for tensor in sliced]:
        return "other shapes"
    for number, (one, other) in enumerate(zip(whole, sliced, strict=True)):
        if one.is_floating_point():
            largest = float(one.abs().nan_to_num(posinf=0, neginf=0).max()) if one.numel() else 0.0
            if not torch.allclose(one, other, rtol=1e-2, atol=1e-3 * largest + 1e-9, equal_nan=True):
                return f"output {number} is off by {(one - other).abs().max():.3g}, of {largest:.3g}"
    return ""
