"""Text of files: which documents lie under some paths, and what they say."""

from __future__ import annotations

import codecs
import io
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from memascend.command.data.json_arrays import objects
from memascend.command.data.records import NotARecord, record_text
from memascend.command.data.scratch import close_quietly
from memascend.command.data.skipped import BINARY, ENCODING, Skipped
from memascend.common.outputs import writing
from memascend.errors import DataError, OutputError

PIECE_BYTES = 64 << 10  # a tokenizer takes some hundred bytes per token while it works, so it gets small pieces
SNIFF_BYTES = 8 << 10


class Documents:
    """An index, on disk, of the documents under some paths: where each one's text is, in which file."""

    _RECORD = struct.Struct("<QIBQQ")  # path offset, path length, is a record, text offset, text length

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, scratch: Path, text_field: str = "text") -> None:
        """Walk `paths` and check that they hold text; `scratch` is an existing directory for the index."""
        self.text_field = text_field
        #: Files of directories that hold no text.
        self.skipped = Skipped()
        #: What else the user should know of the files.
        self.notes: list[str] = []
        self._last: tuple[bytes, int] = (b"", 0)
        self._names_bytes = 0
        self._scratch = scratch
        with writing(scratch):
            self._names = open(scratch / "names", "wb+")  # noqa: SIM115 (closed by close)
            self._records = open(scratch / "documents", "wb+")  # noqa: SIM115
        self._count = 0
        try:
            for path in paths:
                self._add(Path(path))
            if not self._count:
                where = ", ".join(str(p) for p in paths)
                skipped = "".join(f"; {line}" for line in self.skipped.lines())
                raise DataError(f"no text in {where}: give text files, directories of them, or .jsonl files{skipped}")
            with writing(scratch):
                self._names.flush()
                self._records.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the index files."""
        close_quietly(self._names)
        close_quietly(self._records)

    def __len__(self) -> int:
        return self._count

    def text(self, index: int) -> Iterator[str]:
        """The text of one document, in pieces."""
        raw = os.pread(self._records.fileno(), self._RECORD.size, index * self._RECORD.size)
        name_at, name_bytes, is_record, offset, length = self._RECORD.unpack(raw)
        path = os.fsdecode(os.pread(self._names.fileno(), name_bytes, name_at))
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                if is_record:
                    text = record_text(file.read(length), self.text_field)
                    yield from decoded_pieces(io.BytesIO(text.encode(errors="replace")))  # JSON may hold half a pair
                else:
                    yield from decoded_pieces(file)
        except ValueError as error:  # it was checked when it was indexed
            raise DataError(f"{path} changed while it was being read") from error

    def _add(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise DataError(f"--data {path}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            self._add_file(path, named=True)
        elif stat.S_ISDIR(mode):
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(files):
                    file = Path(folder, name)
                    if not name.startswith(".") and file.is_file():
                        self._add_file(file, named=False)
        else:
            raise DataError(f"--data {path} is neither a file nor a directory")

    def _add_file(self, path: Path, *, named: bool) -> None:
        """Index one file. A file that the user named must hold text; a file of a directory need not."""
        try:
            if path.suffix == ".jsonl":
                self._add_jsonl(path, named=named)
            elif path.suffix == ".json":
                self._add_json(path, named=named)
            else:
                self._add_text(path)
        except OutputError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            if named:
                raise DataError(f"{path} is not UTF-8 text (byte {error.start} of a piece: {error.reason})") from error
            self.skipped.add(BINARY if error.object == b"\0" else ENCODING, path)

    def _add_text(self, path: Path) -> None:
        with open(path, "rb") as file:
            begin = file.read(SNIFF_BYTES)
            if b"\0" in begin and not begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "it holds a zero byte, so it is taken for binary")
            file.seek(0)
            has_text = False
            for piece in decoded_pieces(file):
                has_text = has_text or not piece.isspace()
            if has_text:
                self._append(path, is_record=False, offset=0, length=file.tell())

    def _add_jsonl(self, path: Path, *, named: bool) -> None:
        with open(path, "rb") as file:
            other = self._add_records(path, _lines(file), surely=named)
        if other is not None:
            what = f"without text in field {self.text_field!r}, see --text-field"
            self.skipped.add(f".jsonl {what if other.is_object else 'whose first line is no object'}", path)

    def _add_json(self, path: Path, *, named: bool) -> None:
        """Index an array of records, or lines of them. Any other JSON is text, which most source trees hold some of."""
        with open(path, "rb") as file:
            is_array = file.read(SNIFF_BYTES).lstrip().startswith(b"[")
            file.seek(0)
            other = self._add_records(path, _elements(file) if is_array else _lines(file), surely=False)
        if other is None:
            return
        if named and is_array and other.is_object:
            raise DataError(f"{path}, record 1 {other}")
        if named:
            self.notes.append(f"{path} is no array of objects, and no object on each line: it is trained on as text")
        self._add_text(path)

    def _add_records(self, path: Path, records: Iterator[tuple[str, int, bytes]], *, surely: bool) -> NotARecord | None:
        """Index (place, offset, bytes) of records; return why the first of them is none, unless they are so `surely`.

        Raises DataError, naming the place, for any other that is none.
        """
        for place, offset, raw in records:
            try:
                text = record_text(raw, self.text_field)
            except NotARecord as error:
                if not surely:
                    return error
                raise DataError(f"{path}, {place} {error}") from error.__cause__
            surely = True
            if text.strip():
                self._append(path, is_record=True, offset=offset, length=len(raw))
        return None

    def _append(self, path: Path, *, is_record: bool, offset: int, length: int) -> None:
        name = os.fsencode(path)
        with writing(self._scratch):
            if name != self._last[0]:
                self._last = (name, self._names_bytes)
                self._names.write(name)
                self._names_bytes += len(name)
            self._records.write(self._RECORD.pack(self._last[1], len(name), is_record, offset, length))
        self._count += 1


def _lines(file: BinaryIO) -> Iterator[tuple[str, int, bytes]]:
    """Yield place, offset and bytes of each line that is not blank."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield f"line {number}", offset, line
        offset += len(line)


def _elements(file: BinaryIO) -> Iterator[tuple[str, int, bytes]]:
    """Yield place, offset and bytes of each object of an array; of what does not begin as one, bytes that are none.

    Raises DataError for what goes on otherwise.
    """
    number = 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for number, (offset, length) in enumerate(objects(data), start=1):
                yield f"record {number}", offset, data[offset : offset + length]
        except ValueError as error:
            if number:
                raise DataError(f"{file.name}, after record {number}: {error}") from error
            yield "record 1", 0, b""


def decoded_pieces(file: Any) -> Iterator[str]:
    """The rest of a binary file as text, in pieces that end at a line where one is near."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    while raw := file.read(PIECE_BYTES):
        held += decoder.decode(raw)
        cut = held.rfind("\n") + 1
        if not cut and len(held) >= PIECE_BYTES:  # one very long line: cut it anywhere
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    held += decoder.decode(b"", final=True)
    if held:
        yield held
