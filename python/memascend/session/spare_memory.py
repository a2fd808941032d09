"""Divides the memory beyond the least plan between activations and all that is kept off the SSD, by the costs of steps.

Activations that stay in memory are not computed again; states, weights and gradients that stay are not moved. Where the
processor binds, a byte of activations spares time and a byte of the others nearly none; where the drives bind it is the
other way round. A run tries both: a step costs the time in which it waits for the drives and the time of its
recomputations. The bits are the same with any division.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from memascend.layout.units import round_up
from memascend.memory_plan.lines import ACTIVATIONS_BYTES_MIN, HOLES_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.autograd.kept import KeptActivations
    from memascend.common.timeline import Timeline
    from memascend.memory_plan.lines import Plan
    from memascend.options import SpareFor

#: Steps after a change that do not count, since buffers are filled in them, and steps that count.
SETTLING, COUNTED = 2, 3
#: Bytes are lent in multiples of this, since each change of the plan takes time.
LENT_BYTES_STEP = 2**20
#: The smallest share that is tried.
SMALLEST = 0.25
#: A division is better if it spares this share of a step.
WORTH = 0.02
#: A smaller share is tried too where the waits have grown by more than this share of the time that was spared.
WAITS_GROWN = 0.2


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step, in seconds."""

    seconds: float
    waits: float
    recomputed: float
    #: Elements of the tensors that its layers were called with.
    elements: int


class ShareSearch:
    """Finds the share of the activations to lend memory to: that with which steps cost least."""

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

    def _end(self, share: float) -> None:
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
                self._end(0.0)
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
            self._end(best)
            return
        grown = _least_waits(steps) - _least_waits(self._first)
        if self.share <= SMALLEST or (better and grown <= WAITS_GROWN * spared):
            self._end(self._best[0])
        else:
            self._try(self.share / 2)


def _least_waits(steps: Sequence[StepCost]) -> float:
    return min(step.waits for step in steps)


def _cost(steps: Sequence[StepCost], elements: float) -> float:
    """Return the cost of a step with so many elements, by the cheapest of `steps`: others were disturbed."""
    return min(step.recomputed * elements / max(step.elements, 1) + step.waits for step in steps)


class Steps(Protocol):
    """The steps of a run."""

    #: How many were taken.
    steps: int
    #: Of how many one is durable: 0 if none is, None before that is settled.
    period: int | None


@dataclass(frozen=True, slots=True)
class _Spent:
    """Steps that a run has taken, and its costs so far."""

    steps: int
    cost: StepCost

    def since(self, before: _Spent) -> StepCost:
        """Return the mean cost of the steps since `before`."""
        steps, now, then = self.steps - before.steps, self.cost, before.cost
        return StepCost(
            (now.seconds - then.seconds) / steps,
            (now.waits - then.waits) / steps,
            (now.recomputed - then.recomputed) / steps,
            (now.elements - then.elements) // steps,
        )


class Division:
    """Measures the steps of a run, and says before each how much activations get of the room for states."""

    def __init__(self, spare_for: SpareFor, kept: KeptActivations, timeline: Timeline, steps: Steps) -> None:
        """Divide as `spare_memory` of `memascend.options` says: by "activations" or "auto"."""
        self._search = ShareSearch() if spare_for == "auto" else None
        self._kept = kept
        self._timeline = timeline
        self._steps = steps
        #: The costs before the present step.
        self._began: _Spent | None = None
        #: Whether nothing will change any more.
        self.ended = False
        kept.measures = True

    def begin_step(self) -> None:
        """Leave the costs of the present step out."""
        self._began = None

    def stop(self) -> None:
        """Leave the division as it is."""
        self.ended, self._kept.measures = True, False

    def bytes_to_lend(self, plan: Plan) -> int:
        """Return the bytes of the budget that activations get before a pass, in place of caches."""
        share, wanted = self._share(), self._kept.wanted_bytes
        if wanted < ACTIVATIONS_BYTES_MIN or (not plan.lent_bytes and wanted <= plan.activations_bytes):
            return 0
        return round_up(int(share * wanted * (1 + HOLES_SHARE)), LENT_BYTES_STEP)

    def _share(self) -> float:
        if self._search is None:
            return 1.0
        if self._steps.period != 1:
            # States that stay are not written where not every step is durable: lending them would wear the drives.
            self.stop()
            return 0.0
        spent, began = self._spent(), self._began
        if began is None or spent.steps > began.steps:
            self._began = spent
            if began is not None:
                self._search.after(spent.since(began))
            if self._search.found and not self._search.share:
                self.stop()
        return self._search.share

    def _spent(self) -> _Spent:
        seconds, kept = self._timeline.seconds(), self._kept
        waits = seconds["ssd_read"] + seconds["ssd_write"]
        return _Spent(self._steps.steps, StepCost(time.perf_counter(), waits, kept.recomputed_ns / 1e9, kept.elements))
