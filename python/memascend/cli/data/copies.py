"""Copies on disk of data that cannot be read in its own file: rows of columns, text in other encodings than UTF-8."""

from __future__ import annotations

from pathlib import Path


class FileCopies:
    """Files in a directory, by numbers from 1 on."""

    def __init__(self, scratch: Path) -> None:
        """Begin with none, in the directory `scratch`."""
        self._scratch = scratch
        self._count = 0

    def begin(self) -> int:
        """Return the number of a new copy."""
        self._count += 1
        return self._count

    def path(self, number: int) -> Path:
        """Return where a copy is."""
        return self._scratch / f"copy-{number}"
