"""The host memory plan: every consumer on a line, summed and checked before anything starts.

The plan is all that memascend holds: the arena's classes, and bookkeeping of Python, autograd and Rust, as constants
per parameter and unit that were fitted to `benches/plan_accuracy.py`. PyTorch's own temporaries are not in it;
`forecast/` estimates them.

First come the needs: the buffers of weights (`classes`), of units that are read in parts (`in_parts`) and of bytes that
move (`transfers`), and memory beside the arena (`beside`). The remainder goes where a spare byte saves most. Tables
come last: all tables share two buffers for blocks, and a table gets a buffer of its own size where the budget has room
for it after everything else. The rest keeps optimizer states: a byte of a gradient saves its write and its read, one of
a weight two reads, one of a state a read, and a write where not every step is durable.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memascend._memascend import FILE_WINDOWS, PAGE_BYTES
from memascend.common.sizes import format_least, format_size
from memascend.errors import BudgetError
from memascend.hardware.memory_limits import available_memory
from memascend.layout.units import round_up
from memascend.memory_plan.beside import APPLIED_GRADIENTS, add_bookkeeping, add_exchange, later_line
from memascend.memory_plan.classes import REPEATED_BUFFERS, classes_apart, classes_by_turns, why
from memascend.memory_plan.in_parts import add_blocks, add_experts, keep_experts
from memascend.memory_plan.lines import (
    ACTIVATIONS_BYTES_MIN,
    CHUNK_ELEMENTS_MIN,
    HEAP_BYTES,
    HEAP_SHARE,
    Inputs,
    Line,
    Plan,
    Sizes,
)
from memascend.memory_plan.transfers import (
    CHUNK_ELEMENTS_MAX,
    STAGING_CHUNKS,
    STATES_STAGING_CHUNKS,
    UPDATE_SLOTS,
    fit_transfers,
    keep_states,
    transfer_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import StoreTensor, Unit
    from memascend.memory_plan.classes import BufferClass


def make_plan(
    units: Sequence[Unit],
    budget: int,
    most: int | None = None,
    update: str = "forward",
    on_device: bool = False,
    threads: int = 1,
    inputs: Inputs | None = None,
    *,
    lends: bool = False,
) -> Plan:
    """Size the pool for `units`: first the needs, then where a spare byte saves most.

    With `most`, the budget may change later, up to that: see `replan`. `update` is as in `memascend.options`, and
    `threads` threads carry it out; `on_device` says that a device makes the gradients. `inputs` of layers are kept off
    the SSD beside the gradients, as far as the budget has room. With `lends`, bytes beyond the needs may be lent to
    activations later: see `lend`.

    Raises BudgetError, with the smallest budget that works, when `budget` is too small.
    """
    if most is None:
        plan = _plan(units, budget, update, on_device, threads, inputs)
        if lends:
            with suppress(BudgetError):  # Buffers whose number may change take more than the least.
                lending = make_plan(units, budget, budget, update, on_device, threads, inputs, lends=True)
                lending.fixed, lending.smallest_bytes = True, plan.smallest_bytes
                return lending if lending.lends else plan
        return plan
    if most < budget:
        raise BudgetError(
            f"host_memory_max ({format_size(most)}) is less than host_memory ({format_size(budget)})", budget
        )
    made_for = (update, on_device, threads, inputs)
    sizes = _sizes_of(_plan(units, budget, *made_for, elastic=True))
    largest = _plan(units, most, *made_for, elastic=True, sizes=sizes)
    plan = _plan(units, budget, *made_for, elastic=True, sizes=sizes, most=largest)
    plan.most, plan.lends = largest, lends and most - plan.smallest_bytes >= ACTIVATIONS_BYTES_MIN
    return plan


def replan(plan: Plan, units: Sequence[Unit], budget: int) -> Plan:
    """Return `plan`, which was made for a budget that may change, with another budget.

    Buffers are as large as before, and there are other numbers of them. Raises BudgetError where the budget is too
    small, or larger than the largest.
    """
    assert plan.most is not None
    if budget > plan.most.budget:
        raise BudgetError(
            f"{format_size(budget)} is more than the host_memory_max of {format_size(plan.most.budget)} with which the "
            "model was opened",
            plan.smallest_bytes,
        )
    return _with_budget(plan, units, budget, plan.lent_bytes)


def lend(plan: Plan, units: Sequence[Unit], nbytes: int) -> Plan:
    """Return `plan`, which lends, with `nbytes` of its budget lent to activations, or as many as it can spare.

    Those go first that save least where they are: states, tables, weights, then gradients. 0 takes all of them back.
    """
    return _with_budget(plan, units, plan.budget, nbytes)


def _with_budget(plan: Plan, units: Sequence[Unit], budget: int, lent_bytes: int) -> Plan:
    """Return `plan` with buffers of the same sizes, in other numbers, for a budget that lends so many bytes."""

    def sized(of: int, retain_heap: bool | None = None) -> Plan:
        made_for = (plan.update, plan.on_device, plan.update_threads, plan.inputs)
        sizes = _sizes_of(plan)
        return _plan(units, of, *made_for, elastic=True, sizes=sizes, most=plan.most, retain_heap=retain_heap)

    changed = sized(budget)
    spare = budget - changed.smallest_bytes - changed.freed_blocks_bytes
    lent_bytes = max(0, min(lent_bytes, spare))
    if lent_bytes:
        changed = sized(budget - lent_bytes, changed.retain_heap)
    changed.budget, changed.lent_bytes = budget, lent_bytes
    changed.most, changed.lends, changed.fixed = plan.most, plan.lends, plan.fixed
    if plan.fixed:
        changed.smallest_bytes = plan.smallest_bytes
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
    most: Plan | None = None,
    retain_heap: bool | None = None,
) -> Plan:
    """Make a plan; `elastic`: buffers are of the same sizes with every budget, for chunks and slots of `sizes`.

    There are no more of each than `most` has, whose addresses are reserved: where a smaller budget has no room for one
    large buffer, it has more for small ones. `retain_heap` says whether freed blocks are kept, for which there is the
    room then; None decides it by the budget.
    """
    tensors = [tensor for unit in units for tensor in unit.tensors]
    plan = Plan(budget, update=update, on_device=on_device, update_threads=threads, inputs=inputs)
    early = [tensor for tensor in tensors if updates_in_backward(tensor)] if update == "backward" else []
    _add_gradients(plan, units, tensors, early)
    add_bookkeeping(plan, units)
    _add_windows(plan, units)
    tables = [unit for unit in units if unit.is_table]
    units = [unit for unit in units if not unit.is_table]
    add_blocks(plan, units, tables)
    experts = add_experts(plan, [*units, *tables])
    pieces = [table for table in tables if table.is_experts]
    tables = [table for table in tables if not table.is_experts]
    classes = classes_apart(units)
    parts_bytes = max([plan.blocks.nbytes, *(line.nbytes for line in plan.experts)])
    by_turns = classes if elastic else classes_by_turns(units, parts_bytes)
    apart, together = (sum(kind.line.total for kind in planned) for planned in (classes, by_turns))
    smallest = sizes or Sizes(CHUNK_ELEMENTS_MIN, UPDATE_SLOTS)
    least = plan.total + transfer_bytes(plan, tensors, smallest.chunk_elements, STAGING_CHUNKS, smallest.slots)
    plan.overlap_bytes = plan.total + transfer_bytes(plan, tensors, CHUNK_ELEMENTS_MAX, STAGING_CHUNKS) + apart
    plan.smallest_bytes = least + min(apart, together)
    if together < apart and budget < least + apart:
        plan.by_turns, classes = True, by_turns
    plan.units = [kind.line for kind in classes]
    fit_transfers(plan, tensors, STAGING_CHUNKS, sizes)
    if elastic:
        plan.smallest_bytes = plan.total  # with chunks of this size, which stays

    plan.retain_heap = retain_heap is True
    spare = _add_third_buffers(classes, budget - plan.total - plan.freed_blocks_bytes, most)
    # New pages for the temporaries of each slice took a fifth of a step with 2 GiB and 0.51B parameters. Caches of as
    # many bytes save less. On a device, the temporaries are there.
    if retain_heap is None and not on_device and spare >= HEAP_SHARE * HEAP_BYTES:
        plan.retain_heap, spare = True, spare - HEAP_BYTES
    # A gradient or activation byte kept in memory saves a write and a read; a weight byte saves one
    # read, so it comes second.
    plan.staging_cache.count = min(
        _kept_chunks(plan, [*units, *pieces], tables, early),
        spare // plan.staging_cache.nbytes,
        *([] if most is None else [most.staging_cache.count]),
    )
    spare -= plan.staging_cache.total
    spare = _keep_units(plan, classes, spare, most)
    spare = keep_experts(plan, experts if most is None else [line.count for line in most.experts], spare)
    may_stay = tables if most is None else most.whole_tables
    _keep_tables(plan, [t for t in tables if t in may_stay], len(tables), spare, blocks_stay=elastic or bool(experts))
    keep_states(plan, tensors)
    if most is not None:
        plan.states.count = min(plan.states.count, most.states.count)
    return plan


def _add_gradients(
    plan: Plan, units: Sequence[Unit], tensors: Sequence[StoreTensor], early: Sequence[StoreTensor]
) -> None:
    """Add the gradients that stay in memory: small ones, and gradients of exchanges and updates under way."""
    packed: dict[int, int] = {}
    for tensor in tensors:
        if tensor.packed and tensor.trained:
            nbytes = tensor.gradient_nbytes
            packed[nbytes] = packed.get(nbytes, 0) + 1
    if any(tensor.shard is not None for tensor in tensors):
        add_exchange(plan, units, packed)
    plan.packs = [
        Line("gradients of small tensors", nbytes, count, "until the update")
        for nbytes, count in sorted(packed.items())
    ]
    if early and not plan.on_device:  # from where a gradient passes through staging, chunk by chunk
        nbytes = max(tensor.numel * tensor.dtype.itemsize for tensor in early)
        plan.applied.nbytes, plan.applied.count = nbytes, min(APPLIED_GRADIENTS, len(early))
        plan.applied.note = "beside the arena: autograd's, until their update"
    plan.later = later_line(tensors)


def _add_windows(plan: Plan, units: Sequence[Unit]) -> None:
    """Add the windows through which units that are not in the store are read from their files."""
    if all(unit.in_store for unit in units):
        return
    plan.windows.count, plan.windows.note = FILE_WINDOWS, "frozen weights read where they are"
    parts = (part for unit in units for located in unit.sources.values() for part in located)
    plan.windows.nbytes += max((packing.scratch_bytes for *_, packing in parts if packing is not None), default=0)


def _most_of(kind: BufferClass, most: Plan | None) -> int:
    """Return how many buffers of a class there may be."""
    if most is None:
        return len(kind.members)
    same = (line for line in most.units if (line.consumer, line.nbytes) == (kind.line.consumer, kind.line.nbytes))
    return next((line.count for line in same), 0)


def _add_third_buffers(classes: Sequence[BufferClass], spare: int, most: Plan | None) -> int:
    """Add a third buffer per repeated size, and return the rest of `spare`.

    It lets the next prefetch start before the last user is gone.
    """
    for kind in classes:
        if kind.repeated and _most_of(kind, most) >= REPEATED_BUFFERS > kind.line.count and kind.line.nbytes <= spare:
            spare -= kind.line.total // kind.line.count
            kind.line.count += 1
    return spare


def _keep_units(plan: Plan, classes: Sequence[BufferClass], spare: int, most: Plan | None) -> int:
    """Add buffers in which units stay from one use to the next, and return the rest of `spare`."""
    for kind in classes:
        size = max(round_up(kind.line.nbytes, PAGE_BYTES), 1)
        extra = min(_most_of(kind, most) - kind.line.count, spare // size)
        kind.line.count += extra
        spare -= extra * size
        if kind.line.count >= len(kind.members):
            plan.resident_units += kind.members
        kind.line.note = why(kind)
    return spare


def _keep_tables(plan: Plan, tables: Sequence[Unit], number: int, spare: int, *, blocks_stay: bool) -> None:
    """Keep `tables`, of a `number`, whole in memory, the smallest first: that saves the reads of their blocks.

    Blocks are not needed once all tables are whole, unless `blocks_stay`: a smaller budget would need them again. To
    and from a device rows and gradients pass through them.
    """
    blocks_stay = blocks_stay or any(table.is_uploaded for table in tables)
    blocks = 0 if blocks_stay else plan.blocks.total
    spare += blocks
    for kind in sorted(classes_apart(tables), key=lambda kind: kind.line.nbytes):
        kind.line.count = len(kind.members)
        whole = [*plan.whole_tables, *(table for table in tables if table.nbytes == kind.line.nbytes)]
        if kind.line.total + (blocks if len(whole) < number else 0) > spare:
            break
        spare -= kind.line.total
        kind.line.note = why(kind)
        plan.units.append(kind.line)
        plan.whole_tables = whole
        plan.resident_units += kind.members
    if len(plan.whole_tables) == number and not blocks_stay:
        plan.blocks.count = 0


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
        one = plan.inputs.chunks(plan.staging_cache.nbytes)
        wanted = max(wanted + one, vocabulary + max(layers, default=0) + one * sum(unit.repeated for unit in units))
    if plan.on_device and early:
        # With room for the gradients of one unit, the device is free of them while their updates run.
        wanted += max(chunks([tensor for tensor in unit.tensors if tensor in early]) for unit in units)
    return wanted


def updates_in_backward(tensor: StoreTensor) -> bool:
    """Return whether the backward pass can update a tensor: it moves alone, and as a whole."""
    return tensor.trained and not tensor.packed and not tensor.unit.is_table


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
    add_bookkeeping(plan, [unit])
    # Weights and gradients stay where they are; staging is for `state_dict` alone.
    plan.smallest_bytes = plan.total + transfer_bytes(plan, unit.tensors, CHUNK_ELEMENTS_MIN, STATES_STAGING_CHUNKS)
    fit_transfers(plan, unit.tensors, STATES_STAGING_CHUNKS)
    if budget is not None:
        keep_states(plan, unit.tensors)
    return plan


def check_available(plan: Plan, held: int = 0) -> None:
    """Raise BudgetError if the plan takes more than this process can have, rather than let the kernel kill it.

    `held` are the bytes that the process holds for a plan before it.
    """
    available, limit = available_memory()
    available += held
    if plan.total <= available:
        return
    remedy = (
        f"lower host_memory to that (the least is {format_least(plan.smallest_bytes)}), or make room"
        if plan.smallest_bytes <= available
        else f"make room: the least that works is {format_size(plan.smallest_bytes)}"
    )
    raise BudgetError(
        f"the plan takes {format_size(plan.total)} of host memory, but this process can have only "
        f"{format_size(available)} more ({limit}): {remedy}",
        plan.smallest_bytes,
    )
