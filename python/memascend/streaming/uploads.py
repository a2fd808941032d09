"""Copies to a device out of buffers in host memory: the latest of each unit, and those whose end frees a buffer.

A buffer of host memory whose unit is evicted during a copy out of it is free when the copy ends. So a unit that finds
no free buffer waits for the oldest copy, and a unit that is fetched ahead leaves the others where they are. A model
that computes in host memory starts no copy, and everything here is empty.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend._memascend import CudaEvent
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Unit


class _Upload(NamedTuple):
    """A copy to the device, and the events that the device waits for before the copy."""

    after: list[CudaEvent]
    arrived: CudaEvent

    def wait(self, timeline: Timeline) -> None:
        """Wait for the copy. The time in which the device still computes before the copy is not counted as copying."""
        for event in self.after:
            event.wait()
        with timeline.waiting("h2d"):
            self.arrived.wait()


class Uploads:
    """The copies to a device that may still read buffers of host memory."""

    def __init__(self, timeline: Timeline) -> None:
        """Have no copy under way; `timeline` counts the waits."""
        self._timeline = timeline
        #: The latest copy of each unit out of its host buffer.
        self._latest: dict[Unit, _Upload] = {}
        #: By size of the host buffer: copies out of buffers that were dropped, and become free when the copies end.
        self._returning: defaultdict[int, deque[_Upload]] = defaultdict(deque)

    def note(self, unit: Unit, after: Sequence[CudaEvent], arrived: CudaEvent) -> None:
        """Record a copy of a unit: the events that it waits for, and the event of its end."""
        self._latest[unit] = _Upload(list(after), arrived)

    def latest(self, unit: Unit) -> CudaEvent | None:
        """Return the end of the unit's latest copy out of its buffer; None if there was none."""
        upload = self._latest.get(unit)
        return None if upload is None else upload.arrived

    def wait(self, unit: Unit) -> None:
        """Wait until no copy reads the unit's bytes in host memory, which are about to be written to."""
        if unit in self._latest:
            self._latest[unit].wait(self._timeline)

    def note_dropped(self, unit: Unit, size: int | None) -> None:
        """Record that a unit has left its buffer of `size` bytes; None is a buffer beyond the budget."""
        upload = self._latest.pop(unit, None)
        if size is not None and upload is not None and not upload.arrived.is_done():
            self._return(size, upload)

    def note_returning(self, size: int, after: Sequence[CudaEvent], arrived: CudaEvent) -> None:
        """Record a copy out of a buffer of `size` bytes that only the copy holds."""
        self._return(size, _Upload(list(after), arrived))

    def _return(self, size: int, upload: _Upload) -> None:
        self.are_returning(size)  # Forgets those that have ended: where buffers are always free, nothing else would.
        self._returning[size].append(upload)

    def are_returning(self, size: int) -> bool:
        """Return whether a copy under way will free a buffer of `size` bytes."""
        returning = self._returning[size]
        while returning and returning[0].arrived.is_done():
            returning.popleft()
        return bool(returning)

    def wait_oldest(self, size: int) -> bool:
        """Wait for the oldest copy that frees a buffer of `size` bytes; return False if there is none."""
        returning = self._returning[size]
        if returning:
            returning.popleft().wait(self._timeline)
            return True
        return False

    def clear(self) -> None:
        """Forget all copies, which have ended."""
        self._latest.clear()
        self._returning.clear()
