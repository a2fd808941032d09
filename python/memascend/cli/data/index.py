"""Where each document lies, in files on disk, so that host memory does not grow with their number."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from memascend.common.outputs import close_quietly, writing

#: The parts that a file consists of, by their names in messages.
KINDS = (TEXT, LINE, RECORD, ROW) = ("text", "line", "record", "row")


class DocumentPlace(NamedTuple):
    """Where a document lies: as a whole file of text, or as the record with some number in it."""

    path: Path  # the user's file
    kind: str
    number: int
    offset: int  # bytes, in the file or its copy
    length: int
    copy: int = 0  # the number of the copy that has it; 0 is the file itself

    def __str__(self) -> str:
        """Return it for messages."""
        return str(self.path) if self.kind == TEXT else f"{self.path}, {self.kind} {self.number}"


class Index:
    """Places of documents by number."""

    _PLACE = struct.Struct("<QIBQQQI")  # path offset, path length, then as in DocumentPlace

    def __init__(self, scratch: Path) -> None:
        """Begin with none, in two files in the directory `scratch`."""
        self._scratch = scratch
        self._last: tuple[bytes, int] = (b"", 0)
        #: Bytes of all documents, as they lie in their files.
        self.documents_bytes = 0
        self._names_bytes = self._count = 0
        with writing(scratch):
            self._names = open(scratch / "names", "wb+")  # noqa: SIM115 (closed by close)
            self._places = open(scratch / "documents", "wb+")  # noqa: SIM115

    def __len__(self) -> int:
        return self._count

    def append(self, place: DocumentPlace) -> None:
        """Add the place of a document."""
        name = os.fsencode(place.path)
        with writing(self._scratch):
            if name != self._last[0]:
                self._last = (name, self._names_bytes)
                self._names.write(name)
                self._names_bytes += len(name)
            kind = KINDS.index(place.kind)
            self._places.write(self._PLACE.pack(self._last[1], len(name), kind, *place[2:]))
        self._count += 1
        self.documents_bytes += place.length

    def flush(self) -> None:
        """Have `place` see the entries that were added."""
        with writing(self._scratch):
            self._names.flush()
            self._places.flush()

    def place(self, number: int) -> DocumentPlace:
        """Return the place of a document."""
        raw = os.pread(self._places.fileno(), self._PLACE.size, number * self._PLACE.size)
        name_at, name_bytes, kind, *others = self._PLACE.unpack(raw)
        path = Path(os.fsdecode(os.pread(self._names.fileno(), name_bytes, name_at)))
        return DocumentPlace(path, KINDS[kind], *others)

    def close(self) -> None:
        """Close the files."""
        close_quietly(self._names)
        close_quietly(self._places)
