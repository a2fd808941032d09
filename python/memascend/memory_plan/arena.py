"""The buffers of an arena, as the native side takes them from a host memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.memory_plan.lines import Plan

#: Consumer, bytes of a buffer and number of buffers; and how many there may be, where `Runtime.resize` changes that.
ArenaLine = tuple[str, int, int] | tuple[str, int, int, int]


@dataclass(frozen=True)
class Arena:
    """The buffers of an arena. For numbers that may grow addresses are reserved, up to their maximum."""

    #: Buffers for weights.
    units: Sequence[ArenaLine]
    #: Buffers for the gradients of small tensors.
    packs: Sequence[tuple[str, int, int]]
    #: Staging for gradients and activations.
    chunk_bytes: int
    chunk_count: int
    #: Elements of the pieces into which captures of gradients are cut.
    chunk_elements: int
    #: Pieces of an update under way.
    slot_bytes: int
    slot_count: int
    #: Buffers in which optimizer states stay.
    states_bytes: int = 0
    states_count: int = 0
    #: How many chunks and buffers for states there may be; None is as many as now.
    chunk_count_max: int | None = None
    states_count_max: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> Arena:
        """Return the arena of a plan, with room for its growth."""
        most = plan.most
        return cls(
            _lines_of(plan),
            [(line.consumer, line.nbytes, line.count) for line in plan.packs],
            plan.staging.nbytes,
            plan.staging.count + plan.staging_cache.count,
            plan.chunk_elements,
            plan.slots.nbytes,
            plan.slots.count,
            (most or plan).states.nbytes,
            plan.states.count,
            None if most is None else most.staging.count + most.staging_cache.count,
            None if most is None else most.states.count,
        )


def _lines_of(plan: Plan) -> list[ArenaLine]:
    """Return the lines of buffers for weights, with the largest number of each where the budget may change."""
    if plan.most is None:
        return [(line.consumer, line.nbytes, line.count) for line in plan.buffers]
    counts = {(line.consumer, line.nbytes): line.count for line in plan.buffers}
    most = plan.most.buffers
    return [(line.consumer, line.nbytes, counts.get((line.consumer, line.nbytes), 0), line.count) for line in most]
