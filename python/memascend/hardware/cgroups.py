"""The cgroups that contain this process, of both versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS = Path("/sys/fs/cgroup")


def groups_above(controller: str) -> Iterator[tuple[int, Path, str]]:
    """Yield (version, directory, name) of each cgroup from this process's own up to the root.

    Of the first version it is the hierarchy of `controller`; of the second, whose groups may or may not have the
    controller, the one hierarchy. The name is the one that users know.
    """
    for entry in lines_of("/proc/self/cgroup"):
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            # Beside hierarchies of the first version, the second's has a place of its own.
            version, root = 2, CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS
        elif controller in controllers.split(","):
            # Where controllers share a hierarchy, the name of each is a link to it, except on some systems.
            version, root = 1, CGROUPS / controller if (CGROUPS / controller).is_dir() else CGROUPS / controllers
        else:
            continue
        # In a container the path may be the host's: then only the root of the mounted hierarchy
        # applies.
        group = root / path.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root):
                yield version, directory, "/" + str(directory.relative_to(root)) if directory != root else "/"


def lines_of(file: str | Path) -> list[str]:
    """Return the lines of a file of /proc, /sys or a cgroup; none where it cannot be read, as in some sandboxes."""
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []
