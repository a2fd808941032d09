"""A host memory budget that follows the free memory of the machine: its first value, and when and how it changes.

Nothing here reads the machine, except for the budget that a run begins with: see `memascend.hardware.memory_limits`.

A decision is a function of earlier samples. The process may hold the bytes within the bounds, less a reserve, less 1.25
times the most that one of the last 64 passes took beside the plan; half of all before a pass with gradients was seen.
Nothing is given back within a pass. The memory of an elastic arena is resident as soon as it is committed, so the next
process that looks sees it, and a lock has processes look and grow one at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.common.sizes import AUTO, format_size, parse_size
from memascend.hardware import memory_limits
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.memory_plan.lines import HEAP_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.hardware.memory_limits import Bound
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Inputs, Plan

#: Of the addresses that this process may reserve, the share that an arena may.
ADDRESSES_SHARE = 3 / 4
#: Margin for a step above the largest one seen.
STEP_MARGIN = 1.25
#: Recent passes whose largest need is left free. An older one may have been a first pass, which needs more.
PASSES_SEEN = 64
#: Passes in a row that have to leave room before the budget grows; more where it has been growing and shrinking.
PATIENCE, PATIENCE_MAX = 2, 32
#: Passes within which shrinking after growing counts as that.
SOON = 32
#: Passes until the next attempt, after the system has refused memory.
REFUSED_PASSES = 256
#: The least growth that is worth a change, as a share of the bytes held: each change evicts units.
WORTH = 1 / 16
#: Share of time stalled for memory above which memory is given back, and the share of the bytes beyond the least plan.
STALLED, GIVEN_BACK = 0.1, 1 / 4


def plan_for(
    units: Sequence[Unit],
    host_memory: str | int | None,
    host_memory_max: str | int | None = None,
    update: str = "forward",
    on_device: bool = False,
    threads: int = 1,
    inputs: Inputs | None = None,
    *,
    lends: bool = False,
) -> tuple[Plan, bool]:
    """Return the plan for `host_memory` as `memascend.offload` takes it, and whether its budget follows the machine.

    None is the least budget that works; the other arguments are as in `make_plan`. Raises BudgetError
    as `make_plan` does, ValueError unless it is a size or "auto".
    """
    most = None if host_memory_max is None else parse_size(host_memory_max)
    if host_memory is None:
        return smallest_plan(units, most, update, on_device, threads, inputs), False
    if host_memory != AUTO:
        budget = parse_size(host_memory)
        return make_plan(units, budget, most, update, on_device, threads, inputs, lends=lends), False
    if most is None:
        most = _most(units, update, on_device, threads, inputs)
    least = smallest_plan(units, most, update, on_device, threads, inputs).total
    left = memory_limits.memory_left()
    # The need of a step beside the plan is not known yet.
    return make_plan(units, min(most, max(least, left // 2)), most, update, on_device, threads, inputs), True


def least_of(units: Sequence[Unit]) -> Plan:
    """Return the least plan that a budget which follows the machine may come to."""
    return smallest_plan(units, _most(units))


def _most(
    units: Sequence[Unit],
    update: str = "forward",
    on_device: bool = False,
    threads: int = 1,
    inputs: Inputs | None = None,
) -> int:
    """Return the largest budget that a run can use, or that the machine has, with limits that may be raised later."""
    unlimited = make_plan(units, 1 << 62, 1 << 62, update, on_device, threads, inputs)
    usable = unlimited.total + HEAP_BYTES
    machine = min(memory_limits.total_memory(), int(memory_limits.address_space_left() * ADDRESSES_SHARE))
    return max(min(usable, machine), smallest_plan(units, usable, update, on_device, threads, inputs).total)


def resident_bytes(plan: Plan) -> int:
    """Return the bytes that a plan takes, with those that malloc keeps."""
    return plan.total + plan.freed_blocks_bytes


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """A budget to change to, in bytes, and the reason in words."""

    budget: int
    reason: str


@dataclass(slots=True)
class AutomaticBudget:
    """Decides the budget between two passes.

    It shrinks at once when half of a reserve is used up or threads are stalled for memory, so that the whole reserve
    and the largest need of a step are free again. It grows when some passes in a row have left room.
    """

    #: Bytes by which memory grew in passes with gradients (True) and without.
    taken: dict[bool, deque[int]] = field(
        default_factory=lambda: {grad: deque(maxlen=PASSES_SEEN) for grad in (True, False)}
    )
    #: Bytes beyond which the machine leaves nothing, though the plan is the least already; 0 where it suffices.
    shortfall_bytes: int = 0
    _patience: int = PATIENCE
    _with_room: int = 0
    _since_growth: int = SOON + 1
    _wait: int = 0

    def note(self, grad: bool, taken: int) -> None:
        """Record by how much memory grew in a pass."""
        self.taken[grad].append(taken)

    def refused(self) -> None:
        """Note that the system has refused memory: the budget does not grow for a while."""
        self._wait = REFUSED_PASSES

    def decide(
        self, plan: Plan, bounds: Sequence[Bound], *, grad: bool, leaving: int = 0, swapped: int = 0, stalled: float = 0
    ) -> BudgetChange | None:
        """Return the change that is due before a pass with or without gradients; None to go on as it is.

        Args:
            plan: the present one, whose buffers are resident.
            bounds: the memory that the machine leaves beside them.
            grad: whether the pass that begins has gradients.
            leaving: bytes that an earlier change is still giving back.
            swapped: bytes of this process that are in swap, and have to come back.
            stalled: the share of the time since the last pass in which threads were stalled for memory.
        """
        assert plan.most is not None
        held, least = plan.total, plan.smallest_bytes
        self._since_growth += 1
        self._wait -= self._wait > 0
        binding = min(bounds, key=lambda bound: bound.left - bound.reserve)
        allowed = held + leaving - swapped + binding.left - binding.reserve
        #: The same with half of the reserves used up.
        needed = held + leaving - swapped + min(bound.left - bound.reserve // 2 for bound in bounds)
        step = self._step(grad)
        if step is None:
            # No step was seen yet: half of all is left to it, except of the least plan.
            allowed = max(allowed // 2, min(allowed, least))
            needed = max(needed // 2, min(needed, least))
        else:
            allowed, needed = allowed - step, needed - step
        self.shortfall_bytes = max(0, least - needed)
        reason = f"{binding.description}: {format_size(max(0, binding.left))} left"
        if stalled > STALLED:
            allowed = needed = min(allowed, held - int((held - least) * GIVEN_BACK))
            reason = f"threads were stalled for memory in {stalled:.0%} of the last pass"
        if needed < held:
            return self._shrink(held, least, allowed, reason)
        # Blocks that malloc would keep are room for growth, but a change does not give them back.
        level, most = resident_bytes(plan), resident_bytes(plan.most)
        target = min(allowed, most)
        if self._wait or target <= level or (target < most and target - level < level * WORTH):
            self._with_room = 0
            return None
        self._with_room += 1
        if self._with_room < self._patience:
            return None
        self._with_room = self._since_growth = 0
        return BudgetChange(min(allowed, plan.most.budget), reason)

    def _shrink(self, held: int, least: int, allowed: int, reason: str) -> BudgetChange | None:
        self._with_room = 0
        if held <= least:
            return None
        if self._since_growth <= SOON:
            self._patience = min(2 * self._patience, PATIENCE_MAX)
        else:
            self._patience = PATIENCE
        return BudgetChange(max(allowed, least), reason)

    def _step(self, grad: bool) -> int | None:
        """Return the expected need of the next pass beside the plan; None where no such pass was seen."""
        if not self.taken[True] and (grad or not self.taken[False]):
            return None
        return int(max(max(seen, default=0) for seen in self.taken.values()) * STEP_MARGIN)
