"""The host memory of this process, and how much more the machine, its memory cgroups and its rlimits let it have."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.hardware.cgroups import groups_above, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Reserve of a budget that follows the machine, as a share of a limit, and at most. Of the machine: growth of other
#: programs while a step lasts. Tools that kill before the kernel does (earlyoom) act below a tenth, too.
SYSTEM_RESERVE, SYSTEM_RESERVE_BYTES = 1 / 10, 8 << 30
#: Of a cgroup: page tables, sockets and other memory of the kernel's, and growth of Python and PyTorch from one step to
#: the next. Only processes of the group can take it, so it is less.
GROUP_RESERVE, GROUP_RESERVE_BYTES = 1 / 16, 1 << 30


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on the memory of this process."""

    #: Bytes that it still leaves.
    left: int
    #: Of these, bytes that are to be left alone by a process that could do with less.
    reserve: int
    description: str


@dataclass(frozen=True, slots=True)
class _Group:
    """A memory cgroup that contains this process."""

    directory: Path
    #: Its name, as users know it.
    name: str
    limits: tuple[str, ...]
    #: A limit beyond which the kernel takes memory back when the machine has none left.
    soft_limit: str | None
    usage: str


def available_memory() -> tuple[int, str]:
    """Return the bytes that this process can still have, and a description of the bound that sets them.

    The least of: the memory that the system has available (MemAvailable), the memory that each memory cgroup above
    this process leaves (page cache, which the kernel reclaims first, counts as free), RLIMIT_AS and RLIMIT_DATA.
    """
    bounds = [(system_available(), "the system's available memory")]
    for group in _groups():
        counter = _counters(group)
        cache = counter("inactive_file") + counter("active_file")
        bounds += [(left + cache, why) for _, left, why in _lefts(group, group.limits)]
    bounds += [(left, why) for _, left, why in _rlimits((resource.RLIMIT_AS, resource.RLIMIT_DATA))]
    least, why = min(bounds)
    return max(0, least), why


def memory_bounds() -> list[Bound]:
    """Return the bounds of the memory that this process can still take, each with its reserve.

    As in `available_memory`, but soft limits (memory.high, and memory.soft_limit_in_bytes of version 1) are limits, and
    the page cache of a cgroup is free only as far as it is neither mapped, as the code of libraries is, nor waits to be
    written. RLIMIT_AS is no bound: addresses are reserved beforehand.
    """
    total = total_memory()
    system_reserve = min(int(total * SYSTEM_RESERVE), SYSTEM_RESERVE_BYTES)
    bounds = [Bound(system_available(), system_reserve, "the system's available memory")]
    for group in _groups():
        counter = _counters(group)
        cache = counter("inactive_file") + counter("active_file")
        cache -= sum(map(counter, ("file_mapped", "mapped_file", "file_dirty", "dirty", "file_writeback", "writeback")))
        names = group.limits if group.soft_limit is None else (*group.limits, group.soft_limit)
        for limit, left, why in _lefts(group, names):
            # Without a limit the group leaves as much as the system.
            if limit <= total:
                bounds.append(Bound(left + max(0, cache), group_reserve(limit), why))
    for limit, left, why in _rlimits((resource.RLIMIT_DATA,)):
        bounds.append(Bound(left, group_reserve(limit), why))
    return bounds


def memory_left() -> int:
    """Return the bytes that this process can still take beside every reserve; below 0 where a reserve is taken."""
    return min(bound.left - bound.reserve for bound in memory_bounds())


def group_reserve(limit: int) -> int:
    """Return the bytes of a cgroup's limit that are to be left alone."""
    return min(int(limit * GROUP_RESERVE), GROUP_RESERVE_BYTES)


def total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return _kib("/proc/meminfo", "MemTotal")


def system_available() -> int:
    """Return the bytes that the machine has available (MemAvailable)."""
    return _kib("/proc/meminfo", "MemAvailable")


def resident_memory() -> int:
    """Return the bytes that this process holds resident now."""
    return _kib("/proc/self/status", "VmRSS", absent=0)


def high_water_mark() -> int:
    """Return the most bytes that this process has held resident, since that was last reset."""
    return _kib("/proc/self/status", "VmHWM", absent=0)


def swapped_memory() -> int:
    """Return the bytes of this process that the kernel has written to swap."""
    return _kib("/proc/self/status", "VmSwap", absent=0)


def anonymous_memory() -> int:
    """Return the resident bytes of this process that no file backs."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0


def address_space_left() -> int:
    """Return the bytes of addresses that this process can still reserve (RLIMIT_AS)."""
    return min((left for _, left, _ in _rlimits((resource.RLIMIT_AS,))), default=1 << 62)


def own_group() -> Path | None:
    """Return the directory of this process's own cgroup of the second version, if it counts memory; else None."""
    return next((group.directory for group in _groups() if group.soft_limit is None), None)


def _kib(file: str, name: str, absent: int = 1 << 62) -> int:
    """Return the bytes of a line `name:  N kB`, or `absent` where there is none."""
    for line in lines_of(file):
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return absent


def _rlimits(limits: tuple[int, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield (limit, bytes left, description) of each rlimit that is set."""
    used = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}
    described = {
        resource.RLIMIT_AS: "the limit on address space, ulimit -v",
        resource.RLIMIT_DATA: "the limit on data, ulimit -d",
    }
    for number in limits:
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit, limit - _kib("/proc/self/status", used[number], absent=0), described[number]


def _groups() -> Iterator[_Group]:
    """Yield each memory cgroup from this process's own up to the root."""
    limits: tuple[str, ...]
    for version, directory, name in groups_above("memory"):
        if version == 2:
            limits, soft_limit, usage = ("memory.max", "memory.high"), None, "memory.current"
        else:
            limits, soft_limit = ("memory.limit_in_bytes",), "memory.soft_limit_in_bytes"
            usage = "memory.usage_in_bytes"
        if (directory / usage).exists():
            yield _Group(directory, name, limits, soft_limit, usage)


def _lefts(group: _Group, names: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """Yield (limit, bytes left, description) of each limit that a cgroup sets and that can be read."""
    for name in names:
        try:
            limit = int((group.directory / name).read_text())
            usage = int((group.directory / group.usage).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield limit, limit - usage, f"the memory cgroup {group.name} allows {limit} bytes"


def _counters(group: _Group) -> Callable[[str], int]:
    """Return a function that gives a counter of a cgroup, with the groups within it, by name; 0 for an unknown one."""
    counters = dict(line.split(maxsplit=1) for line in lines_of(group.directory / "memory.stat"))
    # Files of the first version count the group alone, and others count its subtree.
    prefix = "total_" if any(name.startswith("total_") for name in counters) else ""
    return lambda name: int(counters.get(prefix + name, 0))
