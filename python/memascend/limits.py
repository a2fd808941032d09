"""How much more host memory this process can have: what the machine, its memory cgroup and its limits leave."""

from __future__ import annotations

import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> tuple[int, str]:
    """Return the bytes that this process can still have, and what sets that bound.

    The least of: what the system has available (MemAvailable), what every memory cgroup above this process leaves
    (page cache, which the kernel gives up first, counts as free) and RLIMIT_AS.
    """
    bounds = [(_meminfo("MemAvailable"), "the system's available memory")]
    bounds += _cgroup_bounds()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bounds.append((limit - pages * resource.getpagesize(), "the limit on address space, ulimit -v"))
    least, why = min(bounds)
    return max(0, least), why


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_bounds() -> list[tuple[int, str]]:
    """What each memory cgroup from this process's upward leaves."""
    bounds = []
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be that of the host: then only the root of what is mounted here is ours.
        group = root / path.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root) and (bound := _left(directory, *names)) is not None:
                shown = "/" + str(directory.relative_to(root)) if directory != root else "/"
                bounds.append((bound[1], f"the memory cgroup {shown} allows {bound[0]} bytes"))
    return bounds


def _left(directory: Path, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    """(limit, bytes left) of one cgroup; None where it sets no limit or cannot be read."""
    try:
        limit = int((directory / limit_name).read_text())
        usage = int((directory / usage_name).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    cache += int(stat.get("total_active_file", stat.get("active_file", 0)))
    return limit, limit - usage + cache
