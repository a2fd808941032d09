"""Fixtures of the sweeps over modules and architectures that others wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory in memory, where the system has such: some tests open stores by the thousand."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)
