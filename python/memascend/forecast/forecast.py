"""Forecast of a run from a model's configuration alone: host memory, SSD space and traffic, the time of a step.

The model is built without weights, divided into units and planned by the code that a run uses. `traffic` replays the
order of uses through the planned buffers. For a GPU, its memory is planned too, and the time of a step follows from the
rates of the machine. ZeRO-Infinity's memory for the same model stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memascend.common.sizes import format_size
from memascend.durability.model_buffers import buffers_bytes
from memascend.errors import BudgetError, CheckpointError, DataError
from memascend.forecast import zero_infinity
from memascend.forecast.activations import KeptLayers, lent
from memascend.forecast.curve import curve
from memascend.forecast.endurance import endurance, savings
from memascend.forecast.experts import compare as experts_compared
from memascend.forecast.fitting import fitting_change
from memascend.forecast.network import network as between_ranks
from memascend.forecast.report import by_kind, memory_part, model_part, traffic_part
from memascend.forecast.step_time import step_flops, step_time
from memascend.forecast.text import as_text
from memascend.forecast.total_memory import MemoryTotal, pytorch_memory
from memascend.forecast.traffic import divided, projection_bytes, ssd_space, stash_bytes, state_kinds, traffic
from memascend.forecast.workload import Workload
from memascend.formats.config import limits, load_bare_config
from memascend.formats.weights import empty_model_of, stay_published
from memascend.hardware.memory_limits import resident_memory
from memascend.hardware.segments import Segments
from memascend.hardware.threads import update_threads
from memascend.layout.bits import COMPUTED_IN
from memascend.layout.frozen_bits import quantise_units
from memascend.memory_plan.auto_budget import plan_for
from memascend.memory_plan.device import MARGIN_SHARE, DevicePlan, make_device_plan
from memascend.memory_plan.estimates import Shape, waiting_inputs
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.options import parse_durability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from memascend.forecast.traffic import Traffic
    from memascend.hardware.gpu import Rate
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Plan

__all__ = ["Gpu", "as_text", "forecast"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compute on."""

    #: Bytes that it has free before a run.
    memory: int
    #: Rates of the machine, as `memascend.hardware.gpu.rates_for` returns them.
    rates: Mapping[str, Rate]
    #: "recompute", "host" or "ssd".
    activations: str = "recompute"
    #: Whether the loss makes the logits in pieces.
    fused_loss: bool = False
    #: How PyTorch's allocator cuts its memory; the least favourable of all GPUs unless it is known.
    segments: Segments | None = field(default_factory=Segments.of)


