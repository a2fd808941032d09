"""What a run would take, from a model's configuration alone: host memory, SSD space and SSD traffic.

The model is built without weights, divided into units and planned by the very code of a run. The traffic comes from
replaying one step's order of uses through `stream.py`'s rule (Belady's, two units ahead), and beside it all stands
what ZeRO-Infinity would hold for the same model. For a GPU its memory is planned too, the order of uses is replayed
through its buffers first, and the time of a step follows from the rates of the machine.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import PAGE_BYTES, STAGING_RESERVE
from memascend.common.sizes import format_size
from memascend.durable.generations import parse_durability
from memascend.durable.model_buffers import buffers_bytes
from memascend.errors import BudgetError, CheckpointError, DataError
from memascend.forecast import zero_infinity
from memascend.forecast.step_time import step_flops, step_time
from memascend.formats.config import limits, load_bare_config
from memascend.formats.hugging_face import empty_model
from memascend.layout.units import partition, round_up
from memascend.offloading.activations import STASH_FROM_BYTES
from memascend.optim import NAMED
from memascend.optim.rules import rule_for
from memascend.plan.device import MARGIN_SHARE, DevicePlan, make_device_plan
from memascend.plan.estimates import Shape
from memascend.plan.host import make_plan, smallest_plan
from memascend.residency.order import DEVICE_AHEAD, PREFETCH_UNITS, UseOrder, farthest, smallest_holding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from memascend.layout.units import StoreTensor, Unit
    from memascend.machine.gpu import Rate
    from memascend.plan.host import Line, Plan

#: Kinds of bytes on the SSD, in the order of the tables.
KINDS = {
    "weights": "weights",
    "master": "masters",
    "master_low": "master low halves",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "gradients": "gradients",
    "activations": "activations of recomputed layers",
    "second_slot": "second slot of weights and states",
    "buffers": "buffers",
}


@dataclass(slots=True)
class Work:
    """What one optimizer step computes."""

    seq_len: int
    batch_size: int
    grad_accum: int
    optimizer: str = "adamw"
    states: str = "float32"
    master: bool = True
    #: Whether steps are durable, beside the one before.
    two_slots: bool = True
    #: Where inputs of recomputed layers wait: on the device ("recompute"), in host memory as far as it goes, on SSD.
    activations: str = "host"

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.seq_len * self.batch_size


@dataclass(slots=True)
class Traffic:
    """SSD bytes of one optimizer step, by kind, and bytes of weights copied to a device."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    uploaded: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to compute on."""

    #: Bytes that it has free before a run.
    memory: int
    #: What the machine can do, as `rates.rates_for` returns it.
    rates: Mapping[str, Rate]
    #: "recompute", "host" or "ssd".
    activations: str = "recompute"
    #: Whether the loss makes the logits in pieces.
    fused_loss: bool = False


