"""Samples the machine between the passes of a model whose host memory budget follows free memory."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memascend.hardware.memory_limits import memory_bounds, swapped_memory
from memascend.hardware.memory_pressure import Growth, Stalls
from memascend.memory_plan.auto_budget import AutomaticBudget, BudgetChange, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.memory_plan.lines import Plan

#: Passes of a millisecond are not looked at one by one: a look takes at most one part in so many of the time.
LOOK_SHARE = 50
#: A directory that every process has, and that nothing else locks.
_LOCKED = "/proc"


class MemoryMonitor:
    """The latest samples of the machine, and the passes of one model."""

    def __init__(self) -> None:
        """Begin to sample the memory of this process."""
        self._budget = AutomaticBudget()
        self._growth = Growth()
        self._stalls = Stalls()
        #: Whether the last pass had gradients; None before the first.
        self._grad: bool | None = None
        self._next = 0.0

    def is_due(self, grad: bool) -> bool:
        """Return whether to look before a pass that begins now, with or without gradients."""
        return time.monotonic() >= self._next or (grad and not self._grad)

    def look(self, plan: Plan, grad: bool, leaving: int, alone: bool) -> BudgetChange | None:
        """Return the change that is due before a pass with or without gradients, growing only if `alone`.

        `leaving` are the bytes that an earlier change of `plan` is still giving back.
        """
        began = time.monotonic()
        if self._grad is not None:
            self._budget.note(self._grad, self._growth.bytes())
        bounds, swapped, stalled = memory_bounds(), swapped_memory(), self._stalls.share()
        change = self._budget.decide(plan, bounds, grad=grad, leaving=leaving, swapped=swapped, stalled=stalled)
        self._next = time.monotonic() + (time.monotonic() - began) * LOOK_SHARE
        if change is not None and change.budget > resident_bytes(plan) and not alone:
            return None
        return change

    @property
    def shortfall_bytes(self) -> int:
        """Bytes that the machine lacks for the least plan, at the last look."""
        return self._budget.shortfall_bytes

    def refused(self) -> None:
        """Note that the system has refused memory."""
        self._budget.refused()

    def begin(self, grad: bool) -> None:
        """Note that a pass begins, after the change, if any, that preceded it."""
        self._stalls.share()  # A change itself makes the kernel find memory.
        self._grad = grad
        self._growth.begin()

    def close(self) -> None:
        """End the sampling."""
        self._growth.close()


@contextmanager
def growth_lock() -> Iterator[bool]:
    """Give whether this process may grow: one at a time looks at the free memory, and takes it."""
    try:
        directory = os.open(_LOCKED, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:  # A sandbox without locks.
            alone = True
        yield alone
    finally:
        os.close(directory)
