"""Traffic of an optimizer step and space of the store: replayed, without a run.

The order of uses is replayed through counted buffers by the rule of the weight cache (`replay`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import PAGE_BYTES, STAGING_RESERVE, Projection
from memascend.autograd.recompute import STASH_FROM_BYTES
from memascend.forecast.kinds import KINDS
from memascend.forecast.replay import Replay
from memascend.layout.division import divide
from memascend.layout.experts import fused_experts
from memascend.layout.shards import channels_of
from memascend.layout.units import round_up
from memascend.memory_plan.experts import partition_by_plan
from memascend.memory_plan.host import updates_in_backward
from memascend.optim import NAMED
from memascend.optim.apollo_moments import EXPERTS_NDIM, expert_numel, scratch_bytes
from memascend.optim.apollo_ranks import Division
from memascend.optim.rules import rule_for
from memascend.streaming.order import DEVICE_AHEAD, PREFETCH_UNITS
from memascend.streaming.resident_states import kept_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Set

    from memascend._memascend import Rule
    from memascend.forecast.workload import Workload
    from memascend.layout.units import ParameterEntry, StoreTensor, Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan

#: The passes of a step that are replayed. By then each is like one of the last `PASSES_ALIKE`, and so are all further
#: ones: their bytes are added by multiplication, since a step may have any number of passes.
PASSES_MAX, PASSES_ALIKE = 24, 12


@dataclass(slots=True)
class Traffic:
    """SSD bytes of one optimizer step, by kind, bytes of weights copied to a device, and bytes that ranks gather."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    uploaded: int = 0
    #: Bytes of sums of gradients that stay on the device until the last pass.
    sums: int = 0
    #: Over ranks: of the units that are gathered, the bytes that each rank's store has, one as often as it is gathered.
    gathered: int = 0

    @property
    def total(self) -> int:
        """SSD bytes read and written."""
        return self.read.total() + self.written.total()

    def with_more(self, fewer: Traffic, passes: int) -> Traffic:
        """Return the traffic of a step with so many more passes, where `fewer` is of `PASSES_ALIKE` passes less."""

        def more(now: int, before: int) -> int:
            return now + passes * (now - before) // PASSES_ALIKE

        def all_of(now: Counter[str], before: Counter[str]) -> Counter[str]:
            return Counter({kind: more(nbytes, before[kind]) for kind, nbytes in now.items()})

        return Traffic(
            all_of(self.read, fewer.read),
            all_of(self.written, fewer.written),
            more(self.uploaded, fewer.uploaded),
            self.sums,
            more(self.gathered, fewer.gathered),
        )


def divided(
    model: nn.Module,
    on_gpu: bool = False,
    gradients: str = "auto",
    ranks: int = 1,
    experts: str = "whole",
    update: str = "forward",
) -> list[Unit]:
    """Divide a model into the units of a run; over ranks, into the first rank's: all have as many bytes.

    `experts` and `update` are as in `memascend.offload`. Raises ValueError where experts cannot be read so.
    """
    # Tables are whole over ranks.
    fused_loss = None if ranks > 1 else "auto"
    units = partition_by_plan(
        model, fused_loss=fused_loss, gradients=gradients, uploaded=on_gpu, experts=experts, update=update
    )
    if ranks > 1:
        divide(units, 0, ranks)
    return units


