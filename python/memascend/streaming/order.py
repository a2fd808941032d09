"""The rule of the weight cache: which unit comes next, and which one is evicted for it.

The order in which one pass used its units predicts the next pass of the same kind. The prediction says which unit
to fetch ahead, and which one to evict: the one whose next use is farthest away (Belady 1966).

Everything here is pure. The streamers of host memory and of a device follow this rule with real buffers, and the
forecast of traffic follows it with counted ones.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

#: Units fetched ahead of the one in use, when buffers allow.
PREFETCH_UNITS = 2
#: Units copied to the device ahead of the one in use, when buffers allow.
DEVICE_AHEAD = 2
#: The number of a use that is not expected.
NEVER = 1 << 60

Unit = TypeVar("Unit")
Candidate = TypeVar("Candidate")


class UseOrder(Generic[Unit]):
    """The uses that are expected of a pass, numbered from 0, and how far the pass has come."""

    def __init__(self, predictions: Mapping[Hashable, Sequence[Unit]] | None = None) -> None:
        """Expect `predictions` of the first pass of each kind; no pass has begun."""
        self._predictions = dict(predictions or {})
        self._kind: Hashable = None
        self._follow(())

    def begin(self, kind: Hashable) -> None:
        """Begin a pass of this kind (not None); the uses of the pass before predict the next pass of its kind."""
        self._remember()
        self._kind = kind
        self._follow(self._predictions[kind])

    def begin_known(self, expected: Sequence[Unit]) -> None:
        """Begin a pass whose uses are known. It predicts no other pass."""
        self._remember()
        self._kind = None
        self._follow(expected)

    def _remember(self) -> None:
        if self._kind is not None and self._used:
            self._predictions[self._kind] = self._used

    def _follow(self, expected: Sequence[Unit]) -> None:
        self._expected = expected
        #: The number of the use that is expected next.
        self._position = 0
        self._used: list[Unit] = []
        self._next_uses: dict[Unit, deque[int]] = {}
        for number, unit in enumerate(expected):
            self._next_uses.setdefault(unit, deque()).append(number)

    def record(self, unit: Unit) -> None:
        """Note that `unit` is used now."""
        if self._used and self._used[-1] == unit:
            return
        self._used.append(unit)
        # A different order than expected: continue behind the next place where this unit was
        # expected.
        use = self.next_use(unit)
        if use != NEVER:
            self._position = use + 1

    @property
    def latest(self) -> Unit | None:
        """The unit that was used last."""
        return self._used[-1] if self._used else None

    @property
    def kind(self) -> Hashable:
        """The kind of the present pass; None for one whose uses are known."""
        return self._kind

    def next_use(self, unit: Unit) -> int:
        """Return the number of the next use that is expected of `unit`, or NEVER."""
        uses = self._next_uses.get(unit)
        while uses and uses[0] < self._position:
            uses.popleft()
        return uses[0] if uses else NEVER

    def upcoming(self, count: int) -> Iterator[tuple[int, Unit]]:
        """Yield the next `count` uses that are expected, with their numbers."""
        end = min(len(self._expected), self._position + count)
        return ((number, self._expected[number]) for number in range(self._position, end))

    def prefetch(self, count: int, is_there: Callable[[Unit], bool], fetch: Callable[[Unit, int], bool]) -> None:
        """Fetch the units of the next `count` uses that are not there, the first use first.

        `fetch` gets a unit and the number of its use, and returns whether a buffer was found. The first unit without a
        buffer ends the prefetch: buffers are for the units that are used first.
        """
        for number, unit in self.upcoming(count):
            if not is_there(unit) and not fetch(unit, number):
                return


def farthest(candidates: Iterable[Candidate], next_use: Callable[[Candidate], int], beyond: int) -> Candidate | None:
    """Return the candidate with the farthest next use, of those used later than use number `beyond`, or None.

    Of candidates that are used equally late, it is the first.
    """
    chosen, latest = None, beyond
    for candidate in candidates:
        use = next_use(candidate)
        if use > latest:
            chosen, latest = candidate, use
    return chosen


def smallest_holding(nbytes: int, sizes: Iterable[int]) -> int:
    """Return the smallest of the buffer sizes that holds `nbytes`."""
    return min(size for size in sizes if size >= nbytes)
