"""When and how a budget that follows the machine changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend import BudgetError
from memascend.hardware.memory_limits import Bound
from memascend.layout.units import partition
from memascend.memory_plan import auto_budget
from memascend.memory_plan.auto_budget import PATIENCE_MAX, REFUSED_PASSES, SOON, AutomaticBudget, plan_for
from memascend.memory_plan.host import smallest_plan
from memascend.memory_plan.lines import HEAP_BYTES, Line, Plan

MIB = 1 << 20
RESERVE = 100 * MIB
LEAST, MOST = 200 * MIB, 2000 * MIB
STEP = 40 * MIB


def plan_of(total: int) -> Plan:
    """Return a plan of `total` bytes between the least and the most."""
    plan = Plan(total, bookkeeping=Line("all", total, 1), smallest_bytes=LEAST)
    plan.most = Plan(MOST, bookkeeping=Line("all", MOST, 1), smallest_bytes=LEAST)
    return plan


class Machine:
    """Passes of a model on a machine that leaves `whole` bytes to all that this process takes."""

    def __init__(self, whole: int, total: int = 300 * MIB) -> None:
        self.whole, self.plan = whole, plan_of(total)
        self.budget = AutomaticBudget()

    def bounds(self) -> list[Bound]:
        return [
            Bound(1 << 40, RESERVE, "a bound that does not bind"),
            Bound(self.whole - self.plan.total, RESERVE, "the memory cgroup /run allows what it allows"),
        ]

    def look(self, grad: bool = True, **situation: Any) -> auto_budget.BudgetChange | None:
        """Begin a pass."""
        return self.budget.decide(self.plan, self.bounds(), grad=grad, **situation)

    def go(self, passes: int, taken: int = STEP, **situation: Any) -> list[int]:
        """Return the changes of the budget in so many passes."""
        changes = []
        for _ in range(passes):
            change = self.look(**situation)
            if change is not None:
                changes.append(change.budget)
                self.plan = plan_of(change.budget)
            self.budget.note(True, taken)
        return changes


def test_it_takes_all_but_the_reserve_and_what_a_step_takes() -> None:
    machine = Machine(1000 * MIB)
    assert machine.go(10) == [1000 * MIB - RESERVE - STEP * 5 // 4]
    # Memory that it has taken is no lost room.
    assert machine.go(100) == []


def test_it_gives_back_at_once_and_grows_after_some_passes() -> None:
    machine = Machine(1000 * MIB)
    machine.go(100)
    whole = machine.plan.total
    machine.whole = 500 * MIB
    change = machine.look()
    assert change is not None and change.budget == whole - 500 * MIB
    assert "/run allows what it allows: 0 B left" in change.reason
    machine.go(1)
    machine.whole = 1000 * MIB
    assert machine.look() is None
    assert machine.go(3) == [whole]


def test_half_a_reserve_is_used_up_before_it_gives_back() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    machine.whole -= RESERVE // 2 - MIB
    assert machine.go(50) == []
    machine.whole -= 2 * MIB
    assert machine.go(50) == [1000 * MIB - RESERVE // 2 - MIB - RESERVE - STEP * 5 // 4]


def test_small_room_is_not_worth_a_change_unless_it_completes() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    machine.whole += machine.plan.total // 20
    assert machine.go(50) == []
    machine.whole += machine.plan.total // 20
    assert len(machine.go(50)) == 1
    machine.whole, machine.plan = MOST + 500 * MIB, plan_of(MOST - MIB)
    assert machine.go(50) == [MOST]
    assert machine.go(50) == []


def test_the_reserve_of_each_bound_is_left() -> None:
    budget = AutomaticBudget()
    budget.note(True, 0)
    # The first leaves less, but may be used up; of the second, half of the reserve is gone.
    bounds = [Bound(60 * MIB, 10 * MIB, "the first"), Bound(90 * MIB, 200 * MIB, "the second")]
    change = budget.decide(plan_of(500 * MIB), bounds, grad=True)
    assert change is not None and change.budget == 390 * MIB and "the second" in change.reason
    # And the bound that needs no more is not asked for more than its own.
    bounds[1] = Bound(-60 * MIB, 10 * MIB, "the second")
    change = budget.decide(plan_of(500 * MIB), [Bound(700 * MIB, 900 * MIB, "the first"), bounds[1]], grad=True)
    assert change is not None and change.budget == 300 * MIB


def test_half_of_all_is_left_to_a_step_that_was_not_seen() -> None:
    machine = Machine(1100 * MIB, total=LEAST)
    assert machine.look(grad=True) is None and machine.look(grad=True).budget == 500 * MIB  # type: ignore[union-attr]
    machine = Machine(1100 * MIB, total=LEAST)
    machine.budget.note(False, STEP)
    # A pass without gradients is known.
    assert machine.look(grad=False) is None
    change = machine.look(grad=False)
    assert change is not None and change.budget == 1000 * MIB - STEP * 5 // 4
    machine.plan = plan_of(change.budget)
    # The first one with gradients begins with half of all.
    change = machine.look(grad=True)
    assert change is not None and change.budget == 500 * MIB
    machine.plan = plan_of(change.budget)
    machine.budget.note(True, 3 * STEP)
    # From there on the one that takes more counts, whichever comes.
    for _ in range(PATIENCE_MAX):
        change = machine.look(grad=False)
        machine.budget.note(False, STEP)
        if change is not None:
            break
    assert change is not None and change.budget == 1000 * MIB - 3 * STEP * 5 // 4


def test_the_least_is_kept_and_what_lacks_is_told() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    machine.whole = 150 * MIB
    assert machine.go(20) == [LEAST]
    assert machine.budget.shortfall_bytes == LEAST - (150 * MIB - RESERVE // 2 - STEP * 5 // 4)
    machine.whole = 1000 * MIB
    machine.go(1)
    assert machine.budget.shortfall_bytes == 0


def test_a_limit_that_comes_and_goes_makes_it_wait_longer() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    passes_until_growth = []
    for _ in range(8):
        machine.whole = 500 * MIB
        assert len(machine.go(1)) == 1
        machine.whole = 1000 * MIB
        passes = 0
        while not machine.go(1):
            passes += 1
        passes_until_growth.append(passes + 1)
    assert passes_until_growth == sorted(passes_until_growth)
    assert passes_until_growth[-1] == PATIENCE_MAX
    # After a quiet time it is as it was.
    machine.go(SOON + 1)
    machine.whole = 500 * MIB
    machine.go(1)
    machine.whole = 1000 * MIB
    assert len(machine.go(2)) == 1


def test_stalls_give_a_quarter_back_of_what_is_beyond_the_least() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    held = machine.plan.total
    change = machine.look(stalled=0.5)
    assert change is not None and change.budget == held - (held - LEAST) // 4
    assert "stalled for memory in 50% of the last pass" in change.reason
    machine.plan = plan_of(LEAST)
    machine.whole = LEAST + RESERVE + STEP * 2
    assert machine.look(stalled=0.5) is None
    assert machine.budget.shortfall_bytes == 0


def test_swapped_memory_has_to_come_back_and_leaving_memory_is_there() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    held = machine.plan.total
    change = machine.look(swapped=80 * MIB)
    assert change is not None and change.budget == held - 80 * MIB
    machine.plan = plan_of(300 * MIB)
    # Buffers in use stay until then.
    machine.whole -= 400 * MIB
    assert machine.look(leaving=held - 300 * MIB) is None
    machine.whole += 400 * MIB


def test_no_growth_for_a_while_after_a_refusal() -> None:
    machine = Machine(1000 * MIB)
    machine.go(10)
    machine.whole += 500 * MIB
    machine.budget.refused()
    assert machine.go(REFUSED_PASSES - 1) == []
    assert len(machine.go(3)) == 1


def test_what_malloc_keeps_needs_room_to_come_but_is_none_to_give() -> None:
    machine = Machine(MOST + HEAP_BYTES // 2 + RESERVE + STEP * 2)
    assert machine.plan.most is not None
    machine.plan.most.budget += HEAP_BYTES
    machine.plan.most.retain_heap = True
    machine.plan.most.smallest_bytes = LEAST
    machine.budget.note(True, STEP)
    assert machine.look() is None
    change = machine.look()
    assert change is not None and change.budget == MOST + HEAP_BYTES // 2 + STEP * 3 // 4
    machine.plan.retain_heap = True
    machine.whole = 390 * MIB
    change = machine.look()
    assert change is not None and change.budget == 390 * MIB - RESERVE - STEP * 5 // 4


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """The free memory of a machine, set by a test."""
    bounds = [Bound(1 << 40, 0, "the system")]
    monkeypatch.setattr("memascend.hardware.memory_limits.memory_bounds", lambda: bounds)
    return bounds


def test_the_first_plan_takes_half_and_may_become_all(bounds: list[Bound]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))
    units = partition(model)
    plan, follows = plan_for(units, "auto")
    assert follows and plan.most is not None
    assert plan.total == plan.most.total and plan.retain_heap
    assert {plan.states.note, *(line.note for line in plan.units)} == {"always there"}
    least = smallest_plan(units, plan.most.budget).total
    bounds[0] = Bound(4 * least + MIB, MIB, "the system")
    plan, _ = plan_for(units, "auto")
    assert plan.budget == 2 * least and plan.most is not None
    bounds[0] = Bound(0, MIB, "the system")
    plan, _ = plan_for(units, "auto")
    assert plan.total == least
    plan, _ = plan_for(units, "auto", "64MiB")
    assert plan.most is not None and plan.most.budget == 64 * MIB
    with pytest.raises(BudgetError, match=r"host_memory_max .1.0 MiB. is less"):
        plan_for(units, "auto", "1MiB")
    with pytest.raises(ValueError, match="'automatic' is not a size"):
        plan_for(units, "automatic")
    assert not plan_for(units, "64MiB")[1] and not plan_for(units, None)[1]


def test_addresses_that_may_be_reserved_bound_the_most(bounds: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    units = partition(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16))))
    monkeypatch.setattr("memascend.hardware.memory_limits.address_space_left", lambda: 80 * MIB)
    plan, _ = plan_for(units, "auto")
    assert plan.most is not None and plan.most.budget == 60 * MIB
