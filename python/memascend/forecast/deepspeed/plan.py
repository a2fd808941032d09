"""Host memory of ZeRO-3 with swapping: DeepSpeed's own, and with memascend behind it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.common.sizes import format_size
from memascend.errors import BudgetError
from memascend.forecast import zero_infinity as stock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.forecast.deepspeed.options import Options

#: Elements that are read, updated and written together.
CHUNK = 1 << 19
#: The most chunks that are under way: a virtual disk moved a fifth more with eight than with three.
_MAX_SLOTS = 8
#: Bytes of the buffers through which casts are written: two for weights, for gradients and at the start for masters.
CASTS = 2 * (4 << 20)

_POOL = "parameter pool"


@dataclass(frozen=True)
class ComparedLine:
    """A consumer of host memory, in bytes."""

    name: str
    stock: int
    ours: int


@dataclass(frozen=True)
class Shapes:
    """The inputs of a plan: elements on this rank.

    `params`: of each parameter's part, in order. `sub_groups`: the parameters' parts of each sub-group. `itemsize`:
    bytes of a weight.
    """

    params: Sequence[int]
    sub_groups: Sequence[Sequence[int]]
    itemsize: int
    buffer_count: int
    buffer_size: int
    max_in_cpu: int
    gradient_itemsize: int
    accumulates: bool
    #: Bytes of masters and moments that can stay in memory: of all sub-groups that are updated in a stream.
    streamed_states: int = 0
    #: Whether masters and moments are on the SSD; else they stay in memory, where DeepSpeed has them too.
    swaps_states: bool = True


@dataclass(frozen=True)
class Decision:
    """A plan, whether gradients stay in memory, and bytes of masters and moments that do."""

    lines: list[ComparedLine]
    keeps_gradients: bool
    kept_states: int = 0


def slots(sub_groups: Iterable[int]) -> int:
    """Return how many chunks of a step are under way, for sub-groups of so many elements.

    At least one is read and one written while one is computed; a small model gets no buffers as large as its states.
    """
    chunks = sum(-(-numel // CHUNK) for numel in sub_groups)
    return max(3, min(_MAX_SLOTS, chunks // 4))


def lines(shapes: Shapes, keeps_gradients: bool) -> list[ComparedLine]:
    """Return the consumers. Our pool has room for the `buffer_count` largest parameters."""
    total = sum(shapes.params)
    largest = max(shapes.sub_groups, key=sum)
    swapped = sorted((n for n in shapes.params if stock.is_swapped(n, shapes.itemsize)), reverse=True)
    present = swapped[: shapes.buffer_count]
    pool = sum(stock.aligned_numel(numel, shapes.itemsize) * shapes.itemsize for numel in present)
    fitting = sum(map(sum, _staying(shapes)))
    in_cpu = min(shapes.max_in_cpu, total) * shapes.itemsize
    swaps_weights = fitting < total
    slot = CHUNK * (4 * 4 + 2 * shapes.itemsize)
    under_way = slots(map(sum, shapes.sub_groups))
    states = (stock.optimizer_swap_bytes(sum(largest)), under_way * slot) if shapes.swaps_states else (0, 0)
    gradients = stock.gradient_buffer_bytes(total, shapes.gradient_itemsize)
    return [
        ComparedLine(
            _POOL,
            stock.parameter_pool_bytes(shapes.buffer_size, shapes.buffer_count, shapes.itemsize),
            pool if swaps_weights else 0,
        ),
        ComparedLine("weights that stay in memory", in_cpu, fitting * shapes.itemsize),
        ComparedLine(
            "write-back of weights", stock.write_back_bytes(largest, shapes.itemsize) if swaps_weights else 0, CASTS
        ),
        ComparedLine("optimizer states", *states),
        ComparedLine("gradients", gradients, gradients if keeps_gradients else CASTS),
        ComparedLine("start and first step", 2 * 4 * sum(largest), CASTS),
    ]


def pool_bytes(plan: Sequence[ComparedLine]) -> int:
    """Return the bytes of the parameter pool in a plan."""
    return sum(line.ours for line in plan if line.name == _POOL)


def _staying(shapes: Shapes) -> Sequence[Sequence[int]]:
    """Return the sub-groups whose weights stay in memory: the first ones, as many as `max_in_cpu` holds."""
    ends = itertools.accumulate(map(sum, shapes.sub_groups))
    return shapes.sub_groups[: sum(end <= shapes.max_in_cpu for end in ends)]


def traffic(shapes: Shapes, decision: Decision, moment_itemsize: int, passes: int) -> list[ComparedLine]:
    """Return the bytes that a step reads from the SSD and writes to it, by kind.

    Weights are read in the forward and the backward pass of each of `passes` batches, and written once. DeepSpeed
    writes and reads gradients in float32, memascend in their own dtype unless they stay in memory.
    """
    swapped = itertools.chain.from_iterable(shapes.sub_groups[len(_staying(shapes)) :])
    weights = sum(numel for numel in swapped if stock.is_swapped(numel, shapes.itemsize))
    weights *= (2 * passes + 1) * shapes.itemsize
    found = [ComparedLine("weights", weights, weights)]
    if shapes.swaps_states:
        numel = shapes.streamed_states // (stock.MASTER_BYTES + 2 * moment_itemsize)
        gradients = 0 if decision.keeps_gradients else 2 * numel * shapes.gradient_itemsize
        states = 2 * (shapes.streamed_states - decision.kept_states)
        found.append(ComparedLine("masters and moments", 2 * numel * 3 * stock.MASTER_BYTES, states))
        found.append(ComparedLine("gradients", 2 * numel * stock.MASTER_BYTES, gradients))
    return found


def decide(shapes: Shapes, options: Options) -> Decision:
    """Return the plan within `host_memory`: the needs, then gradients, then states, as far as there is room.

    Each saves two bytes of transfers in a step for a byte of memory; states can stay in part.

    Raises:
        BudgetError: the budget is too small.
    """
    least = lines(shapes, shapes.accumulates)
    if options.host_memory is None:
        return Decision(least, shapes.accumulates)
    needed = sum(line.ours for line in least)
    if needed > options.host_memory:
        message = (
            f'"host_memory" of "memascend" in DeepSpeed\'s configuration is {format_size(options.host_memory)}, but '
            f"swapping needs {format_size(needed)}: give it that, or lower max_in_cpu or buffer_count of offload_param"
        )
        raise BudgetError(f"{message}\n{table(least)}", needed)
    with_gradients = lines(shapes, True)
    keeps_gradients = shapes.accumulates or sum(line.ours for line in with_gradients) <= options.host_memory
    chosen = with_gradients if keeps_gradients else least
    room = options.host_memory - sum(line.ours for line in chosen)
    kept = min(room, shapes.streamed_states)
    if kept:
        chosen = [*chosen, ComparedLine("states that stay in memory", 0, kept)]
    return Decision(chosen, keeps_gradients, kept)


def table(plan: Sequence[ComparedLine], title: str = "host memory for swapping") -> str:
    """Return a plan as text."""
    rows = [*plan, ComparedLine("sum", sum(line.stock for line in plan), sum(line.ours for line in plan))]
    width = max(len(title), *(len(line.name) for line in rows))
    head = f"{title:<{width}}  {'DeepSpeed':>12}  {'memascend':>12}"
    body = [f"{line.name:<{width}}  {format_size(line.stock):>12}  {format_size(line.ours):>12}" for line in rows]
    return "\n".join([head, *body])