def forecast(
    path: Path,
    *,
    seq_len: int,
    batch_size: int,
    grad_accum: int = 1,
    dtype: str = "bfloat16",
    budget: int | None = None,
    optimizer: str = "adamw",
    states: str = "float32",
    master: bool = True,
    durability: str = "auto",
    gpu: Gpu | None = None,
) -> dict[str, Any]:
    """Return everything that `memascend plan` shows as one dictionary, ready for JSON.

    Keys (bytes unless they say otherwise; a mapping by kind has the keys `weights_bytes`, `master_bytes`,
    `master_low_bytes`, `exp_avg_bytes`, `exp_avg_sq_bytes`, `momentum_buffer_bytes`, `gradients_bytes`,
    `activations_bytes`, `second_slot_bytes`,
    `buffers_bytes`):

    - `model`: `path`, `model_type`, `architecture`, `dtype`, `parameters` (tied ones once), `largest_parameter`
      (elements), `units`: a list of `name`, `count`, `repeated`, `nbytes`, `total_bytes`, one for each size.
    - `host_memory`: `lines`, a list of `consumer`, `count`, `nbytes`, `total_bytes`, `note`; `total_bytes`, their sum;
      `budget_bytes`; `overlap_bytes`, the least budget with which the next layer is read while one
      computes; `smallest_bytes`, the least that works.
    - `ssd_space`: by kind, and `total_bytes`.
    - `ssd_traffic`: of an optimizer step. `seq_len`, `batch_size`, `grad_accum`; `planned` with what the spare budget
      keeps in memory and `smallest` with the least budget, each with `read` and `written` (by kind, and `total_bytes`),
      `read_bytes_per_parameter`, `written_bytes_per_parameter`; `saved_bytes`, what the spare budget saves.
    - `gpu`, with one: `memory_bytes`, what it has free; `activations`; `device_memory`, as `host_memory`; `step`, as
      `step_time.step_time` returns it.
    - `pytorch`, without a GPU: estimates of what PyTorch holds on top. `logits_bytes`, `layer_bytes`,
      `gradient_bytes`, and `estimated_bytes`, the most that lives at once.
    - `zero_infinity`: by DeepSpeed's formulas. `slots`, `slot_bytes`, `parameter_pool_bytes`, `parameter_pool_waste`
      (a share of 1), `default_parameter_pool_bytes`, `gradient_buffer_bytes`, `optimizer_swap_bytes`,
      `write_back_bytes`, `peak_bytes` (their sum, without the default pool), `peak_pinned_bytes` (with the gradient
      buffer pinned through PyTorch), `overflow_check_float16_bytes` (not in the sum), `ssd_read_bytes`,
      `ssd_written_bytes`, `ssd_bytes_per_parameter`; `ratio`, `peak_bytes` over our `host_memory.total_bytes`, and
      `ratio_to_smallest`, over `host_memory.smallest_bytes`.

    Raises CheckpointError for a configuration that cannot be used, DataError for more tokens than the model has
    positions, BudgetError where a run would.
    """
    config = load_bare_config(path)
    _, positions = limits(config)
    if positions is not None and seq_len > positions:
        raise DataError(f"--seq-len {seq_len} is more than the model's {positions} positions")
    model = empty_model(config, path if path.is_dir() else path.parent, getattr(torch, dtype))
    units = partition(model)
    smallest = smallest_plan(units)
    plan = smallest if budget is None else make_plan(units, budget)
    two_slots = parse_durability(durability) != 0
    work = Work(seq_len, batch_size, grad_accum, optimizer, states, master, two_slots)
    device_plan = None
    if gpu is not None:
        work.activations = gpu.activations
        try:
            device_plan = make_device_plan(
                units,
                None,
                tokens=work.tokens,
                config=config,
                activations=gpu.activations,
                fused_loss=gpu.fused_loss,
                free=gpu.memory,
            )
        except BudgetError as error:
            free = math.ceil(error.smallest_bytes / (1 - MARGIN_SHARE))
            raise BudgetError(
                f"{error}\nOf --gpu 1/16 is left to others: {format_size(free)} ({free} bytes) free would do", free
            ) from None
    space = ssd_space(units, config, work)
    if two_slots:
        space["buffers"] = buffers_bytes(model)
    parameters = sum(place.numel for unit in units for place in unit.places)
    planned, least = (traffic(model, units, made, config, work, device_plan) for made in (plan, smallest))
    return {
        "model": _model_part(path, config, model, units, dtype, parameters),
        "host_memory": _memory_part(plan),
        "ssd_space": _by_kind(space),
        "ssd_traffic": {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "grad_accum": grad_accum,
            "planned": _traffic_part(planned, parameters),
            "smallest": _traffic_part(least, parameters),
            "saved_bytes": sum(_total(least)) - sum(_total(planned)),
        },
        **(
            {"pytorch": pytorch_memory(config, units, work)}
            if gpu is None or device_plan is None
            else {"gpu": _gpu_part(gpu, device_plan, model, units, config, work, planned)}
        ),
        "zero_infinity": _zero_infinity_part(units, plan.total, smallest.total, grad_accum),
    }


def _memory_part(plan: Plan | DevicePlan) -> dict[str, Any]:
    return {
        "lines": [
            {"consumer": x.consumer, "count": x.count, "nbytes": x.nbytes, "total_bytes": x.total, "note": x.note}
            for x in plan.lines
            if x.total
        ],
        "total_bytes": plan.total,
        "budget_bytes": plan.budget,
        "overlap_bytes": plan.overlap_bytes,
        "smallest_bytes": plan.smallest_bytes,
    }


# ---- the model ----------------------------------------------------------------------------------------------


