"""Text of files: which documents lie under some paths, and what they say."""

from __future__ import annotations

import codecs
import importlib.util
import io
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from memascend.command.data.columns import SPLITS, is_saved_dataset, rows, splits_of
from memascend.command.data.index import Index
from memascend.command.data.json_arrays import objects
from memascend.command.data.pieces import decoded_pieces
from memascend.command.data.records import (
    FIELDS,
    Chat,
    Completion,
    NotARecord,
    Text,
    is_blank,
    other_fields,
    parse_object,
    read_record,
)
from memascend.command.data.skipped import BINARY, ENCODING, Skipped
from memascend.common.outputs import writing
from memascend.errors import DataError, OutputError

SNIFF_BYTES = 8 << 10

#: Place, offset and bytes of each record of a file.
Records = Iterator[tuple[str, int, bytes]]


class Documents:
    """The documents under some paths, which an index on disk has the places of."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, scratch: Path, text_field: str = "text") -> None:
        """Walk `paths` and check that they hold text; `scratch` is an existing directory for the index."""
        self.text_field = text_field
        #: Files of directories that hold no text.
        self.skipped = Skipped()
        #: What else the user should know of the files.
        self.notes: list[str] = []
        #: Whether there is a conversation, which needs a chat template.
        self.has_chats = False
        self._scratch = scratch
        self._rows = scratch / "rows"
        self._index = Index(scratch)
        try:
            for path in paths:
                self._add(Path(path))
            if not len(self):
                where = ", ".join(str(p) for p in paths)
                skipped = "".join(f"; {line}" for line in self.skipped.lines())
                raise DataError(f"no text in {where}: give text files, directories of them, or .jsonl files{skipped}")
            self._index.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def __len__(self) -> int:
        return len(self._index)

    def document(self, number: int) -> Text | Completion | Chat:
        """A document; of a text only the pieces that are asked for are read."""
        path, is_record, offset, length = self._index.place(number)
        if not is_record:
            return Text(self._pieces(path, offset))
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                record = read_record(parse_object(file.read(length)), self.text_field)
        except ValueError as error:
            raise _changed(path) from error
        if isinstance(record, str):
            return Text(decoded_pieces(io.BytesIO(record.encode(errors="replace"))))  # JSON may hold half a pair
        return record

    def where(self, number: int) -> str:
        """The file that a document is in, for messages."""
        path, _, offset, _ = self._index.place(number)
        return "a row of --data" if path == self._rows else f"{path}, byte {offset}"

    def _pieces(self, path: Path, offset: int) -> Iterator[str]:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                yield from decoded_pieces(file)
        except ValueError as error:
            raise _changed(path) from error

    def _add(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise DataError(f"--data {path}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            self._add_file(path, named=True)
        elif stat.S_ISDIR(mode):
            if splits := splits_of(path):
                raise DataError(f"--data {path} holds the splits {', '.join(splits)}: name one, as {path / splits[0]}")
            for folder, folders, files in os.walk(path):
                if self._add_dataset(Path(folder), named=Path(folder) == path):
                    folders.clear()
                    continue
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(files):
                    file = Path(folder, name)
                    if not name.startswith(".") and file.is_file():
                        self._add_file(file, named=False)
        else:
            raise DataError(f"--data {path} is neither a file nor a directory")

    def _add_dataset(self, folder: Path, *, named: bool) -> bool:
        """Index a directory that `datasets` has saved; return whether it is one."""
        if (folder / SPLITS).is_file():
            self.skipped.add("datasets of several splits: name one of them", folder)
            return True
        if not is_saved_dataset(folder):
            return False
        self._add_rows(folder, named=named)
        return True

    def _add_file(self, path: Path, *, named: bool) -> None:
        """Index one file. A file that the user named must hold text; a file of a directory need not."""
        try:
            if path.suffix == ".jsonl":
                self._add_jsonl(path, named=named)
            elif path.suffix == ".json":
                self._add_json(path, named=named)
            elif path.suffix == ".parquet":
                self._add_rows(path, named=named)
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
                self._index.append(path, is_record=False, offset=0, length=file.tell())

    def _add_rows(self, path: Path, *, named: bool) -> None:
        """Index rows of columns, which are put on disk one after the other: single ones cannot be read from a file."""
        if not named and importlib.util.find_spec("pyarrow") is None:
            self.skipped.add("columns, which need pyarrow", path)
            return
        with writing(self._scratch), open(self._rows, "ab") as file:
            other = self._add_records(path, self._copied_rows(path, file), surely=named, copied=True)
        if other is not None:
            self.skipped.add(f"rows without text in field {self.text_field!r}, see --text-field", path)

    def _copied_rows(self, path: Path, copy: BinaryIO) -> Records:
        for number, raw in enumerate(rows(path, (self.text_field, *FIELDS)), start=1):
            offset = copy.tell()
            copy.write(raw)
            yield f"row {number}", offset, raw

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

    def _add_records(self, path: Path, records: Records, *, surely: bool, copied: bool = False) -> NotARecord | None:
        """Index records; return why the first of them is none, unless they are so `surely`.

        `copied` says that they lie among the rows. Raises DataError, naming the place, for any other that is none.
        """
        for number, (place, offset, raw) in enumerate(records):
            try:
                fields = parse_object(raw)
                record = read_record(fields, self.text_field)
            except NotARecord as error:
                if not surely:
                    return error
                raise DataError(f"{path}, {place} {error}") from error.__cause__
            if number == 0 and (other := other_fields(fields, self.text_field)):
                self.notes.append(f"{path} has {self.text_field!r} beside {other}: the text is what is trained on")
            surely = True
            self.has_chats = self.has_chats or isinstance(record, Chat)
            if not is_blank(record):
                self._index.append(self._rows if copied else path, is_record=True, offset=offset, length=len(raw))
        return None


def _changed(path: Path) -> DataError:
    """What was checked when it was indexed is there no more."""
    return DataError(f"{path} changed while it was being read")


def _lines(file: BinaryIO) -> Records:
    """Yield place, offset and bytes of each line that is not blank."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield f"line {number}", offset, line
        offset += len(line)


def _elements(file: BinaryIO) -> Records:
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
