"""The processors that this process really has: affinity mask, quota of time of its cgroups, and which share a core."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memascend.hardware.cgroups import groups_above, lines_of

PROCESSORS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may compute on."""

    #: Processors in its affinity mask, a subset of its cpuset cgroup's.
    logical: int
    #: Cores that these belong to: two processors of a core (SMT) share its arithmetic units.
    physical: int
    #: Processors' worth of time that cgroups let it have, as 2.5; None without a quota.
    quota: float | None = None
    #: The cgroup that sets the quota.
    quota_of: str = ""
    #: Whether the mask has every processor of the machine.
    whole: bool = True

    @property
    def threads(self) -> int:
        """How many threads can run at once: processors, and no more than the quota pays for."""
        return self._paid(self.logical)

    @property
    def cores(self) -> int:
        """How many threads can compute at full speed at once: cores, and no more than the quota pays for."""
        return self._paid(self.physical)

    def _paid(self, count: int) -> int:
        return count if self.quota is None else max(1, min(count, int(self.quota)))

    def text(self) -> str:
        """Describe the processors in a line."""
        text = f"{self.logical} processors for this process"
        if self.physical != self.logical:
            text += f" on {self.physical} cores"
        if self.quota is not None:
            text += f", and time of {self.quota:.4g} of them ({self.quota_of})"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return `logical`, `physical` and `quota`, ready for JSON."""
        return {"logical": self.logical, "physical": self.physical, "quota": self.quota}


def processors() -> Processors:
    """Return the processors that this process may compute on now. Its mask and its cgroups may change while it runs."""
    allowed = os.sched_getaffinity(0)
    quotas = sorted(_quotas())
    quota, quota_of = quotas[0] if quotas else (None, "")
    if quota is not None and quota >= len(allowed):
        quota, quota_of = None, ""
    cores = {_core_of(number, PROCESSORS) for number in allowed}
    return Processors(len(allowed), len(cores), quota, quota_of, len(allowed) >= (os.cpu_count() or 1))


@cache
def _core_of(number: int, described: Path) -> str:
    """Return the core of a processor, as the list of processors that share it, or its own number if unknown."""
    lines = lines_of(described / f"cpu{number}/topology/thread_siblings_list")
    return lines[0] if lines else str(number)


def _quotas() -> list[tuple[float, str]]:
    """Return (processors' worth of time, description) of each quota of the cgroups above this process."""
    quotas = []
    for version, directory, name in groups_above("cpu"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            if version == 2:
                quota, period = map(int, (directory / "cpu.max").read_text().split())
            else:
                quota = int((directory / "cpu.cfs_quota_us").read_text())
                period = int((directory / "cpu.cfs_period_us").read_text())
            if quota > 0 and period > 0:
                quotas.append((quota / period, f"the cpu cgroup {name} allows {quota} of each {period} us"))
    return quotas
