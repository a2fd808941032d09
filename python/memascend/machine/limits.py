"""The host memory of this process, and how much more the machine, its memory cgroups and its rlimits let it have."""

from __future__ import annotations

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> tuple[int, str]:
    """Return the bytes that this process can still have, and a description of the bound that sets them.

    The least of: the memory that the system has available (MemAvailable), the memory that each memory cgroup above
    this process leaves (page cache, which the kernel reclaims first, counts as free), RLIMIT_AS and RLIMIT_DATA.
    """
    bounds = [(_kib("/proc/meminfo", "MemAvailable"), "the system's available memory")]
    bounds += _cgroup_bounds()
    for resource_limit, used, description in (
        (resource.RLIMIT_AS, "VmSize", "the limit on address space, ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "the limit on data, ulimit -d"),
    ):
        limit = resource.getrlimit(resource_limit)[0]
        if limit != resource.RLIM_INFINITY:
            bounds.append((limit - _kib("/proc/self/status", used, absent=0), description))
    least, why = min(bounds)
    return max(0, least), why


def resident_memory() -> int:
    """Return the bytes that this process holds resident now."""
    return _kib("/proc/self/status", "VmRSS", absent=0)


def _kib(file: str, name: str, absent: int = 1 << 62) -> int:
    """Return the bytes of a line `name:  N kB`, or `absent` where there is none."""
    for line in _lines(file):
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return absent


def _lines(file: str | Path) -> list[str]:
    """Return the lines of a file of /proc or a cgroup; none where the file cannot be read, as in some sandboxes."""
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def _cgroup_bounds() -> list[tuple[int, str]]:
    """Return (bytes left, description) of each memory cgroup from this process's own up to the root."""
    bounds = []
    limits: tuple[str, ...]
    for entry in _lines("/proc/self/cgroup"):
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, limits, usage = CGROUPS, ("memory.max", "memory.high"), "memory.current"
        elif "memory" in controllers.split(","):
            root, limits, usage = CGROUPS / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's: then only the root of the mounted hierarchy
        # applies.
        group = root / path.lstrip("/")
        for directory in [group, *group.parents]:
            for limit in limits if directory.is_relative_to(root) else ():
                if (bound := _left(directory, limit, usage)) is not None:
                    shown = "/" + str(directory.relative_to(root)) if directory != root else "/"
                    bounds.append((bound[1], f"the memory cgroup {shown} allows {bound[0]} bytes"))
    return bounds


def _left(directory: Path, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    """(limit, bytes left) of one cgroup; None where it sets no limit or cannot be read."""
    try:
        limit = int((directory / limit_name).read_text())
        usage = int((directory / usage_name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(directory / "memory.stat"))
    cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    cache += int(stat.get("total_active_file", stat.get("active_file", 0)))
    return limit, limit - usage + cache