def forecast(
    path: Path,
    *,
    seq_len: int,
    batch_size: int,
    grad_accum: int = 1,
    micro_batch_size: int | None = None,
    tile_tokens: int | str | None = None,
    boundaries: bool = False,
    dtype: str = "bfloat16",
    dtype_reason: str | None = None,
    budget: int | str | None = None,
    optimizer: str = "adamw",
    states: str = "float32",
    master: bool = True,
    gradients: str = "auto",
    update: str = "forward",
    durability: str = "auto",
    kept: int = 0,
    gpu: Gpu | None = None,
    with_curve: bool = False,
    ssd: Rate | None = None,
    steps: int | None = None,
    tbw: float | None = None,
    busiest_share: float = 1.0,
    ranks: int = 1,
    network: Rate | None = None,
    adapters_bytes: int | None = None,
    experts: str = "whole",
    spare_memory: str = "auto",
    processor: Mapping[str, Rate] | None = None,
    base_bits: int | None = None,
    compare: str | None = None,
) -> dict[str, Any]:
    """Return everything that `memascend plan` shows as one dictionary, ready for JSON.

    `memascend.forecast.report` describes its keys. Without a `budget` the least host memory that works is planned,
    and for "auto" the budget with which a run would begin on this machine now.
    `boundaries`: packed documents are apart in attention, by a mask, where the model makes one.
    `kept` is how many generations the store keeps beside the last steps', such as the best model.
    `dtype_reason` says why the model is trained in `dtype`, where that was chosen for the user. `with_curve` adds the
    savings of other budgets, and the time that the drives would take where the rate of `ssd`, or the `gpu`, is given.
    Over several `ranks` the forecast is of the first of them, and `network` is the rate of their network, in bytes per
    second in each direction. `adapters_bytes`: the model's weights stay as they are, and adapters with their
    gradients and states take so many bytes of memory. `experts` and `spare_memory` are as in `memascend.offload`; a
    run alone finds the division of "auto", and "states" is planned for it. `base_bits`: linear
    weights under adapters are quantised (see `memascend.from_pretrained` on `frozen_bits`); without it layers that are
    quantised in the directory's files stay so under adapters, where they can. `processor` has the rates
    ("flops", "update") of this machine, for the time of a step on it. `steps`, `tbw` (terabytes) and `busiest_share`
    are inputs of `memascend.forecast.endurance`, the writes of the whole run. `compare` "zero-infinity" adds the memory
    and traffic of ZeRO-Infinity.

    Raises:
        CheckpointError: the configuration cannot be used.
        DataError: a sequence has more tokens than the model has positions, or an option is not one of a GPU's, or of a
            run over ranks.
        BudgetError: the budget, or the GPU, is too small for a run.
    """
    config = load_bare_config(path)
    _, positions = limits(config)
    if positions is not None and seq_len > positions:
        raise DataError(f"--seq-len {seq_len} is more than the model's {positions} positions")
    lends = spare_memory == "activations"
    _check(gpu, ranks, adapters_bytes is not None, gradients, update, experts, base_bits, dtype, lends)
    model = empty_model_of(config, _directory(path), getattr(torch, dtype))
    if adapters_bytes is not None:
        model.requires_grad_(False)
        durability = "none"  # Adapters have checkpoints of their own.
    on_device = gpu is not None

    def units_of(experts: str) -> tuple[list[Unit], bool]:
        units = divided(model, on_device, gradients, ranks, experts, update)
        if base_bits is not None:
            quantise_units(model, units, base_bits)
        stays = base_bits is None and adapters_bytes is not None and experts != "pieces"
        return units, stays and stay_published(model, _directory(path), units)

    units, published = units_of(experts)
    period = parse_durability(durability)
    # By itself a run chooses durable steps, where the drives have the room.
    work = Workload(
        seq_len,
        batch_size,
        grad_accum,
        optimizer,
        states,
        master,
        1 if period is None else period,
        micro_batch_size=micro_batch_size,
        tile_tokens=tile_tokens,
        boundaries=boundaries,
        kept=kept,
        ranks=ranks,
        experts=experts,
    )
    options: dict[str, Any] = {"update": update, "on_device": on_device, "threads": update_threads(on_device)}
    if gpu is not None and gpu.activations == "host":
        options["inputs"] = waiting_inputs(units, config, work.tokens, work.layer_tokens)
    smallest = smallest_plan(units, **options)
    plan, follows = (smallest, False) if budget is None else plan_for(units, budget, **options, lends=lends)
    device_plan = None
    if gpu is not None:
        work.activations = gpu.activations
        device_plan = _plan_device(units, config, work, gpu)
    space = ssd_space(units, config, work)
    if work.period:
        space["buffers"] = buffers_bytes(model)
    if lends:
        plan = lent(plan, units, config, work)
    kept_layers = KeptLayers.of(plan, units, config, work)
    planned, least = (traffic(model, units, made, config, work, device_plan) for made in (plan, smallest))
    prediction: dict[str, Any] = {
        "model": model_part(path, config, model, units, dtype)
        | {"dtype_reason": dtype_reason, "base_bits": base_bits, "published": published},
        "host_memory": memory_part(plan)
        | {
            "freed_blocks_bytes": plan.freed_blocks_bytes,
            "kept_layers": kept_layers.kept,
            "kept_layers_of": kept_layers.calls,
            "kept_layers_bytes": kept_layers.total_bytes,
            "automatic": follows,
        },
        "ssd_space": by_kind(space),
        "ssd_traffic": traffic_part(planned, least, units, work),
        "endurance": endurance(
            planned,
            units,
            steps=steps,
            tbw=tbw,
            busiest_share=busiest_share,
            savings=()
            if adapters_bytes is not None
            else savings(
                model,
                units,
                plan,
                config,
                work,
                device_plan,
                plans_for=None if gpu is None else partial(_plans_on_device, units, config, gpu, plan.budget, options),
            ),
        ),
    }
    if ranks > 1:
        prediction["network"] = between_ranks(units, work, planned)
    drives = {} if ssd is None else {"ssd": ssd}
    if network is not None and gpu is None:
        moved = {"network": prediction["network"]["busiest_bytes"], "ssd": planned.total}
        prediction["step"] = step_time(moved, {"network": network} | drives, tokens=work.step_tokens)
    elif gpu is None and processor is not None and Shape.of(config) is not None:
        passes = amounts(model, units, config, work, planned, kept_layers.share)
        if adapters_bytes is not None:  # The gradients of the weights are not made, which is a quarter of the products.
            passes |= {"flops": passes["flops"] * 3 // 4, "update": 3 * adapters_bytes}
        prediction["step"] = step_time(passes, {**processor} | drives, tokens=work.step_tokens)
    beside: int | None = 0
    if gpu is None or device_plan is None:
        prediction["pytorch"] = estimates = pytorch_memory(
            config, _directory(path), getattr(torch, dtype), work, projections=projection_bytes(units, work)
        )
        beside = None if estimates is None else estimates["estimated_bytes"]
    else:
        prediction["gpu"] = _gpu_part(gpu, device_plan, model, units, config, work, planned)
    if with_curve:
        seconds = _seconds(model, units, config, work, gpu, ssd)
        prediction["curve"] = curve(model, units, smallest, config, work, device_plan, seconds)
    held = adapters_bytes or 0
    whole = MemoryTotal.of(plan.total + plan.freed_blocks_bytes + held, beside, resident_memory())
    whole = whole.with_activations(kept_layers.total_bytes)
    prediction["whole"] = whole.as_dict()
    if not whole.fits and gpu is None:
        prediction["fits_with"] = fitting_change(
            whole, smallest.total + held, units, config, _directory(path), getattr(torch, dtype), work
        )
    if not on_device and ranks == 1 and base_bits is None and tile_tokens is None:
        within = None if budget is None else plan.budget
        prediction["experts"] = experts_compared(model, lambda way: units_of(way)[0], within, config, work, options)
    if compare == "zero-infinity":
        prediction["zero_infinity"] = zero_infinity.beside_it(units, plan.total, smallest.total, work)
    return prediction


def _check(
    gpu: Gpu | None,
    ranks: int,
    adapters: bool,
    gradients: str,
    update: str,
    experts: str,
    base_bits: int | None,
    dtype: str,
    lends: bool,
) -> None:
    """Raise DataError for options that contradict each other, or that a GPU or a run over ranks does not have."""
    pieces, over_ranks = experts == "pieces", ranks > 1
    for refused, text in (
        (gpu is not None and adapters, "--lora-rank is planned only on the CPU: leave out --lora-rank or --gpu"),
        (
            gpu is not None and gradients != "auto",
            f"--gradients {gradients} works only on the CPU: leave out --gradients or --gpu",
        ),
        (
            pieces and (gpu is not None or over_ranks),
            "--experts pieces is planned only on the CPU, in one process: leave out --gpu and --ranks",
        ),
        (
            base_bits is not None and not adapters,
            "--base-bits quantises weights that are not trained: give --lora-rank too",
        ),
        (
            base_bits is not None and dtype != COMPUTED_IN,
            f"--base-bits {base_bits} computes in {COMPUTED_IN}: leave out --dtype {dtype}",
        ),
        (
            base_bits is not None and pieces,
            "--base-bits does not work yet with --experts pieces: leave one of them out",
        ),
        (
            lends and (gpu is not None or over_ranks),
            "--spare-memory activations works only on the CPU, in one process: leave it out",
        ),
        (over_ranks and adapters, "--lora-rank works only in one process: leave out --lora-rank or --ranks"),
        (
            over_ranks and gradients != "auto",
            f"--gradients {gradients} does not work yet over ranks: use auto",
        ),
        (over_ranks and update != "forward", f"--update {update} does not work yet over ranks: use forward"),
    ):
        if refused:
            raise DataError(text)


def _seconds(
    model: nn.Module, units: Sequence[Unit], config: Any, work: Workload, gpu: Gpu | None, ssd: Rate | None
) -> Callable[[Traffic], float] | None:
    """Return how long a step with some traffic takes, where the rate of the GPU or of the drives is known."""
    if gpu is not None:

        def on_gpu(moved: Traffic) -> float:
            passes = amounts(model, units, config, work, moved)
            return float(step_time(passes, gpu.rates, tokens=work.step_tokens)["floor_seconds"])

        return on_gpu
    return None if ssd is None else lambda moved: moved.total / ssd.per_second


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _plan_device(units: Sequence[Unit], config: Any, work: Workload, gpu: Gpu) -> DevicePlan:
    try:
        return make_device_plan(
            units,
            None,
            tokens=work.tokens,
            layer_tokens=work.layer_tokens,
            tile_tokens=work.tile_tokens,
            config=config,
            activations=gpu.activations,
            fused_loss=gpu.fused_loss,
            free=gpu.memory,
            segments=gpu.segments,
        )
    except BudgetError as error:
        free = math.ceil(error.smallest_bytes / (1 - MARGIN_SHARE))
        raise BudgetError(
            f"{error}\n1/16 of --gpu is left to other programs: {format_size(free)} ({free} bytes) are enough", free
        ) from None


def _plans_on_device(
    units: Sequence[Unit], config: Any, gpu: Gpu, budget: int, options: Mapping[str, Any], work: Workload
) -> tuple[Plan, DevicePlan] | None:
    """Return the plans of host and device memory for another step, or None where it does not fit."""
    if gpu.activations == "host":
        options = {**options, "inputs": waiting_inputs(units, config, work.tokens, work.layer_tokens)}
    try:
        return make_plan(units, budget, **options), _plan_device(units, config, work, gpu)
    except BudgetError:
        return None


def _shape(config: Any) -> Shape:
    shape = Shape.of(config)
    if shape is None:
        raise CheckpointError(f"a {config.model_type} configuration does not describe its layers")
    return shape


# ---- a step on a GPU ------------------------------------------------------------------------------------------


def _gpu_part(
    gpu: Gpu, plan: DevicePlan, model: nn.Module, units: Sequence[Unit], config: Any, work: Workload, moved: Traffic
) -> dict[str, Any]:
    return {
        "memory_bytes": gpu.memory,
        "activations": gpu.activations,
        "device_memory": memory_part(plan),
        "step": step_time(amounts(model, units, config, work, moved), gpu.rates, tokens=work.step_tokens),
    }


def amounts(
    model: nn.Module, units: Sequence[Unit], config: Any, work: Workload, moved: Traffic, kept: float = 0.0
) -> dict[str, int]:
    """Return the load of each of `step_time.RESOURCES` in an optimizer step: operations, or bytes.

    Weights and the inputs of layers that were put aside are copied to the GPU; the gradients of every pass, but for
    sums that stay there until the last one, and those inputs are copied from it. Through host memory passes everything
    that comes from or goes to the SSD and the GPU, and the operands of the CPU: an update reads gradients, weights and
    states and writes weights and states; the gradient of a later pass is read, added to the one there, and written,
    where it does not stay on the GPU. Accesses that the processor's caches may serve (copies of chunks, checksums) are
    not counted. The update's bytes stand by themselves, too: a few threads move fewer than memory has room for. Over
    ranks, sent and received bytes pass through host memory too, and the gradients of all ranks are read to be added.

    A share `kept` of the layers is not computed again.
    """
    layers = sum(unit.repeated for unit in units)
    inputs = stash_bytes(units, config, work) * layers * work.grad_accum
    weights = sum(unit.stored_nbytes for unit in units)
    states = sum(sum(state_kinds(tensor, work).values()) for unit in units for tensor in unit.tensors)
    ssd = moved.total
    # Over ranks a unit has the padding of every share.
    gradients = sum(unit.nbytes if work.ranks == 1 else sum(p.nbytes for p in unit.places) for unit in units)
    later = work.grad_accum - 1
    h2d, d2h = moved.uploaded + inputs, gradients + (gradients - moved.sums) * later + inputs
    update = weights + 2 * (weights + states)
    sums = 3 * (weights - moved.sums) * later
    passes = work.seq_len, work.batch_size, work.grad_accum
    flops = step_flops(model, units, _shape(config), config, *passes, tiled=work.tiled, kept=kept)
    passed = {"flops": flops, "ssd": ssd, "h2d": h2d, "d2h": d2h, "update": update}
    passed["dram"] = ssd + h2d + d2h + update + sums
    if work.ranks > 1:
        passed["network"] = between_ranks(units, work, moved)["busiest_bytes"]
        passed["dram"] += 2 * passed["network"] + gradients * work.grad_accum
    return passed
