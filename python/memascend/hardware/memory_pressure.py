"""Signs that memory is short: the time that threads were stalled for it, and how much more a step took than its start.

Both cover moments between two looks, which the free memory at the second look does not show.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from memascend.hardware import memory_limits

#: How often the memory of this process is sampled.
SAMPLE_SECONDS = 0.01
#: Stalls on the whole machine count while it has no more available than this share of its memory.
LITTLE = 1 / 5
_SYSTEM_STALLS = Path("/proc/pressure/memory")


class Stalls:
    """How long threads were stalled because memory was short, by the kernel's account (PSI)."""

    def __init__(self) -> None:
        """Count from now on."""
        self._last = (time.monotonic(), *self._read())

    def share(self) -> float:
        """Return the share of the time since the last call, 0 to 1, in which some thread of this process's was stalled.

        Threads of its cgroup are meant. Where the kernel does not count those apart (version 1 of cgroups), the
        machine's threads are meant, and count only while the machine itself has little left: others may have reached
        limits of their own, which memory given back here would not change. Without PSI, all of the time counts in which
        the kernel throttled the cgroup (the event `high` in memory.events). 0 where neither is known.
        """
        moment, stalled, throttled = self._last
        self._last = (now, stalled_now, throttled_now) = (time.monotonic(), *self._read())
        if stalled is None or stalled_now is None:
            return float(throttled_now > throttled)
        if self._of_machine and memory_limits.system_available() > memory_limits.total_memory() * LITTLE:
            return 0.0
        return min(1.0, (stalled_now - stalled) / max(now - moment, 1e-3))

    def _read(self) -> tuple[float | None, int]:
        """Return the seconds that threads were stalled, None where they are not known, and how often throttled."""
        group = memory_limits.own_group()
        self._of_machine = group is None
        if group is not None:
            if (stalled := _stalled(group / "memory.pressure")) is not None:
                return stalled, 0
            with suppress(OSError):
                events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
                return None, int(events.get("high", 0))
        return _stalled(_SYSTEM_STALLS), 0


def _stalled(file: Path) -> float | None:
    """Return the seconds in which some thread was stalled, from a file of PSI's; None where it cannot be read."""
    try:
        some = file.read_text().split("\n", 1)[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):  # the kernel has no PSI, or it is switched off
        return None


class Growth:
    """How far the memory of this process rises within a pass above its beginning.

    A thread samples it, since the kernel's own high-water mark cannot be reset without taking it from other readers. A
    new high-water mark of the process counts too.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._first = self._most = memory_limits.anonymous_memory()
        self._high_water = self._resident = 0
        #: A sample of the pass before must not count in the next.
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._sample, name="memascend-growth", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # The system starts no more threads: the high-water mark alone counts.
            self._thread = None

    def begin(self) -> None:
        """Note that a pass begins."""
        with self._lock:
            self._first = self._most = memory_limits.anonymous_memory()
        self._high_water, self._resident = memory_limits.high_water_mark(), memory_limits.resident_memory()

    def bytes(self) -> int:
        """Return by how many bytes the memory rose at most since the pass began."""
        high_water = memory_limits.high_water_mark()
        risen = high_water - self._resident if high_water > self._high_water else 0
        return max(0, self._most - self._first, risen)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def ended(self, seconds: float) -> bool:
        """Wait for the end of the thread after `close`, so many seconds at most; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            with self._lock:
                self._most = max(self._most, memory_limits.anonymous_memory())
