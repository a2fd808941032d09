"""Where each document lies, in files on disk, so that host memory does not grow with their number."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from memascend.common.outputs import close_quietly, writing


class Index:
    """Places of documents by number: a file, and of a record the bytes in it."""

    _PLACE = struct.Struct("<QIBQQ")  # path offset, path length, is a record, its offset, its length

    def __init__(self, scratch: Path) -> None:
        """Begin with none, in two files in the directory `scratch`."""
        self._scratch = scratch
        self._last: tuple[bytes, int] = (b"", 0)
        self._names_bytes = self._count = 0
        with writing(scratch):
            self._names = open(scratch / "names", "wb+")  # noqa: SIM115 (closed by close)
            self._places = open(scratch / "documents", "wb+")  # noqa: SIM115

    def __len__(self) -> int:
        return self._count

    def append(self, path: Path, *, is_record: bool, offset: int, length: int) -> None:
        """Add the place of a document."""
        name = os.fsencode(path)
        with writing(self._scratch):
            if name != self._last[0]:
                self._last = (name, self._names_bytes)
                self._names.write(name)
                self._names_bytes += len(name)
            self._places.write(self._PLACE.pack(self._last[1], len(name), is_record, offset, length))
        self._count += 1

    def flush(self) -> None:
        """Have `place` see what was added."""
        with writing(self._scratch):
            self._names.flush()
            self._places.flush()

    def place(self, number: int) -> tuple[Path, bool, int, int]:
        """Return the path of a document, whether it is a record there, and its offset and length in bytes."""
        raw = os.pread(self._places.fileno(), self._PLACE.size, number * self._PLACE.size)
        name_at, name_bytes, is_record, offset, length = self._PLACE.unpack(raw)
        return Path(os.fsdecode(os.pread(self._names.fileno(), name_bytes, name_at))), bool(is_record), offset, length

    def close(self) -> None:
        """Close the files."""
        close_quietly(self._names)
        close_quietly(self._places)