def uses(model: nn.Module, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
    """Return the units (by number) that a forward pass and its backward pass use, in order.

    Modules are assumed to run in the order in which the model registers them, which holds for transformers' causal
    language models. The backward pass uses no embedding: its gradient does not depend on its weight.
    """
    owner = {place.parameter: number for number, unit in enumerate(units) for place in unit.places}
    used: list[tuple[int, bool]] = []
    for module in model.modules():
        wanted = not isinstance(module, nn.Embedding)
        used += [(owner[p], wanted) for p in module._parameters.values() if p is not None and p in owner]
    forward = _in_turn(units, (number for number, _ in used))
    backward = _in_turn(units, (number for number, wanted in reversed(used) if wanted))
    return forward, backward


def _in_turn(units: Sequence[Unit], used: Iterable[int]) -> list[int]:
    """Return the units as a pass uses them one after another: a layer stays in use around its experts and tables."""
    turns: list[int] = []
    around = None
    for number in used:
        if number not in (around, *turns[-1:]):
            turns.append(number)
        if not units[number].in_layer:
            around = number
    return turns


def state_kinds(tensor: StoreTensor, work: Workload) -> dict[str, int]:
    """Return the bytes of each optimizer state of one tensor, in whole pages."""
    return {plane.name: round_up(plane.bytes(tensor.numel), PAGE_BYTES) for plane in _rule(tensor, work).planes}


def projection(tensor: StoreTensor, work: Workload) -> Projection | None:
    """Return the projection of a tensor's gradient, if it is a large matrix of a repeated layer, by APOLLO.

    Each expert has its own, which the step makes.
    """
    _, algorithm, options = NAMED[work.optimizer]
    (place, *others) = tensor.places
    if algorithm != "apollo" or others or tensor.packed:
        return None
    if not (_holds_experts(tensor) or (len(place.shape) == 2 and tensor.unit.repeated)):
        return None
    rows, columns = place.shape[-2:]
    return Projection(rows, columns, options["rank"], 0, 0)


def _holds_experts(tensor: StoreTensor) -> bool:
    """Return whether a tensor is experts that APOLLO takes for matrices: over ranks it takes none."""
    place = tensor.places[0]
    if len(place.shape) != EXPERTS_NDIM or tensor.shard is not None:
        return False
    experts = (parameter for module in tensor.unit.modules for _, _, parameter in fused_experts(module))
    return any(parameter is place.parameter for parameter in experts)


def projections(units: Sequence[Unit], work: Workload) -> Iterator[tuple[StoreTensor, Projection]]:
    """Yield the tensors whose gradients are projected, and how."""
    for tensor in (tensor for unit in units for tensor in unit.tensors if tensor.trained):
        projected = projection(tensor, work)
        if projected is not None:
            yield tensor, projected


def projection_bytes(units: Sequence[Unit], work: Workload) -> int:
    """Return the most bytes that the projection of a gradient takes beside the plan, in the backward pass.

    Over ranks the step does it: the bytes are of the rank that needs most.
    """
    _, _, options = NAMED[work.optimizer]
    sizes = []
    for tensor, projected in projections(units, work):
        if tensor.shard is None:
            sizes.append(scratch_bytes(projected, options["rank"]))
        else:
            division = Division(projected, 0, tensor.shard)
            sizes += [division.memory_bytes(rank) for rank in range(work.ranks)]
    return max(sizes, default=0)


def moments_bytes(tensor: StoreTensor, work: Workload) -> int:
    """Return the bytes of both moments of a tensor's projected gradient, in whole pages."""
    projected = projection(tensor, work)
    if projected is None:
        return 0
    shape = tensor.places[0].shape
    if len(shape) == EXPERTS_NDIM:
        return shape[0] * expert_numel(shape, projected.rank) * torch.float32.itemsize
    _, channels = channels_of(shape, 0, tensor.shard)
    return round_up(2 * channels * projected.rank * torch.float32.itemsize, PAGE_BYTES)


def _rule(tensor: StoreTensor, work: Workload) -> Rule:
    _, algorithm, _ = NAMED[work.optimizer]
    if algorithm == "apollo":
        if projection(tensor, work) is not None:
            return rule_for(algorithm, "float32", tensor.dtype, 0, work.master)
        algorithm = "adamw"
    # All members of a pack are small, so one rule holds for them.
    return rule_for(algorithm, work.states, tensor.dtype, tensor.places[0].nbytes, work.master)


def _states_kept(units: Sequence[Unit], plan: Plan, work: Workload) -> dict[StoreTensor, dict[str, int]]:
    """Return the bytes of each tensor's states that stay in memory."""
    rules = {tensor: _rule(tensor, work) for unit in units for tensor in unit.tensors if tensor.trained}
    sizes = [(tensor.numel, sum(plane.bytes(tensor.numel) for plane in rule.planes)) for tensor, rule in rules.items()]
    return {
        tensor: {plane.name: round_up(plane.bytes(kept), PAGE_BYTES) for plane in rule.planes}
        for (tensor, rule), kept in zip(rules.items(), kept_elements(plan, sizes), strict=True)
    }


def stash_bytes(units: Sequence[Unit], config: Any, work: Workload) -> int:
    """Return the bytes of the input that a recomputed layer puts aside in a forward pass, 0 if it stays in place."""
    if work.activations == "recompute":
        return 0
    width_bytes = config.get_text_config().hidden_size * units[0].tensors[0].dtype.itemsize
    return work.tokens * width_bytes if work.layer_tokens * width_bytes >= STASH_FROM_BYTES else 0


def ssd_space(units: Sequence[Unit], config: Any, work: Workload) -> Counter[str]:
    """Return the most that the store holds, by kind. Gradients of packs stay in memory.

    All activations count that might be moved to the store; a run makes room only for moved ones.
    """
    space: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for unit in units:
        space["weights"] += unit.stored_nbytes
        for tensor in (tensor for tensor in unit.tensors if tensor.trained):
            space.update(state_kinds(tensor, work))
            space["moments"] += moments_bytes(tensor, work)
            space["gradients"] += 0 if tensor.packed else tensor.gradient_nbytes
            projected = _projection_put_aside(tensor, work)
            space["projections"] += 0 if projected is None else _put_aside(projected)[1]
    stash = round_up(stash_bytes(units, config, work), PAGE_BYTES)
    if work.period:
        space["second_slot"] = space.total() - space["gradients"] - space["projections"]
        space["kept"] = work.kept * space["second_slot"]
    space["activations"] = stash * sum(unit.repeated for unit in units)
    return space


def traffic(
    model: nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    config: Any,
    work: Workload,
    device_plan: DevicePlan | None = None,
) -> Traffic:
    """Predict the SSD bytes of one optimizer step in the steady state, of a model trained whole.

    With a `device_plan`, a unit is fetched only when the device does not hold it, and over ranks gathered only then;
    nothing is copied there ahead of a gather.
    """
    if work.grad_accum <= PASSES_MAX:
        return _replayed(model, units, plan, config, work, device_plan)
    most, fewer = (
        _replayed(model, units, plan, config, replace(work, grad_accum=passes), device_plan)
        for passes in (PASSES_MAX, PASSES_MAX - PASSES_ALIKE)
    )
    return most.with_more(fewer, work.grad_accum - PASSES_MAX)


def _replayed(
    model: nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    config: Any,
    work: Workload,
    device_plan: DevicePlan | None,
) -> Traffic:
    """Return the result of `traffic` by replaying every pass."""
    moved = Traffic()
    forward, backward = uses(model, units)
    #: How often a step reads each table by blocks: for the loss, and for the gradient of the weights.
    tables = [number for number, unit in enumerate(units) if unit.is_table]
    by_blocks = {number: 2 * work.grad_accum if units[number].is_head else 0 for number in tables}
    apart = set[int]()
    if device_plan is not None:
        apart = {number for number in tables if units[number] not in device_plan.whole_tables}
        by_blocks = {number: by_blocks[number] if number in apart else 1 for number in tables}
    before_turn, after_turn = ([number for number in uses if number not in apart] for uses in (forward, backward))
    order = [number for number, _ in groupby([*before_turn, *after_turn])]
    wanted, passing, late = [order] * work.grad_accum, frozenset[int](), list[int]()
    if device_plan is not None:
        on_device = Replay(units, device_plan.units, DEVICE_AHEAD if work.ranks == 1 else 0)
        wanted = on_device.step(wanted)
        moved.uploaded = sum(units[number].nbytes for fetched in wanted for number in fetched)
        moved.uploaded += sum(_copied_by_parts(model, units[number], work, number in apart) for number in tables)
        if _in_backward(plan, work):
            late = _embeddings(model, units)
            changing = {
                n for n, unit in enumerate(units) if any(map(updates_in_backward, unit.tensors)) and n not in late
            }
            wanted[0], passing = _with_updates(changing, order, len(before_turn), on_device.fetches)
    if work.ranks > 1:
        moved.gathered = sum(units[number].stored_nbytes for number, _ in groupby(chain(*wanted)))
    streamed = {number for number, unit in enumerate(units) if unit.is_table and unit not in plan.whole_tables}
    staying = {units.index(unit) for unit in plan.resident_units}
    fetched = [[number for number in uses if number not in streamed | staying] for uses in wanted]
    # The backward pass updates weights where they are, so that the next pass finds some of them.
    changes = any(tensor.trained for unit in units for tensor in unit.tensors)
    replay = Replay(units, plan.units, taken=staying, stale=changes and not _in_backward(plan, work))
    for _ in range(2):
        found = replay.step(fetched, passing)
    for number in [*chain(*found), *replay.missing(late)]:
        moved.read["weights"] += units[number].stored_nbytes
    for number in streamed:
        if not units[number].is_experts:
            moved.read["weights"] += _read_by_blocks(model, units[number], work, by_blocks[number])
    moved.read["weights"] += _read_of_experts([unit for unit in units if unit.is_experts], plan, config, work)
    _add_updates(moved, units, plan, work, staying)
    sums_bytes = 0 if device_plan is None else device_plan.sums_bytes
    spilled = spill(units, plan, forward, backward, stash_bytes(units, config, work), work, sums_bytes)
    moved.sums = min(sums_bytes, sum(place.nbytes for unit in units for place in unit.places))
    moved.read["gradients"] = spilled.gradients + spilled.projected_later
    moved.written["gradients"] = spilled.gradients
    moved.read["activations"] = moved.written["activations"] = spilled.activations
    moved.read["projections"] = spilled.projections
    moved.written["projections"] = spilled.projections * work.grad_accum
    return moved


def _add_updates(moved: Traffic, units: Sequence[Unit], plan: Plan, work: Workload, staying: set[int]) -> None:
    """Add the bytes of the updates: weights that are written, and states. The weights of `staying` units stay.

    The fetch for the first forward pass carries the update; `traffic` counts its read of the weights.
    """
    states_kept = _states_kept(units, plan, work)
    for number, unit in enumerate(units):
        trained = [tensor for tensor in unit.tensors if tensor.trained]
        if trained:
            moved.written["weights"] += int(unit.stored_nbytes * (work.written_share if number in staying else 1))
        for tensor in trained:
            for kind, nbytes in state_kinds(tensor, work).items():
                kept = states_kept[tensor][kind]
                moved.read[kind] += nbytes - kept
                moved.written[kind] += nbytes - kept + int(kept * work.written_share)
            moved.read["moments"] += moments_bytes(tensor, work)
            moved.written["moments"] += moments_bytes(tensor, work)


def _read_of_experts(units: Sequence[Unit], plan: Plan, config: Any, work: Workload) -> int:
    """Return the bytes read of experts, if tokens are sent to as many of each layer as they can reach.

    The forward pass, its recomputation and the backward pass of a layer read them, each once but for those that stay.
    Of trained ones the update reads all, after which none are in memory.
    """
    text = config.get_text_config()
    per_token = getattr(text, "num_experts_per_tok", None) or 1
    tokens = work.layer_tokens * per_token
    used: Counter[str] = Counter()
    for place in (place for unit in units for place in unit.places):
        layer = place.name.rpartition(".")[0]
        used[layer] += min(place.shape[0], tokens) * place.expert_nbytes
    if not used:
        return 0
    total, of_layer, stay = used.total(), max(used.values()), sum(line.total for line in plan.experts)
    # Found by the backward pass of a layer, which has just been computed again, and by a pass that turns round.
    within, beyond = int(total * min(1, stay / of_layer)), total if stay >= total else max(0, stay - of_layer)
    updated = sum(unit.nbytes for unit in units if unit.tensors[0].trained)
    return updated + (beyond if updated else 0) + work.grad_accum * work.slices * (3 * total - within - 2 * beyond)


def _with_updates(
    changing: Set[int], order: Sequence[int], turn: int, uploads: Sequence[tuple[int, int]]
) -> tuple[list[int], frozenset[int]]:
    """Return the uses of host memory in a pass whose backward pass updates weights, on a device.

    `order` are the uses there, and the backward pass begins with the use before number `turn`; `uploads` are the number
    of a use and the unit that was copied for it. Each unit of `changing` is also needed for its update, which reads
    missing weights without a buffer: the numbers of these uses come second.
    """
    needed: list[int] = []
    copied, passing = set(uploads), set[int]()
    for number, unit in enumerate(order):
        if (number, unit) not in copied:
            if number < turn - 1 or unit not in changing:
                continue
            passing.add(len(needed))
        needed.append(unit)
    return needed, frozenset(passing)


def _embeddings(model: nn.Module, units: Sequence[Unit]) -> list[int]:
    """Return the units whose gradient comes last, an embedding's among them, that the backward pass updates."""
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return [
        number
        for number, unit in enumerate(units)
        if any(updates_in_backward(place.tensor) and place.parameter in parameters for place in unit.places)
    ]


def _in_backward(plan: Plan, work: Workload) -> bool:
    """Return whether the backward pass updates weights where it can."""
    return plan.update == "backward" and work.grad_accum == 1


def _updated_early(tensor: StoreTensor, plan: Plan, work: Workload) -> bool:
    """Return whether such a backward pass updates a tensor; experts that are projected wait for a device's step."""
    waits = plan.on_device and len(tensor.places[0].shape) == EXPERTS_NDIM and projection(tensor, work) is not None
    return updates_in_backward(tensor) and not waits


def _row_bytes(place: ParameterEntry) -> int:
    return place.nbytes // place.shape[0]


def _lookups(model: nn.Module, place: ParameterEntry, work: Workload) -> int:
    """Return how often a pass looks up rows of a table; a layer that is computed again does so twice."""
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
    if not any(parameter is place.parameter for module in modules for parameter in module._parameters.values()):
        return 0
    return 2 if work.recompute and place.tensor.unit.in_layer else 1


def _copied_by_parts(model: nn.Module, unit: Unit, work: Workload, apart: bool) -> int:
    """Return the bytes of a table that go to a device by rows, and by blocks if it has no buffer there (`apart`)."""
    (place,) = unit.places
    rows = min(work.tokens * _row_bytes(place), place.nbytes) * _lookups(model, place, work)
    # A table that is there already after the first pass needs no rows of the host.
    if not apart:
        return rows
    return work.grad_accum * (rows + (2 * place.nbytes if unit.is_head else 0))


def _read_by_blocks(model: nn.Module, unit: Unit, work: Workload, by_blocks: int) -> int:
    """Return the bytes read of a table without a buffer: by its update, by rows for lookups, `by_blocks` as a whole."""
    (place,) = unit.places
    updates = int(unit.tensors[0].trained)
    row_bytes = _row_bytes(place)
    rows = work.tokens * (round_up(row_bytes, PAGE_BYTES) + (PAGE_BYTES if row_bytes % PAGE_BYTES else 0))
    looked_up = min(rows, unit.nbytes) * _lookups(model, place, work)
    return unit.nbytes * (updates + by_blocks) + work.grad_accum * looked_up


@dataclass(slots=True)
class Spill:
    """Bytes of one step that go to the SSD, and come back, for want of staging buffers."""

    gradients: int = 0
    activations: int = 0
    #: Projected gradients: written by every pass, and read by the step.
    projections: int = 0
    #: Gradients of experts, and all over ranks: the step projects them, and reads them once more.
    projected_later: int = 0


def _projection_put_aside(tensor: StoreTensor, work: Workload) -> Projection | None:
    """Return how the gradient of a tensor is projected as it is captured, if it is.

    The step projects gradients of experts, and all over ranks.
    """
    later = tensor.shard is not None or len(tensor.places[0].shape) == EXPERTS_NDIM
    return None if later else projection(tensor, work)


def _read_once_more(tensor: StoreTensor, in_memory: int, plan: Plan) -> int:
    """Return the bytes read of a gradient that the step projects, whose first `in_memory` elements are in memory.

    Gradients of experts are read one by one, each from the start of a chunk on.
    """
    shape, chunk = tensor.places[0].shape, plan.chunk_elements
    numel, bytes_each = math.prod(shape[-2:]), tensor.gradient_dtype.itemsize
    if len(shape) != EXPERTS_NDIM:
        return round_up(max(0, tensor.numel - in_memory) * bytes_each, PAGE_BYTES)
    ends = [(expert + 1) * numel for expert in range(shape[0])]
    read = (end - max(in_memory, (end - numel) // chunk * chunk) for end in ends)
    return sum(round_up(elements * bytes_each, PAGE_BYTES) for elements in read if elements > 0)


def _put_aside(projected: Projection) -> tuple[int, int]:
    """Return the elements that a projected gradient takes where it is put aside, in bfloat16, and its bytes."""
    elements = 2 * projected.numbers
    return elements, round_up(elements * torch.bfloat16.itemsize, PAGE_BYTES)


def spill(
    units: Sequence[Unit],
    plan: Plan,
    forward: Sequence[int],
    backward: Sequence[int],
    stash: int,
    work: Workload,
    sums_bytes: int = 0,
) -> Spill:
    """Predict the spills of one optimizer step in the steady state: bytes that host memory has no room for.

    Gradients and the inputs of recomputed layers (`stash` bytes each) share the staging buffers. An input takes its
    buffers in the forward pass and gives them back when the backward pass has left its layer. A gradient takes its
    buffers in the backward pass and gives them back in the next step's first forward pass, to the update of its unit.
    Of accumulated gradients `sums_bytes` stay on a device until the last pass.
    """
    # Staging buffers that are free, and by tensor those that its gradient holds.
    room = max(0, plan.staging.count + plan.staging_cache.count - STAGING_RESERVE)
    # The gradients of embeddings come last: the backward pass uses every other unit.
    captured = list(dict.fromkeys([*backward, *reversed(range(len(units)))]))
    held: dict[StoreTensor, int] = {}
    #: Those that projected gradients hold, until the step takes them.
    projected_held = 0
    #: Tensors whose sums stay on the device until the last pass.
    on_device = set()
    for tensor in (tensor for number in captured for tensor in reversed(units[number].tensors)):
        if not tensor.packed and tensor.gradient_nbytes <= sums_bytes:
            sums_bytes -= tensor.gradient_nbytes
            on_device.add(tensor)
    spilled = Spill()
    for _ in range(3):  # the first steps find no gradients of the step before
        spilled = Spill()
        room, projected_held = room + projected_held, 0
        for turn in range(work.grad_accum):
            inputs: dict[int, int] = {}
            for index, number in enumerate(forward):
                if turn == 0:
                    # The updates run ahead with the prefetch.
                    for ahead in forward[index : index + 1 + PREFETCH_UNITS]:
                        room += sum(held.pop(tensor, 0) for tensor in units[ahead].tensors)
                if units[number].repeated and stash:
                    # Each slice has chunks of its own.
                    each = min(plan.staging.nbytes, -(-stash // work.slices))
                    chunks = 0 if work.activations == "ssd" else -(-stash // each)
                    inputs[number] = min(chunks, room)
                    room -= inputs[number]
                    in_memory = inputs[number] * each
                    spilled.activations += round_up(max(0, stash - in_memory), PAGE_BYTES)
            for number in captured:
                for tensor in reversed(units[number].tensors):
                    if (
                        tensor.packed
                        or not tensor.trained
                        or (_in_backward(plan, work) and _updated_early(tensor, plan, work))
                    ):
                        continue
                    if tensor in on_device and turn < work.grad_accum - 1:
                        continue
                    if turn == 0 or tensor not in held:
                        held[tensor] = min(-(-tensor.numel // plan.chunk_elements), room)
                        room -= held[tensor]
                    outside = max(0, tensor.numel - held[tensor] * plan.chunk_elements)
                    # Written by every pass; read by the next pass, which adds to it, or by the
                    # update.
                    outside_bytes = round_up(outside * tensor.gradient_dtype.itemsize, PAGE_BYTES)
                    spilled.gradients += outside_bytes
                    projected = _projection_put_aside(tensor, work)
                    if turn == 0 and projected is None and projection(tensor, work) is not None:
                        in_memory = held[tensor] * plan.chunk_elements
                        spilled.projected_later += _read_once_more(tensor, in_memory, plan)
                    first = turn == 0 or tensor in on_device
                    if first and projected is not None:
                        elements, nbytes = _put_aside(projected)
                        chunks = min(-(-elements // plan.chunk_elements), room)
                        room, projected_held = room - chunks, projected_held + chunks
                        in_memory = chunks * plan.chunk_elements * torch.bfloat16.itemsize
                        spilled.projections += max(0, nbytes - in_memory)
                room += inputs.pop(number, 0)
    return spilled
