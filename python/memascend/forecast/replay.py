"""The rule of the weight cache, replayed without memory: which units are fetched in each pass over a known order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memascend.streaming.order import PREFETCH_UNITS, UseOrder, farthest, smallest_holding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Line


class Replay:
    """Follows the rule of `memascend.streaming.order` with counted buffers, and reports the fetches."""

    def __init__(
        self,
        units: Sequence[Unit],
        lines: Sequence[Line],
        ahead: int = PREFETCH_UNITS,
        taken: Iterable[int] = (),
        stale: bool = True,
    ) -> None:
        """Use the buffers of `lines`, except those that the units `taken` always have; fetch so many units `ahead`.

        With `stale`, resident units have to be read again after a step.
        """
        self._buffers: Counter[int] = Counter()
        for line in lines:
            self._buffers[line.nbytes] += line.count
        #: By number of a unit: the size of the buffers that serve it.
        #: A table without a buffer is not fetched.
        largest = max(self._buffers, default=0)
        self._size = [smallest_holding(unit.nbytes, self._buffers) if unit.nbytes <= largest else 0 for unit in units]
        self._buffers.subtract(self._size[number] for number in taken)
        self._ahead = ahead
        self._stale = stale
        self._order: UseOrder[int] = UseOrder()
        self._resident: set[int] = set()
        self._in_use: int | None = None
        #: Of the last pass: the number of a use, and the unit that was fetched for it.
        self.fetches: list[tuple[int, int]] = []

    def step(self, passes: Sequence[Sequence[int]], passing: Collection[int] = ()) -> list[list[int]]:
        """Return the units fetched in each pass (forward and backward) of one optimizer step; `passes` are the uses.

        Those whose numbers are in `passing` find a unit or read it, and need no buffer for it.
        """
        if self._stale:
            self._resident.clear()
        return [self._fetched_by(uses, passing) for uses in passes]

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those units that are not in memory now."""
        return [number for number in numbers if number not in self._resident]

    def _fetched_by(self, uses: Sequence[int], passing: Collection[int]) -> list[int]:
        self.fetches = []
        self._order.begin_known(uses)
        for use, number in enumerate(uses):
            self._order.record(number)
            if number not in self._resident:
                self._in_use = None
                if use in passing:
                    self.fetches.append((use, number))
                else:
                    self._fetch(number, use, sooner_than=-1)
            self._in_use = number
            self._order.prefetch(
                self._ahead,
                self._resident.__contains__,
                lambda unit, ahead: ahead in passing or self._fetch(unit, ahead, sooner_than=ahead),
            )
        return [number for _, number in self.fetches]

    def _fetch(self, number: int, use: int, sooner_than: int) -> bool:
        size = self._size[number]
        rivals = [other for other in sorted(self._resident) if self._size[other] == size]
        if len(rivals) >= self._buffers[size]:
            idle = (other for other in rivals if other != self._in_use)
            victim = farthest(idle, self._order.next_use, beyond=sooner_than)
            if victim is None:
                return False
            self._resident.discard(victim)
        self._resident.add(number)
        self.fetches.append((use, number))
        return True
