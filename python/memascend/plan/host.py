"""The host memory plan: every consumer on a line, summed and checked before anything starts.

The plan is all that memascend holds: the arena's classes, and bookkeeping of Python, autograd and Rust, as constants
per parameter and unit that were fitted to `benches/plan_accuracy.py`. PyTorch's own temporaries are not in it;
`forecast/` estimates them.

There are two sets of size classes. Either one class per size, with two buffers for repeated layers, so that the next
layer is read while one computes; or, when the budget does not hold that, one buffer for all units by turns, the least
memory that works. Units that one module needs together, or that are in use around others, keep buffers of their own in
either. A module that reads another layer's weights in mid-pass cannot be foreseen: by turns it finds no buffer, and the
error names the budget with which it does.

Chunks shrink with the budget, so that pipeline and staging take 1/6 of it at most; results do not depend on the chunk
size. The least plan has eight slots with any number of threads, so that it does not depend on the machine. A slot is as
large as AdamW with fp32 moments needs, since a plan is made before the optimizer is known: rules that keep more per
element (AMSGrad) move in halves of a chunk.

Experts that are read one by one have two buffers of each size, and keep theirs as far as the budget has room. Tables
come last: all tables share two buffers for blocks, and a table gets a buffer of its own size where the budget has room
for it after everything else. The remainder keeps optimizer states, after everything that saves more per byte: a byte of
a gradient saves its write and its read, one of a weight two reads, one of a state a read, and a write where not every
step is durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memascend._memascend import FILE_WINDOW_BYTES, FILE_WINDOWS, GRADIENT_BLOCK, PAGE_BYTES
from memascend.common.sizes import format_size
from memascend.errors import BudgetError
from memascend.layout.division import sent_bytes
from memascend.layout.tables import MIB
from memascend.layout.units import SMALL_MODULE_BYTES, round_up
from memascend.machine.limits import available_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import Place, StoreTensor, Unit

#: Elements of a chunk of the update pipeline, at least and at most; a multiple of the block over
#: which gradient statistics are summed.
CHUNK_ELEMENTS_MIN = GRADIENT_BLOCK
CHUNK_ELEMENTS_MAX = 262_144
#: Bytes that an element of an update takes beside its weight: two fp32 moments, the gradient and,
#: for bf16 weights, the low half of the master. Rules that keep more (AMSGrad) move in smaller
#: pieces.
UPDATE_BYTES_PER_ELEMENT = 12
#: With fp16 weights, whose master is whole.
UPDATE_BYTES_PER_FLOAT16_ELEMENT = 14
#: Of that, the gradient is not kept from one step to the next. AdamW's states of a weight, by its dtype.
STATE_BYTES_PER_ELEMENT = {torch.bfloat16: 10, torch.float16: 12, torch.float32: 8}
#: Chunks of an update in the pipeline at once: some being read, one computed, some being written. This many work with
#: any number of threads, and are all that the least plan has.
UPDATE_SLOTS = 8
#: With room, each thread that updates has one chunk that it computes, one that is read and one that is written.
UPDATE_SLOTS_PER_THREAD = 3
#: Fraction of resident states lost to rounding at the ends of tensors and buffers.
STATES_ROUNDING = 0.02
#: Staging chunks that transfers under way need; chunks beyond keep gradients off the SSD.
STAGING_CHUNKS = 16
STATES_STAGING_CHUNKS = 4
#: Chunks shrink until pipeline and staging together take no more than this share of a budget. Small
#: chunks cost time: 65,536 elements took 1.1 to 1.3 times the step of 196,608 with 0.51B
#: parameters.
TRANSFER_SHARE = 1 / 6
#: Gradients that the backward pass is applying: one under way, and the next.
APPLIED_GRADIENTS = 2
#: Buffers of a repeated unit: the one in use and the next; a third lets the previous one linger.
REPEATED_BUFFERS_MIN = 2
REPEATED_BUFFERS = 3
#: Buffers for blocks of tables: the one in use and the next. With a device: the one that is copied there and the next,
#: and as many for the gradient of a block that comes back.
BLOCK_BUFFERS = 2
#: Buffers for experts that are read one by one, of each size: the one in use and the next.
EXPERT_BUFFERS = 2
#: Share of a budget that holds everything, for malloc's freed blocks.
HEAP_BYTES = 256 * 2**20
#: Bookkeeping of Python, autograd and Rust beside the arena, as benches/plan_accuracy.py measures it.
BOOKKEEPING_BYTES = 4 * 2**20
BOOKKEEPING_BYTES_PER_UNIT = 64 * 2**10
BOOKKEEPING_BYTES_PER_PARAMETER = 16 * 2**10
#: Checksums of the blocks of a MiB of a frozen table, once a row of the MiB was read.
BLOCK_SUMS_BYTES = 1088
#: The checksum of 4 KiB of quantised weights beside the store.
SUM_BYTES = 4


@dataclass(slots=True)
class Line:
    """One consumer of memory: `count` buffers of `nbytes` bytes, and their purpose."""

    consumer: str
    nbytes: int
    count: int
    note: str = ""

    @property
    def total(self) -> int:
        """Bytes of all buffers, each rounded up to a page."""
        return round_up(self.nbytes, PAGE_BYTES) * self.count


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of repeated layers that wait in host memory from the forward pass to the backward pass."""

    #: Bytes of one: of a layer, or of a slice of the batch that goes through a layer.
    nbytes: int
    #: Those of one layer.
    per_layer: int = 1

    def chunks(self, chunk_bytes: int) -> int:
        """Return the chunks that one layer's inputs take."""
        return -(-self.nbytes // chunk_bytes) * self.per_layer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that stay where a budget changes."""

    chunk_elements: int
    slots: int


@dataclass(slots=True)
class Plan:
    """Host memory of one run, to the byte: everything memascend holds, in the arena and beside it."""

    budget: int
    units: list[Line] = field(default_factory=list)
    packs: list[Line] = field(default_factory=list)
    slots: Line = field(default_factory=lambda: Line("update pipeline", 0, 0))
    staging: Line = field(default_factory=lambda: Line("staging", 0, 0))
    #: Buffers of the staging's size that keep data off the SSD.
    kept: Line = field(default_factory=lambda: Line("kept off the SSD", 0, 0))
    #: Buffers in which states stay from one step to the next.
    states: Line = field(default_factory=lambda: Line("states kept in memory", 0, 0))
    bookkeeping: Line = field(default_factory=lambda: Line("bookkeeping", 0, 0))
    #: Beside the arena.
    windows: Line = field(default_factory=lambda: Line("windows into files", FILE_WINDOW_BYTES, 0))
    #: Gradients of autograd that are held until the update in the backward pass has used them.
    applied: Line = field(default_factory=lambda: Line("gradients being applied", 0, 0))
    #: Gradients of small tensors that were frozen when the plan was made.
    later: Line = field(default_factory=lambda: Line("gradients of what trains later", 0, 0))
    #: Buffers of exchanges between ranks, where the store is divided over them.
    exchanged: Line = field(default_factory=lambda: Line("exchanged between ranks", 0, 0))
    chunk_elements: int = CHUNK_ELEMENTS_MIN
    #: Blocks of tables that are read by blocks.
    blocks: Line = field(default_factory=lambda: Line("vocabulary, by blocks", 0, 0, "in use, next"))
    #: Experts that are read one by one, by size.
    experts: list[Line] = field(default_factory=list)
    #: Tables that have a buffer of their own, because there is room.
    whole_tables: list[Unit] = field(default_factory=list)
    #: Units with a buffer of their own, in which their weights stay from one step to the next.
    staying: list[Unit] = field(default_factory=list)
    #: Whether malloc may keep freed blocks: everything stays in memory, and the budget has room left for them.
    retain_heap: bool = False
    #: One buffer serves all large units.
    by_turns: bool = False
    #: The least budget that works, and one with which the next layer is read while one computes, in
    #: full-size chunks.
    smallest_bytes: int = 0
    overlap_bytes: int = 0
    #: When large tensors are updated; see `memascend.options`.
    update: str = "forward"
    #: Whether gradients are made on a device.
    on_device: bool = False
    #: Threads that run the kernels of updates.
    update_threads: int = 1
    #: Inputs of layers that are to stay in host memory, where they are known.
    inputs: Inputs | None = None
    #: For a budget that may change: the plan of the largest, for whose buffers addresses are reserved.
    most: Plan | None = None

    @property
    def arena(self) -> list[Line]:
        """The lines of the consumers in the arena."""
        return [*self.buffers, *self.packs, self.slots, self.staging, self.kept, self.states]

    @property
    def buffers(self) -> list[Line]:
        """The lines of the buffers that weights are read into."""
        return [*self.units, *([self.blocks] if self.blocks.count else []), *self.experts]

    @property
    def lines(self) -> list[Line]:
        """The lines of all consumers."""
        return [*self.arena, self.windows, self.applied, self.later, self.exchanged, self.bookkeeping]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, which is reserved as a whole."""
        return sum(line.total for line in self.arena)

    @property
    def total(self) -> int:
        """Bytes that all consumers take together, in the arena and beside it."""
        return sum(line.total for line in self.lines)

    def table(self) -> str:
        """Write the plan with a line per consumer."""
        return table_of(self.lines)


def table_of(lines: Sequence[Line]) -> str:
    """Write a line per consumer, of those that take anything, and their sum."""
    lines = [line for line in lines if line.count]
    width = max((len(line.consumer) for line in lines), default=len("total"))
    rows = [
        f"  {line.consumer:<{width}} {line.count:>5} x {format_size(line.nbytes):>10} = "
        f"{format_size(line.total):>10}  {line.note}".rstrip()
        for line in lines
    ]
    total = format_size(sum(line.total for line in lines))
    return "\n".join([*rows, f"  {'total':<{width}} {'':>5}   {'':>10}   {total:>10}"])


def make_plan(
    units: Sequence[Unit],
    budget: int,
    most: int | None = None,
    update: str = "forward",
    on_device: bool = False,
    threads: int = 1,
    inputs: Inputs | None = None,
) -> Plan:
    """Size the pool for `units`: first the needs, then where a spare byte saves most.

    With `most`, the budget may change later, up to that: see `replan`. `update` is as in `memascend.options`, and
    `threads` threads carry it out; `on_device` says that a device makes the gradients. `inputs` of layers are kept off
    the SSD beside the gradients, as far as the budget has room.

    Raises BudgetError, with the smallest budget that works, when `budget` is too small.
    """
    if most is None:
        return _plan(units, budget, update, on_device, threads, inputs)
    if most < budget:
        raise BudgetError(
            f"host_memory_max is {format_size(most)}, less than the {format_size(budget)} of host_memory", budget
        )
    plan = _plan(units, budget, update, on_device, threads, inputs, elastic=True)
    plan.most = _plan(units, most, update, on_device, threads, inputs, elastic=True, sizes=_sizes_of(plan))
    return plan


def replan(plan: Plan, units: Sequence[Unit], budget: int) -> Plan:
    """Return `plan`, which was made for a budget that may change, with another budget.

    Buffers are as large as before, and there are other numbers of them. Raises BudgetError where the budget is too
    small, or larger than the largest.
    """
    assert plan.most is not None
    if budget > plan.most.budget:
        raise BudgetError(
            f"{format_size(budget)} is more than the host_memory_max of {format_size(plan.most.budget)} that the model "
            "was opened with",
            plan.smallest_bytes,
        )
    made_for = (plan.update, plan.on_device, plan.update_threads, plan.inputs)
    changed = _plan(units, budget, *made_for, elastic=True, sizes=_sizes_of(plan))
    changed.most = plan.most
    return changed


def _sizes_of(plan: Plan) -> Sizes:
    return Sizes(plan.chunk_elements, plan.slots.count)


def _plan(
    units: Sequence[Unit],
    budget: int,
    update: str,
    on_device: bool,
    threads: int,
    inputs: Inputs | None,
    *,
    elastic: bool = False,
    sizes: Sizes | None = None,
) -> Plan:
    """Make a plan; `elastic`: buffers are of the same sizes with every budget, for chunks and slots of `sizes`."""
    tensors = [tensor for unit in units for tensor in unit.tensors]
    plan = Plan(budget, update=update, on_device=on_device, update_threads=threads, inputs=inputs)
    packed: dict[int, int] = {}
    for tensor in tensors:
        if tensor.packed and tensor.trained:
            nbytes = tensor.gradient_nbytes
            packed[nbytes] = packed.get(nbytes, 0) + 1
    if any(tensor.shard is not None for tensor in tensors):
        _add_exchange(plan, units, packed)
    plan.packs = [
        Line("gradients of small tensors", nbytes, count, "until the update")
        for nbytes, count in sorted(packed.items())
    ]
    _add_bookkeeping(plan, units)
    early = [tensor for tensor in tensors if updates_early(tensor)] if update == "backward" else []
    if early and not on_device:  # from where a gradient passes through staging, chunk by chunk
        nbytes = max(tensor.numel * tensor.dtype.itemsize for tensor in early)
        plan.applied.nbytes, plan.applied.count = nbytes, min(APPLIED_GRADIENTS, len(early))
        plan.applied.note = "beside the arena: autograd's, until their update"
    plan.later = later_line(tensors)
    if not all(unit.in_store for unit in units):
        plan.windows.count, plan.windows.note = FILE_WINDOWS, "frozen weights read where they are"

    tables = [unit for unit in units if unit.is_table]
    units = [unit for unit in units if not unit.is_table]
    _add_blocks(plan, units, tables)
    experts = _add_experts(plan, [*units, *tables])
    pieces = [table for table in tables if table.is_experts]
    tables = [table for table in tables if not table.is_experts]
    classes = classes_apart(units)
    parts_bytes = max([plan.blocks.nbytes, *(line.nbytes for line in plan.experts)])
    by_turns = classes if elastic else classes_by_turns(units, parts_bytes)
    apart, together = (sum(kind.line.total for kind in planned) for planned in (classes, by_turns))
    smallest = sizes or Sizes(CHUNK_ELEMENTS_MIN, UPDATE_SLOTS)
    least = plan.total + _transfer_bytes(plan, tensors, smallest.chunk_elements, STAGING_CHUNKS, smallest.slots)
    plan.overlap_bytes = plan.total + _transfer_bytes(plan, tensors, CHUNK_ELEMENTS_MAX, STAGING_CHUNKS) + apart
    plan.smallest_bytes = least + min(apart, together)
    if together < apart and budget < least + apart:
        plan.by_turns, classes = True, by_turns
    plan.units = [kind.line for kind in classes]
    _fit_transfers(plan, tensors, STAGING_CHUNKS, sizes)
    if elastic:
        plan.smallest_bytes = plan.total  # with chunks of this size, which stays

    # A third buffer per repeated size lets the next prefetch start before the last user is gone.
    spare = budget - plan.total
    for kind in classes:
        if kind.repeated and len(kind.members) >= REPEATED_BUFFERS > kind.line.count and kind.line.nbytes <= spare:
            spare -= kind.line.total // kind.line.count
            kind.line.count += 1
    # A gradient or activation byte kept in memory saves a write and a read; a weight byte saves one
    # read, so it comes second.
    plan.kept.count = min(_kept_chunks(plan, [*units, *pieces], tables, early), spare // plan.kept.nbytes)
    spare -= plan.kept.total
    for kind in classes:
        size = max(round_up(kind.line.nbytes, PAGE_BYTES), 1)
        extra = min(len(kind.members) - kind.line.count, spare // size)
        kind.line.count += extra
        spare -= extra * size
        if kind.line.count >= len(kind.members):
            plan.staying += kind.members
        kind.line.note = why(kind)
    spare = _keep_experts(plan, experts, spare)
    # Last, a table in memory saves the reads of its blocks.
    # Blocks are not needed once all tables are whole; a smaller budget would need them again. To and from a device rows
    # and gradients pass through them.
    blocks_stay = elastic or bool(experts) or any(table.is_uploaded for table in tables)
    blocks = 0 if blocks_stay else plan.blocks.total
    spare += blocks
    for kind in sorted(classes_apart(tables), key=lambda kind: kind.line.nbytes):
        kind.line.count = len(kind.members)
        whole = [*plan.whole_tables, *(table for table in tables if table.nbytes == kind.line.nbytes)]
        if kind.line.total + (blocks if len(whole) < len(tables) else 0) > spare:
            break
        spare -= kind.line.total
        kind.line.note = why(kind)
        plan.units.append(kind.line)
        plan.whole_tables = whole
        plan.staying += kind.members
    if len(plan.whole_tables) == len(tables) and not blocks_stay:
        plan.blocks.count = 0
    _keep_states(plan, tensors)
    return plan


def _kept_chunks(plan: Plan, units: Sequence[Unit], tables: Sequence[Unit], early: Sequence[StoreTensor]) -> int:
    """Return the chunks with which no gradient and no input of a layer goes to the SSD.

    A layer's update frees its gradients in the forward pass, from the first layer to the last, as inputs come. A
    device's first input comes before the first update has ended; after the last the tables' gradients may be there.
    """

    def chunks(tensors: Sequence[StoreTensor]) -> int:
        return sum(-(-tensor.numel // plan.chunk_elements) for tensor in tensors)

    def waiting(of: Sequence[Unit]) -> list[list[StoreTensor]]:
        return [[t for t in unit.tensors if t.trained and not t.packed and t not in early] for unit in of]

    layers, vocabulary = [chunks(unit) for unit in waiting(units)], sum(map(chunks, waiting(tables)))
    wanted = sum(layers) + vocabulary
    if plan.inputs is not None:
        one = plan.inputs.chunks(plan.kept.nbytes)
        wanted = max(wanted + one, vocabulary + max(layers, default=0) + one * sum(unit.repeated for unit in units))
    if plan.on_device and early:
        # With room for the gradients of one unit, the device is free of them while their updates run.
        wanted += max(chunks([tensor for tensor in unit.tensors if tensor in early]) for unit in units)
    return wanted


def later_line(tensors: Sequence[StoreTensor]) -> Line:
    """Return the line of the gradients that lie beside the arena, because their tensors were frozen at first."""
    outside = [tensor.gradient_nbytes for tensor in tensors if tensor.gradient_outside and not tensor.trained]
    return Line("gradients of what trains later", sum(outside), min(len(outside), 1), "beside the arena")


def _add_exchange(plan: Plan, units: Sequence[Unit], packed: dict[int, int]) -> None:
    """Plan the exchanges of ranks, and a buffer for the sum of a gradient block in each dtype.

    A unit's gradients are autograd's until they have been sent, and received bytes are at most as many. A device's
    gradients are copied to memory that is kept for them. Gloo gathers a tensor's weights beside the buffer that they
    are for.
    """
    trained = [tensor for unit in units for tensor in unit.tensors if tensor.trained]
    for itemsize in {tensor.gradient_dtype.itemsize for tensor in trained}:
        nbytes = GRADIENT_BLOCK * itemsize
        packed[nbytes] = packed.get(nbytes, 0) + 1
    gradients = max((_exchanged_bytes(unit) for unit in units), default=0)
    whole = max((t.nbytes * t.shard.ranks for unit in units for t in unit.tensors if t.shard is not None), default=0)
    plan.exchanged.nbytes, plan.exchanged.count = max(gradients, -(-(gradients + whole) // 2)), 2
    plan.exchanged.note = "beside the arena: sent and received"


def _exchanged_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's gradients as they are sent to all ranks."""
    return sum(
        sent_bytes(place, rank)
        for tensor in unit.tensors
        if tensor.trained and tensor.shard is not None
        for place in tensor.places
        for rank in range(tensor.shard.ranks)
    )


def updates_early(tensor: StoreTensor) -> bool:
    """Return whether the backward pass can update a tensor: it moves alone, and as a whole."""
    return tensor.trained and not tensor.packed and not tensor.unit.is_table


def _keep_states(plan: Plan, tensors: Sequence[StoreTensor]) -> None:
    """Spend the remainder on resident states: a byte saves a read, and a write where steps are not durable."""
    trained = [tensor for tensor in tensors if tensor.trained]
    nbytes = plan.chunk_elements * max((STATE_BYTES_PER_ELEMENT[tensor.dtype] for tensor in trained), default=0)
    if not nbytes:
        return
    needed = sum(STATE_BYTES_PER_ELEMENT[tensor.dtype] * tensor.numel for tensor in trained)
    wanted = math.ceil(needed * (1 + STATES_ROUNDING) / nbytes) + 1
    plan.states.nbytes, plan.states.count = nbytes, max(0, min(wanted, (plan.budget - plan.total) // nbytes))
    share = min(1.0, plan.states.total / needed)
    plan.states.note = "always there" if share == 1.0 else f"{share:.0%} of them"
    # States come last: with all of them, everything is in memory.
    plan.retain_heap = share == 1.0 and plan.budget - plan.total >= HEAP_BYTES


def _add_blocks(plan: Plan, units: Sequence[Unit], tables: Sequence[Unit]) -> None:
    """Plan the buffers for blocks of tables, of a size that is no unit's: the pool tells buffers by their size."""
    if not tables:
        return
    nbytes = max(round_up(place.blocks.nbytes, PAGE_BYTES) for table in tables for place in table.places)
    while any(round_up(unit.nbytes, PAGE_BYTES) == nbytes for unit in units):
        nbytes += PAGE_BYTES
    plan.blocks.nbytes, plan.blocks.count = nbytes, BLOCK_BUFFERS
    if any(table.is_uploaded and table.tensors[0].trained for table in tables):
        plan.blocks.count, plan.blocks.note = 2 * BLOCK_BUFFERS, "in use, next; of gradients"


def _add_experts(plan: Plan, units: Sequence[Unit]) -> list[int]:
    """Plan the least buffers for experts that are read one by one. Returns how many there are for each line."""
    numbers: dict[int, int] = {}
    for place in (place for unit in units if unit.is_experts for place in unit.places):
        nbytes = read_bytes(place)
        numbers[nbytes] = numbers.get(nbytes, 0) + place.shape[0]
    taken = {round_up(unit.nbytes, PAGE_BYTES) for unit in units} | {plan.blocks.nbytes}
    for nbytes, number in sorted(numbers.items(), reverse=True):
        while nbytes in taken:  # The pool tells buffers by their size.
            nbytes += PAGE_BYTES
        taken.add(nbytes)
        plan.experts.append(Line("experts, one by one", nbytes, min(EXPERT_BUFFERS, number), "in use, next"))
    return [number for _, number in sorted(numbers.items(), reverse=True)]


def read_bytes(place: Place) -> int:
    """Return the bytes of the whole pages that one expert of a parameter lies in, wherever it begins."""
    nbytes = place.expert_nbytes
    return nbytes if nbytes % PAGE_BYTES == 0 else round_up(nbytes, PAGE_BYTES) + PAGE_BYTES


def _keep_experts(plan: Plan, numbers: Sequence[int], spare: int) -> int:
    """Spend what a budget leaves on buffers in which experts stay, the same share of each size; return the rest."""
    more = [number - line.count for number, line in zip(numbers, plan.experts, strict=True)]
    needed = sum(line.nbytes * count for line, count in zip(plan.experts, more, strict=True))
    share = min(1.0, max(0, spare) / needed) if needed else 0.0
    for line, count, number in zip(plan.experts, more, numbers, strict=True):
        extra = int(share * count)
        line.count += extra
        spare -= extra * line.nbytes
        if line.count == number:
            line.note = "always there"
        elif extra:
            line.note = f"in use, next; {line.count} of {number} stay"
    return spare


@dataclass(slots=True)
class BufferClass:
    """The buffers of some units' weights."""

    line: Line
    members: list[Unit]
    repeated: bool = False


def classes_apart(units: Sequence[Unit]) -> list[BufferClass]:
    """Return one class per size, with buffers to prefetch into for repeated layers."""
    sizes: dict[tuple[bool, int], list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.repeated, unit.nbytes), []).append(unit)
    classes = []
    for (repeated, nbytes), members in sorted(sizes.items(), key=lambda item: -item[0][1]):
        held = sum(unit.held for unit in members)
        least = min(len(members), held + (REPEATED_BUFFERS_MIN if repeated else 1))
        classes.append(BufferClass(Line(_weights_of(members), nbytes, least), members, repeated))
    return classes


def classes_by_turns(units: Sequence[Unit], block_bytes: int = 0) -> list[BufferClass]:
    """Return the fewest buffers that work: one for all units, except small ones and those in use beside others.

    `block_bytes` is the size of the buffers for blocks of tables.
    """
    apart = [unit.nbytes for unit in units if unit.held or (not unit.repeated and unit.nbytes <= SMALL_MODULE_BYTES)]
    # A request goes to the smallest class that holds it, so units no larger than these would take
    # their buffers.
    alone = [unit for unit in units if unit.nbytes <= max([*apart, block_bytes])]
    others = sorted((unit for unit in units if unit not in alone), key=lambda unit: -unit.nbytes)
    classes = classes_apart(alone)
    if others:
        classes.insert(0, BufferClass(Line(_weights_of(others), others[0].nbytes, 1), others))
    return classes


def _weights_of(members: Sequence[Unit]) -> str:
    if len(members) == 1:
        return f"weights of {members[0].name}"
    alike = all(unit.nbytes == members[0].nbytes for unit in members)
    return f"weights of {members[0].name} and {len(members) - 1} {'like it' if alike else 'others'}"


def smallest_plan(
    units: Sequence[Unit],
    most: int | None = None,
    update: str = "forward",
    on_device: bool = False,
    threads: int = 1,
    inputs: Inputs | None = None,
) -> Plan:
    """Return the plan with the least budget that works; the other arguments are as in `make_plan`."""
    try:
        return make_plan(units, 1, most, update, on_device, threads, inputs)
    except BudgetError as error:
        return make_plan(units, error.smallest_bytes, most, update, on_device, threads, inputs)


def make_states_plan(unit: Unit, budget: int | None, threads: int = 1) -> Plan:
    """Size the buffers that move the optimizer states of parameters in memory; without a budget, the best sizes.

    `threads` and errors are as in `make_plan`.
    """
    plan = Plan(1 << 62 if budget is None else budget, update_threads=threads)
    _add_bookkeeping(plan, [unit])
    # Weights and gradients stay where they are; staging is for `state_dict` alone.
    plan.smallest_bytes = plan.total + _transfer_bytes(plan, unit.tensors, CHUNK_ELEMENTS_MIN, STATES_STAGING_CHUNKS)
    _fit_transfers(plan, unit.tensors, STATES_STAGING_CHUNKS)
    if budget is not None:
        _keep_states(plan, unit.tensors)
    return plan


def _add_bookkeeping(plan: Plan, units: Sequence[Unit]) -> None:
    parameters = sum(len(tensor.places) for unit in units for tensor in unit.tensors)
    nbytes = BOOKKEEPING_BYTES + len(units) * BOOKKEEPING_BYTES_PER_UNIT + parameters * BOOKKEEPING_BYTES_PER_PARAMETER
    tables = (unit for unit in units if unit.is_table and not unit.is_experts)
    frozen = (unit for unit in tables if not any(tensor.trained for tensor in unit.tensors))
    nbytes += sum(-(-unit.nbytes // MIB) for unit in frozen) * BLOCK_SUMS_BYTES
    nbytes += sum(round_up(unit.stored_nbytes, PAGE_BYTES) for unit in units if unit.bits) // PAGE_BYTES * SUM_BYTES
    plan.bookkeeping = Line("bookkeeping", nbytes, 1, f"beside the arena: {len(units)} units, {parameters} parameters")


def _transfer_bytes(
    plan: Plan, tensors: Sequence[StoreTensor], chunk_elements: int, staging: int, slots: int = UPDATE_SLOTS
) -> int:
    chunk_elements = min(chunk_elements, _largest_chunk(plan, tensors))
    slots = slots if _are_updated(tensors) else 0
    return chunk_elements * (_update_bytes(tensors) * slots + _staged_bytes(tensors) * staging)


def _staged_bytes(tensors: Sequence[StoreTensor]) -> int:
    """Return the bytes of a staging buffer for each element of a chunk, as gradients are put aside."""
    return max((tensor.gradient_dtype.itemsize for tensor in tensors), default=2)


def _are_updated(tensors: Sequence[StoreTensor]) -> bool:
    """Return whether anything is trained: an update pipeline is not needed where everything is frozen."""
    return any(tensor.trained for tensor in tensors)


def _update_bytes(tensors: Sequence[StoreTensor]) -> int:
    """Return the bytes of an update slot for each element of a chunk. Slots hold the weights of tables, too."""
    weights = max((tensor.dtype.itemsize for tensor in tensors if tensor.unit.is_table and tensor.trained), default=0)
    if any(tensor.trained and tensor.dtype == torch.float16 for tensor in tensors):
        return UPDATE_BYTES_PER_FLOAT16_ELEMENT + weights
    return UPDATE_BYTES_PER_ELEMENT + weights


def _largest_chunk(plan: Plan, tensors: Sequence[StoreTensor]) -> int:
    """Return the elements of a chunk that holds the largest trained tensor whole, or of any chunk of an input."""
    if plan.inputs is not None:
        return CHUNK_ELEMENTS_MAX
    return round_up(max((tensor.numel for tensor in tensors if tensor.trained), default=1), CHUNK_ELEMENTS_MIN)


def _fit_transfers(plan: Plan, tensors: Sequence[StoreTensor], staging: int, sizes: Sizes | None = None) -> None:
    """Size the buffers through which bytes move, as in `sizes` if given.

    Larger chunks come first, then slots for more threads. Raises BudgetError when not even the smallest fit.
    """
    trained = _are_updated(tensors)

    def size(chunk_elements: int, slots: int = UPDATE_SLOTS) -> None:
        plan.chunk_elements, nbytes = chunk_elements, chunk_elements * _staged_bytes(tensors)
        slot, note = chunk_elements * _update_bytes(tensors), "moments, masters, gradient of a chunk"
        if plan.update_threads > 1:
            note += f", for {plan.update_threads} threads"
        plan.slots = Line("update pipeline", slot, slots if trained else 0, note)
        plan.staging = Line("staging", nbytes, staging, "gradients and activations on the move")
        plan.kept = Line("kept off the SSD", nbytes, 0, "gradients, activations of recomputed layers")

    largest = min(_largest_chunk(plan, tensors), CHUNK_ELEMENTS_MAX) if sizes is None else 0
    for elements in range(largest, CHUNK_ELEMENTS_MIN, -CHUNK_ELEMENTS_MIN):
        size(elements)
        if _transfers_left(plan) >= 0:
            break
    else:
        if sizes is None:
            size(CHUNK_ELEMENTS_MIN)
        else:
            size(sizes.chunk_elements, sizes.slots)
    if sizes is None and plan.slots.count:
        wanted = UPDATE_SLOTS_PER_THREAD * plan.update_threads - plan.slots.count
        slot = plan.slots.total // plan.slots.count
        plan.slots.count += max(0, min(wanted, _transfers_left(plan) // slot))
    if plan.total > plan.budget:
        raise _too_small(plan, tensors)


def _transfers_left(plan: Plan) -> int:
    """Return the bytes that the budget and the transfers' share of it leave, less than 0 where they are exceeded."""
    share = int(plan.budget * TRANSFER_SHARE) - plan.slots.total - plan.staging.total
    return min(plan.budget - plan.total, share)


def why(kind: BufferClass) -> str:
    """Describe the purpose of the buffers of a class."""
    count, members = kind.line.count, len(kind.members)
    if count >= members:
        return "always there"
    if count == 1:
        return "by turns: nothing is read ahead"
    named = {2: "in use, next", 3: "in use, next, previous"}
    return named.get(count, f"{count} of {members} cached") if kind.repeated else f"{count} of {members}, by turns"


def _too_small(plan: Plan, tensors: Sequence[StoreTensor]) -> BudgetError:
    element = max((tensor.dtype.itemsize for tensor in tensors), default=2)
    smallest = plan.smallest_bytes
    overlap = f"; from {format_size(plan.overlap_bytes)} on, reading overlaps computing" if plan.overlap_bytes else ""
    knobs = []
    whole = (tensor for tensor in tensors if not (tensor.packed or tensor.unit.is_experts or tensor.shard is not None))
    if not plan.on_device and any(len(place.shape) == 3 for tensor in whole for place in tensor.places):
        knobs.append("experts that are read one by one (experts='pieces')")
    if plan.units and element > 2:
        knobs.append("weights in bfloat16 instead of float32 (dtype='bfloat16'), whose masters stay exact")
    if plan.units:
        largest = max(plan.units, key=lambda line: line.nbytes).consumer.removeprefix("weights of ")
        knobs.append(f"a smaller model: its largest piece ({largest}) has to fit in memory whole")
    lowered = f"\nTo lower it: {'; '.join(knobs)}" if knobs else ""
    return BudgetError(
        f"a host memory budget of {format_size(plan.budget)} is too small: the least is "
        f"{format_size(smallest)} ({smallest} bytes){overlap}. Asked for by\n{plan.table()}"
        f"{lowered}",
        smallest,
    )


def check_available(plan: Plan, held: int = 0) -> None:
    """Raise BudgetError if the plan takes more than this process can have, rather than let the kernel kill it.

    `held` are the bytes that the process holds for a plan before it.
    """
    available, limit = available_memory()
    available += held
    if plan.total <= available:
        return
    remedy = (
        f"lower host_memory to that (the least is {format_size(plan.smallest_bytes)}), or make room"
        if plan.smallest_bytes <= available
        else f"make room: the least that works is {format_size(plan.smallest_bytes)}"
    )
    raise BudgetError(
        f"the plan takes {format_size(plan.total)} of host memory, but this process can have only "
        f"{format_size(available)} more ({limit}): {remedy}",
        plan.smallest_bytes,
    )
