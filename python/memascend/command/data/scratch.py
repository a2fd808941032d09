"""Scratch files of the data, which the run removes."""

from __future__ import annotations

import contextlib
from typing import Any


def close_quietly(file: Any) -> None:
    """Close a scratch file. A failed write was reported before, and closing would only try it again."""
    with contextlib.suppress(OSError):
        file.close()
