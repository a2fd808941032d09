"""Fixtures: memory cgroups of the kernel's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import requirements

from memascend.hardware import cgroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def memory_cgroup() -> Iterator[Callable[[int], Path]]:
    """Make memory cgroups of the kernel's with a limit; skips where that is not allowed."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        try:
            parent, limit_name = _own_memory_cgroup()
            group = parent / f"memascend-test-{os.getpid()}-{len(made)}"
            group.mkdir()
            made.append(group)
            (group / limit_name).write_text(str(limit))
        except OSError as error:
            requirements.unmet("root", f"cannot make a memory cgroup here: {error}")
        return group

    yield make
    for group in made:
        group.rmdir()


def _own_memory_cgroup() -> tuple[Path, str]:
    """Return the memory cgroup to make others in (this process's own, or the root), and the name of a limit's file."""
    first = cgroups.CGROUPS / "memory"
    if (first / "memory.limit_in_bytes").exists():
        entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        own = next(path for _, controllers, path in entries if "memory" in controllers.split(","))
        parent = first / own.lstrip("/")
        # In a container the path may be the host's.
        return parent if parent.exists() else first, "memory.limit_in_bytes"
    # A group of the second version has either processes or limited groups, and only the root may have both.
    control = cgroups.CGROUPS / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")
    return cgroups.CGROUPS, "memory.max"
