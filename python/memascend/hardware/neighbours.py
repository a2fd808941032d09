"""How much of this process's processors other programs use, and the host of a virtual machine takes away."""

from __future__ import annotations

import os
import time

from memascend.hardware.cgroups import lines_of

_SECONDS_PER_TICK = 1 / os.sysconf("SC_CLK_TCK")
#: Of the fields of a line of /proc/stat: user, nice, system, irq, softirq, steal. Times of guests are in user and nice.
_BUSY = (1, 2, 3, 6, 7, 8)


class Neighbours:
    """Counts the processor time that others take on the processors of this process's affinity mask."""

    def __init__(self) -> None:
        """Count from now on."""
        self._last = self._read()

    def processors(self) -> float:
        """Return how many processors' time others took since the last call, 0.0 and more; 0.0 where it is not known.

        Stall information (PSI) would count the threads of this process that wait for each other, too.
        """
        (moment, busy, own), self._last = self._last, self._read()
        now, busy_now, own_now = self._last
        return max(0.0, (busy_now - busy) - (own_now - own)) / max(now - moment, 1e-3)

    def _read(self) -> tuple[float, float, float]:
        """Return the time, and the seconds of all and of this process on its processors."""
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = 0
        for line in lines_of("/proc/stat"):
            fields = line.split()
            if fields and fields[0] in names:
                busy += sum(int(fields[index]) for index in _BUSY if index < len(fields))
        return time.monotonic(), busy * _SECONDS_PER_TICK, time.process_time()