def _model_part(
    path: Path, config: Any, model: nn.Module, units: Sequence[Unit], dtype: str, parameters: int
) -> dict[str, Any]:
    sizes: dict[tuple[bool, int], list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.repeated, unit.nbytes), []).append(unit)
    return {
        "path": str(path),
        "model_type": config.model_type,
        "architecture": type(model).__name__,
        "dtype": dtype,
        "parameters": parameters,
        "largest_parameter": max(place.numel for unit in units for place in unit.places),
        "units": [
            {
                "name": alike[0].name if len(alike) == 1 else f"{alike[0].name} and {len(alike) - 1} like it",
                "count": len(alike),
                "repeated": repeated,
                "nbytes": nbytes,
                "total_bytes": nbytes * len(alike),
            }
            for (repeated, nbytes), alike in sizes.items()
        ],
    }


def uses(model: nn.Module, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
    """Return the units (by number) that a forward pass and its backward pass use, in order.

    Modules run in the order in which the model registers them, which holds for transformers' causal language models.
    The backward pass asks for no embedding: its gradient does not depend on its weight.
    """
    owner = {place.parameter: number for number, unit in enumerate(units) for place in unit.places}
    used: list[tuple[int, bool]] = []
    for module in model.modules():
        wanted = not isinstance(module, nn.Embedding)
        used += [(owner[p], wanted) for p in module._parameters.values() if p is not None and p in owner]
    forward = [number for number, _ in groupby(number for number, _ in used)]
    backward = [number for number, _ in groupby(number for number, wanted in reversed(used) if wanted)]
    return forward, backward


# ---- bytes on the SSD ---------------------------------------------------------------------------------------


def state_kinds(tensor: StoreTensor, work: Work) -> dict[str, int]:
    """Return the bytes of each optimizer state of one tensor, whole pages."""
    _, algorithm, _ = NAMED[work.optimizer]
    # The members of a pack are all small, and so optimized alike.
    rule = rule_for(algorithm, work.states, tensor.dtype, tensor.places[0].nbytes, work.master)
    return {plane.name: round_up(plane.bytes(tensor.numel), PAGE_BYTES) for plane in rule.planes}


def stash_bytes(units: Sequence[Unit], config: Any, work: Work) -> int:
    """Bytes of the input that one recomputed layer puts aside in a forward pass; 0 where it is left where it is."""
    if work.activations == "recompute":
        return 0
    nbytes = work.tokens * config.get_text_config().hidden_size * units[0].tensors[0].dtype.itemsize
    return nbytes if nbytes >= STASH_FROM_BYTES else 0


def ssd_space(units: Sequence[Unit], config: Any, work: Work) -> Counter[str]:
    """Return what the store holds at most, by kind. Gradients of packs stay in memory.

    Of the activations it is all that might have to go there; room is made only for what does.
    """
    space: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for unit in units:
        space["weights"] += unit.nbytes
        for tensor in unit.tensors:
            space.update(state_kinds(tensor, work))
            space["gradients"] += 0 if tensor.packed else tensor.nbytes
    stash = round_up(stash_bytes(units, config, work), PAGE_BYTES)
    if work.two_slots:
        space["second_slot"] = space.total() - space["gradients"]
    space["activations"] = stash * sum(unit.repeated for unit in units)
    return space


def traffic(
    model: nn.Module, units: Sequence[Unit], plan: Plan, config: Any, work: Work, device_plan: DevicePlan | None = None
) -> Traffic:
    """Predict the SSD bytes of one optimizer step in the steady state, of a model trained whole.

    With a `device_plan`, a unit is fetched when the device has not got it.
    """
    moved = Traffic()
    forward, backward = uses(model, units)
    wanted = [[number for number, _ in groupby([*forward, *backward])]] * work.grad_accum
    if device_plan is not None:
        wanted = Replay(units, device_plan.units, DEVICE_AHEAD).step(wanted)
        moved.uploaded = sum(units[number].nbytes for fetched in wanted for number in fetched)
    for number in chain(*Replay(units, plan.units).step(wanted)):
        moved.read["weights"] += units[number].nbytes
    for unit in units:
        # The update on the way into the first forward: everything but the weights' read, which is a fetch like others.
        moved.written["weights"] += unit.nbytes
        for tensor in unit.tensors:
            states = state_kinds(tensor, work)
            moved.read.update(states)
            moved.written.update(states)
    spilled = spill(units, plan, forward, backward, stash_bytes(units, config, work), work)
    moved.read["gradients"] = moved.written["gradients"] = spilled.gradients
    moved.read["activations"] = moved.written["activations"] = spilled.activations
    return moved


@dataclass(slots=True)
class Spill:
    """Bytes of one step that go to the SSD, and come back, for want of staging buffers."""

    gradients: int = 0
    activations: int = 0


def spill(
    units: Sequence[Unit], plan: Plan, forward: Sequence[int], backward: Sequence[int], stash: int, work: Work
) -> Spill:
    """Predict what finds no room in host memory, or is not to, in one optimizer step in the steady state.

    Gradients and the inputs of recomputed layers (`stash` bytes each) share the buffers of the staging. An input comes
    in the forward pass and leaves when the backward pass is through with its layer; a gradient comes in the backward
    pass and leaves in the next step's first forward, when the update of its unit takes it.
    """
    room = max(0, plan.staging.count + plan.kept.count - STAGING_RESERVE)
    # Embeddings come last: only they are absent from the backward pass's own uses.
    captured = list(dict.fromkeys([*backward, *reversed(range(len(units)))]))
    held: dict[StoreTensor, int] = {}
    spilled = Spill()
    for _ in range(3):  # the first steps find no gradients of the step before
        spilled = Spill()
        for turn in range(work.grad_accum):
            inputs: dict[int, int] = {}
            for index, number in enumerate(forward):
                if turn == 0:
                    # The updates run ahead with the prefetch.
                    for ahead in forward[index : index + 1 + PREFETCH_UNITS]:
                        room += sum(held.pop(tensor, 0) for tensor in units[ahead].tensors)
                if units[number].repeated and stash:
                    chunks = 0 if work.activations == "ssd" else -(-stash // plan.staging.nbytes)
                    inputs[number] = kept = min(chunks, room)
                    room -= kept
                    spilled.activations += round_up(max(0, stash - kept * plan.staging.nbytes), PAGE_BYTES)
            for number in captured:
                for tensor in reversed(units[number].tensors):
                    if tensor.packed:
                        continue
                    if turn == 0:
                        held[tensor] = min(-(-tensor.numel // plan.chunk_elements), room)
                        room -= held[tensor]
                    rest = max(0, tensor.numel - held[tensor] * plan.chunk_elements) * tensor.dtype.itemsize
                    # Written by every pass; read by the next pass to be added to, or by the update.
                    spilled.gradients += round_up(rest, PAGE_BYTES)
                room += inputs.pop(number, 0)
    return spilled


class Replay:
    """Follows the rule of `residency.order` with counted buffers, over a known order of uses: tells what is fetched."""

    def __init__(self, units: Sequence[Unit], lines: Sequence[Line], ahead: int = PREFETCH_UNITS) -> None:
        """Use the buffers of `lines`, and fetch so many units `ahead`."""
        self._buffers: Counter[int] = Counter()
        for line in lines:
            self._buffers[line.nbytes] += line.count
        #: By number of a unit: the size of the buffers that serve it.
        self._size = [smallest_holding(unit.nbytes, self._buffers) for unit in units]
        self._ahead = ahead
        self._order: UseOrder[int] = UseOrder()
        self._resident: set[int] = set()
        self._in_use: int | None = None
        self._fetched: list[int] = []

    def step(self, passes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the units fetched in each pass (forward and backward) of one optimizer step; `passes` are the uses."""
        # The step before made every resident unit stale.
        self._resident.clear()
        return [self._fetched_by(uses) for uses in passes]

    def _fetched_by(self, uses: Sequence[int]) -> list[int]:
        self._fetched = []
        self._order.begin_known(uses)
        for number in uses:
            self._order.record(number)
            if number not in self._resident:
                self._in_use = None
                self._fetch(number, sooner_than=-1)
            self._in_use = number
            self._order.prefetch(self._ahead, self._resident.__contains__, self._fetch)
        return self._fetched

    def _fetch(self, number: int, sooner_than: int) -> bool:
        size = self._size[number]
        rivals = [other for other in sorted(self._resident) if self._size[other] == size]
        if len(rivals) >= self._buffers[size]:
            idle = (other for other in rivals if other != self._in_use)
            victim = farthest(idle, self._order.next_use, beyond=sooner_than)
            if victim is None:
                return False
            self._resident.discard(victim)
        self._resident.add(number)
        self._fetched.append(number)
        return True


def _shape(config: Any) -> Shape:
    shape = Shape.of(config)
    if shape is None:
        raise CheckpointError(f"a {config.model_type} configuration does not say what its layers are like")
    return shape


# ---- what PyTorch holds on top --------------------------------------------------------------------------------


def pytorch_memory(config: Any, units: Sequence[Unit], work: Work) -> dict[str, int]:
    """Estimate what PyTorch holds beside the plan's buffers at the worst moment of a step, on the CPU.

    The logits and one layer as `estimates.py` counts them, and gradients. Autograd makes each parameter's gradient
    whole before it is taken over: that of the largest, and beside the head's also the gradient of the logits.

    It is low by 48 MB for both models of benches/results, where the head's gradient is the most. Llamas of width 512
    with 32,000 words: 393 MB where 462 were measured over 1,024 tokens, 786 where 858 over 2,048. Where a layer is the
    most it is furthest off: 164 MB where 314 were measured (width 1,024, MLP 4,096, 2,048 tokens).
    """
    shape = _shape(config)
    itemsize = units[0].tensors[0].dtype.itemsize
    logits, layer = shape.logits_bytes(work.tokens), shape.layer_bytes(work.tokens, itemsize)
    inner = max((place.nbytes for unit in units if unit.repeated for place in unit.places), default=0)
    outer = max((place.nbytes for unit in units if not unit.repeated for place in unit.places), default=0)
    return {
        "logits_bytes": logits,
        "layer_bytes": layer,
        "gradient_bytes": max(inner, outer),
        "estimated_bytes": max(logits, outer + itemsize * work.tokens * shape.vocabulary, layer + inner),
    }


# ---- a step on a GPU ------------------------------------------------------------------------------------------


def _gpu_part(
    gpu: Gpu, plan: DevicePlan, model: nn.Module, units: Sequence[Unit], config: Any, work: Work, moved: Traffic
) -> dict[str, Any]:
    return {
        "memory_bytes": gpu.memory,
        "activations": gpu.activations,
        "device_memory": _memory_part(plan),
        "step": step_time(amounts(model, units, config, work, moved), gpu.rates, tokens=work.tokens * work.grad_accum),
    }


def amounts(model: nn.Module, units: Sequence[Unit], config: Any, work: Work, moved: Traffic) -> dict[str, int]:
    """Return what passes through each of `step_time.RESOURCES` in an optimizer step: operations, or bytes.

    To the GPU go weights and inputs of layers that were put aside, from it the gradients of every pass and those
    inputs. Through host memory goes whatever comes from the SSD and the GPU or goes there, and what the CPU does: an
    update reads gradients, weights and states and writes weights and states; a later pass's gradient is read, added to
    the one there, and written. What the processor's caches may serve (copies of chunks, checksums) is not counted.
    """
    layers = sum(unit.repeated for unit in units)
    inputs = stash_bytes(units, config, work) * layers * work.grad_accum
    weights = sum(unit.nbytes for unit in units)
    states = sum(sum(state_kinds(tensor, work).values()) for unit in units for tensor in unit.tensors)
    ssd = moved.read.total() + moved.written.total()
    h2d, d2h = moved.uploaded + inputs, weights * work.grad_accum + inputs
    update = weights + 2 * (weights + states) + 3 * weights * (work.grad_accum - 1)
    flops = step_flops(model, units, _shape(config), config, work.seq_len, work.batch_size, work.grad_accum)
    return {"flops": flops, "ssd": ssd, "h2d": h2d, "d2h": d2h, "dram": ssd + h2d + d2h + update}


# ---- ZeRO-Infinity ------------------------------------------------------------------------------------------


def _zero_infinity_part(units: Sequence[Unit], ours: int, smallest: int, grad_accum: int) -> dict[str, Any]:
    places = [place for unit in units for place in unit.places]
    itemsize = max(place.dtype.itemsize for place in places)
    numels = [place.numel for place in places]
    total, largest = sum(numels), max(numels)
    outer = [place.numel for unit in units if not unit.repeated for place in unit.places]
    layers = [[place.numel for place in unit.places] for unit in units if unit.repeated]
    slots = max(1, zero_infinity.in_flight_slots(outer, layers, itemsize))
    fullest = max(layers, key=lambda layer: sum(zero_infinity.is_swapped(n, itemsize) for n in layer), default=[])
    held = [numel for numel in [*outer, *fullest] if zero_infinity.is_swapped(numel, itemsize)]
    sub_group = zero_infinity.largest_sub_group(numels)
    read, written = zero_infinity.ssd_traffic_bytes(total, itemsize, grad_accum)
    gradients = zero_infinity.gradient_buffer_bytes(total, itemsize)
    part = {
        "parameter_pool_bytes": zero_infinity.parameter_pool_bytes(largest, slots, itemsize),
        "gradient_buffer_bytes": gradients,
        "optimizer_swap_bytes": zero_infinity.optimizer_swap_bytes(sum(sub_group)),
        "write_back_bytes": zero_infinity.write_back_bytes(sub_group, itemsize),
    }
    peak = sum(part.values())
    return {
        "slots": slots,
        "slot_bytes": zero_infinity.parameter_pool_bytes(largest, 1, itemsize),
        **part,
        "peak_bytes": peak,
        "peak_pinned_bytes": peak - gradients + zero_infinity.pinned_bytes(gradients),
        "parameter_pool_waste": round(zero_infinity.pool_waste(held), 4),
        "default_parameter_pool_bytes": zero_infinity.default_parameter_pool_bytes(largest, itemsize),
        "overflow_check_float16_bytes": zero_infinity.overflow_check_bytes(total, 2),
        "ssd_read_bytes": read,
        "ssd_written_bytes": written,
        "ssd_bytes_per_parameter": round((read + written) / total, 2),
        "ratio": round(peak / ours, 2),
        "ratio_to_smallest": round(peak / smallest, 2),
    }


# ---- as JSON and as text ----------------------------------------------------------------------------------------


def _by_kind(counts: Counter[str]) -> dict[str, int]:
    return {f"{kind}_bytes": counts[kind] for kind in KINDS} | {"total_bytes": counts.total()}


def _total(moved: Traffic) -> tuple[int, int]:
    return moved.read.total(), moved.written.total()


def _traffic_part(moved: Traffic, parameters: int) -> dict[str, Any]:
    read, written = _total(moved)
    return {
        "read": _by_kind(moved.read),
        "written": _by_kind(moved.written),
        "read_bytes_per_parameter": round(read / parameters, 3),
        "written_bytes_per_parameter": round(written / parameters, 3),
    }


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out text to the left in the first column and in those called "for" and "from", numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [title]
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column == 0 or header[column] in ("for", "from") else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _step_text(step: dict[str, Any]) -> str:
    rows = []
    for one in step["resources"]:
        if one["resource"] == "flops":
            amount, rate = f"{one['amount'] / 1e12:.1f} TFLOP", f"{one['per_second'] / 1e12:.1f} TFLOP/s"
        else:
            amount, rate = format_size(one["amount"]), f"{one['per_second'] / 1e9:.2f} GB/s"
        rows.append([one["name"], amount, rate, f"{one['seconds']:.2f}", one["source"]])
    rows.append(["the slowest: all else overlaps", "", "", f"{step['floor_seconds']:.2f}", ""])
    rows.append(["the sum: nothing overlaps", "", "", f"{step['sum_seconds']:.2f}", ""])
    return (
        _table("Time of an optimizer step", ["resource", "amount", "rate", "seconds", "from"], rows)
        + f"\n  bound by {step['bound_by']}: {step['times_the_next']:.1f} times what {step['next']} takes; at most "
        f"{step['tokens_per_second_at_most']:,.0f} tokens/s"
    )


def as_text(found: dict[str, Any]) -> str:
    """Write a forecast as tables, one for each part."""
    model, host, moved, zero = found["model"], found["host_memory"], found["ssd_traffic"], found["zero_infinity"]
    size = format_size
    # What the optimizer does not keep is not worth a row; activations may well come to nothing.
    kinds = {
        kind: label for kind, label in KINDS.items() if found["ssd_space"][f"{kind}_bytes"] or kind == "activations"
    }

    def sums(rows: Sequence[dict[str, Any]], name: str) -> list[list[str]]:
        return [[row[name], str(row["count"]), size(row["nbytes"]), size(row["total_bytes"])] for row in rows]

    def memory(title: str, planned: dict[str, Any], overlap: str) -> str:
        rows = sums(planned["lines"], "consumer")
        return _table(
            title,
            ["consumer", "count", "size", "total", "for"],
            [
                *([*row, line["note"]] for row, line in zip(rows, planned["lines"], strict=True)),
                ["sum", "", "", size(planned["total_bytes"]), ""],
                ["budget", "", "", size(planned["budget_bytes"]), ""],
                [overlap, "", "", size(planned["overlap_bytes"]), "the next layer while one computes"],
                ["least that works", "", "", size(planned["smallest_bytes"]), ""],
            ],
        )

    tables = [
        _table(
            f"{model['architecture']}, {model['parameters']:,} parameters in {model['dtype']}",
            ["unit", "count", "size", "total"],
            sums(model["units"], "name"),
        ),
        memory("Host memory", host, "least that reads ahead"),
        _table(
            "SSD space",
            ["kind", "bytes"],
            [
                *([label, size(found["ssd_space"][f"{kind}_bytes"])] for kind, label in kinds.items()),
                ["total", size(found["ssd_space"]["total_bytes"])],
            ],
        ),
    ]
    rows = []
    for kind, label in [*kinds.items(), ("total", "total")]:
        cells = [
            moved[which][direction][f"{kind}_bytes"]
            for which in ("planned", "smallest")
            for direction in ("read", "written")
        ]
        rows.append([label, *map(size, cells)])
    cells = [
        moved[which][f"{direction}_bytes_per_parameter"]
        for which in ("planned", "smallest")
        for direction in ("read", "written")
    ]
    rows.append(["bytes per parameter", *(f"{cell:.2f}" for cell in cells)])
    tables.append(
        _table(
            f"SSD traffic of an optimizer step: {moved['grad_accum']} x {moved['batch_size']} sequences of "
            f"{moved['seq_len']} tokens",
            ["kind", "read", "written", "least: read", "written"],
            rows,
        )
        + f"\n  what the budget keeps in memory beyond the least saves {size(moved['saved_bytes'])} a step"
    )
    if "gpu" in found:
        gpu = found["gpu"]
        title = f"Device memory, of {size(gpu['memory_bytes'])}: the rest is for CUDA's own context and holes"
        tables.append(memory(title, gpu["device_memory"], "least that copies ahead"))
        tables.append(_step_text(gpu["step"]))
    else:
        torch_part = found["pytorch"]
        tables.append(
            _table(
                "On top: what PyTorch holds (an estimate, measured to be 8% to 48% low, tens of MB where it is small)",
                ["what", "bytes"],
                [
                    ["the logits and their gradients", size(torch_part["logits_bytes"])],
                    ["one layer, recomputed", size(torch_part["layer_bytes"])],
                    ["the largest gradient", size(torch_part["gradient_bytes"])],
                    ["the most at once", size(torch_part["estimated_bytes"])],
                ],
            )
        )
    tables.append(
        _table(
            "Beside it: ZeRO-Infinity's host memory, by DeepSpeed's formulas",
            ["what", "bytes"],
            [
                [f"parameter pool: {zero['slots']} x {size(zero['slot_bytes'])}", size(zero["parameter_pool_bytes"])],
                ["flat gradient buffer", size(zero["gradient_buffer_bytes"])],
                ["optimizer swap buffers", size(zero["optimizer_swap_bytes"])],
                ["weights on their way back", size(zero["write_back_bytes"])],
                ["sum", size(zero["peak_bytes"])],
                ["sum, the gradients pinned by PyTorch", size(zero["peak_pinned_bytes"])],
                ["memascend's, as above", size(host["total_bytes"])],
                ["ratio of the sum to it", f"{zero['ratio']:.1f}"],
                ["ratio to the least that works", f"{zero['ratio_to_smallest']:.1f}"],
                ["SSD bytes per parameter and step", f"{zero['ssd_bytes_per_parameter']:.1f}"],
                ["memascend's", f"{sum(cells[:2]):.1f}"],
            ],
        )
        + f"\n  {zero['parameter_pool_waste']:.0%} of the parameter pool is empty while it holds what is in flight"
    )
    return "\n\n".join(tables)
