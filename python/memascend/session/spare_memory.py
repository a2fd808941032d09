"""How much of the memory for optimizer states a run lends to activations, by what its steps cost.

Beyond the weights a budget holds states, which then are not read, or activations, which then are not computed again.
Where the processor binds, a byte of activations spares time and a byte of states nearly none; where the drives bind it
is the other way round. A run finds out by trying: the cost of a step is what it waits for the drives and what it
computes again. Results are the same bits with any division.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Steps after a change that do not count, since buffers are filled in them, and steps that count.
SETTLING, COUNTED = 2, 3
#: The smallest share that is tried, after all and halves.
SMALLEST = 0.25
#: A division is better if it spares this share of a step.
WORTH = 0.02
#: A smaller share is tried too where the waits have grown by more than this share of what was spared.
WAITS_GROWN = 0.2


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step has spent, in seconds."""

    seconds: float
    waits: float
    recomputed: float
    #: Elements of the tensors that its layers were called with.
    elements: int


class SpareMemory:
    """Finds the share of states' memory to lend: that with which steps cost least."""

    def __init__(self) -> None:
        """Begin with nothing lent."""
        self.share = 0.0
        self.found = False
        self._settling = SETTLING
        self._steps: list[StepCost] = []
        #: The steps with nothing lent, and the best share with its steps.
        self._first: list[StepCost] = []
        self._best: tuple[float, list[StepCost]] = 0.0, []

    def after(self, step: StepCost) -> None:
        """Count a step, and set the `share` for the next ones."""
        if self.found:
            return
        if self._settling:
            self._settling -= 1
            return
        self._steps.append(step)
        if len(self._steps) == COUNTED:
            self._compare(self._steps)

    def end(self, share: float) -> None:
        """Leave it at a share from now on."""
        self.share, self.found = share, True

    def _try(self, share: float) -> None:
        self.share, self._steps, self._settling = share, [], SETTLING

    def _compare(self, steps: list[StepCost]) -> None:
        if not self._first:
            self._first = steps
            self._best = 0.0, steps
            waits, recomputed = _least_waits(steps), min(step.recomputed for step in steps)
            # The drives bind where the waits for them are longer than all that is computed again.
            if waits > recomputed or recomputed < WORTH * min(step.seconds for step in steps):
                self.end(0.0)
            else:
                self._try(1.0)
            return
        best, of_best = self._best
        elements = fmean(step.elements for step in [*of_best, *steps])
        spared = _cost(of_best, elements) - _cost(steps, elements)
        better = spared > WORTH * min(step.seconds for step in steps)
        if better:
            self._best = self.share, steps
        elif best:
            self.end(best)
            return
        grown = _least_waits(steps) - _least_waits(self._first)
        if self.share <= SMALLEST or (better and grown <= WAITS_GROWN * spared):
            self.end(self._best[0])
        else:
            self._try(self.share / 2)


def _least_waits(steps: Sequence[StepCost]) -> float:
    return min(step.waits for step in steps)


def _cost(steps: Sequence[StepCost], elements: float) -> float:
    """Return what a step with so many elements costs, by the cheapest of `steps`: others were disturbed."""
    return min(step.recomputed * elements / max(step.elements, 1) + step.waits for step in steps)
