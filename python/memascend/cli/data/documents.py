"""Text of files: which documents lie under some paths, and their contents."""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from memascend.cli.data.columns import SPLITS, is_saved_dataset, rows, splits_of
from memascend.cli.data.copies import FileCopies
from memascend.cli.data.files import LINES, File, Format, NotText, not_utf8, open_file
from memascend.cli.data.hub import HubData
from memascend.cli.data.index import LINE, RECORD, ROW, TEXT, DocumentPlace, Index
from memascend.cli.data.json_arrays import objects
from memascend.cli.data.order import shuffled
from memascend.cli.data.pieces import NotUtf8, decoded_pieces
from memascend.cli.data.records import (
    FIELDS,
    PREFERENCE,
    Chat,
    Completion,
    Damaged,
    Instruction,
    NotARecord,
    Text,
    check_characters,
    is_blank,
    other_fields,
    parse_object,
    read_record,
)
from memascend.cli.data.skipped import Skipped
from memascend.cli.data.text_tables import table_rows
from memascend.common.outputs import writing
from memascend.errors import DataError, OutputError

#: Kind, number, offset and bytes of each record of a file.
Records = Iterator[tuple[str, int, int, bytes]]
#: Roles that are counted, of turns with ever other ones.
ROLES_MAX = 1000
AS_TEXT = "--as-text trains on a file as it is"


class Documents:
    """The documents under some paths, which an index on disk has the places of."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        scratch: Path,
        text_field: str = "text",
        as_text: bool = False,
        weights: Sequence[float] = (),
        option: str = "--data",
    ) -> None:
        """Walk `paths` and check that they hold text; `scratch` is an existing directory for the index.

        `as_text` takes every file as the text that it is, whatever that is written in. With `weights`, one for each of
        `paths`, the documents of a path are there so many times, where the least weight stands for once. `option` is
        the name of the paths in errors.
        """
        self.text_field, self._as_text, self._option = text_field, as_text, option
        #: Files of directories that hold no text.
        self.skipped = Skipped()
        #: Other notes on the files for the user.
        self.notes: list[str] = []
        #: How many turns of conversations, which need a chat template, each role has.
        self.roles: Counter[str] = Counter()
        #: Records with nothing to train on, which are left out.
        self.blank = 0
        self._scratch = scratch
        self._copies = FileCopies(scratch)
        self._index = Index(scratch)
        try:
            for number, path in enumerate(paths):
                begin = len(self)
                self._add(Path(path))
                if weights:
                    self._repeat(begin, weights[number] / min(weights))
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

    @property
    def nbytes(self) -> int:
        """Bytes of all documents, of records with their fields."""
        return self._index.documents_bytes

    def document(self, number: int) -> Text | Completion | Chat | Instruction:
        """Return a document; of a text only the pieces that are asked for are read."""
        place = self._index.place(number)
        path = self._copies.path(place.copy) if place.copy else place.path
        if place.kind == TEXT:
            return Text(self._pieces(path, place.offset))
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                raw = file.read(place.length)
            record = read_record(parse_object(raw), self.text_field)
            check_characters(raw, record)
        except ValueError as error:
            raise _changed(place.path) from error
        return Text(decoded_pieces(io.BytesIO(record.encode()))) if isinstance(record, str) else record

    def where(self, number: int) -> str:
        """Return the file that a document is in, and its line or record there, for messages."""
        return str(self._index.place(number))

    def _pieces(self, path: Path, offset: int) -> Iterator[str]:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                yield from decoded_pieces(file)
        except ValueError as error:
            raise _changed(path) from error

    def _repeat(self, begin: int, times: float) -> None:
        """Have the documents from number `begin` on so many `times`: of a part of a time, some of them."""
        count = len(self) - begin
        self._index.flush()
        for position in range(count, round(times * count)):
            turn, place = divmod(position, count)
            self._index.append(self._index.place(begin + shuffled(place, count, f"weights/{turn}")))

    # ---- which files there are -----------------------------------------------------------------------------

    def _add(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if not path.exists() and (source := HubData.of(str(path))) is not None:
                return self._add_hub(path, source)
            raise DataError(f"{self._option} {path}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            self._add_file(path, named=True)
        elif stat.S_ISDIR(mode):
            if splits := splits_of(path):
                named = f"{', '.join(splits)}: name one, as {path / splits[0]}"
                raise DataError(f"{self._option} {path} holds the splits {named}")
            for folder, folders, files in os.walk(path, onerror=self._skip_folder):
                if self._add_dataset(Path(folder), named=Path(folder) == path):
                    folders.clear()
                    continue
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(files):
                    file = Path(folder, name)
                    if not name.startswith(".") and file.is_file():
                        self._add_file(file, named=False)
        else:
            raise DataError(f"{self._option} {path} is neither a file nor a directory")

    def _skip_folder(self, error: OSError) -> None:
        """Count a folder that cannot be listed among what was left out."""
        self.skipped.add(f"folders that cannot be listed: {error.strerror}", Path(error.filename))

    def _add_hub(self, path: Path, source: HubData) -> None:
        """Index a data set of the hub, whose rows are put on disk."""
        self._add_copied(path, ROW, enumerate(source.rows(self._fields), start=1), surely=True)

    def _add_dataset(self, folder: Path, *, named: bool) -> bool:
        """Index a directory that `datasets` has saved; return whether it is one."""
        if (folder / SPLITS).is_file():
            self.skipped.add("datasets of several splits: name one of them", folder)
            return True
        if not is_saved_dataset(folder):
            return False
        self._add_columns(folder, named=named)
        return True

    def _add_file(self, path: Path, *, named: bool) -> None:
        """Index one file. A file that the user named must hold text; a file of a directory need not."""
        try:
            file = open_file(path, self._copies)
            form = file.format()
            if form is Format.COLUMNS:
                self._add_columns(path, named=named)
            elif form is Format.TEXT or self._as_text:
                self._add_text(file)
            elif form is Format.JSON:
                self._add_json(file, named=named)
            else:
                self._add_table(file, named=named)
        except OutputError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except NotText as error:
            if named:
                raise DataError(f"{path} {error}") from error
            self.skipped.add(error.reason, path)

    # ---- contents of files ---------------------------------------------------------------------------------

    def _add_text(self, file: File) -> None:
        has_text = False
        with open(file.path, "rb") as opened:
            opened.seek(file.start)
            try:
                for piece in decoded_pieces(opened):
                    has_text = has_text or not piece.isspace()
            except NotUtf8 as error:
                raise not_utf8(file.path, error.offset) from error
            if has_text:
                self._index.append(
                    DocumentPlace(file.origin, TEXT, 1, file.start, opened.tell() - file.start, file.copy)
                )

    def _add_columns(self, path: Path, *, named: bool) -> None:
        """Index rows of columns, which are put on disk one after the other: single ones cannot be read from a file."""
        if not named and importlib.util.find_spec("pyarrow") is None:
            self.skipped.add("columns, which need pyarrow", path)
            return
        found = enumerate(rows(path, self._fields), start=1)
        if self._add_copied(path, ROW, found, surely=named) is not None:
            self.skipped.add(f"rows without text in field {self.text_field!r}, see --text-field", path)

    def _add_table(self, file: File, *, named: bool) -> None:
        """Index rows of a table of text, which are put on disk as records."""
        other = self._add_copied(file.origin, LINE, table_rows(file, self._fields), surely=False)
        if other is not None and named:
            raise DataError(f"{file.origin} {other}; {AS_TEXT}")
        if other is not None:
            self.skipped.add(
                f"tables without text in column {self.text_field!r}, see --text-field and --as-text", file.origin
            )

    def _add_copied(
        self, path: Path, kind: str, found: Iterator[tuple[int, bytes]], *, surely: bool
    ) -> NotARecord | None:
        number = self._copies.begin()
        with writing(self._scratch), open(self._copies.path(number), "wb") as copy:
            return self._add_records(path, _copied(found, kind, copy), surely=surely, copy=number)

    def _add_json(self, file: File, *, named: bool) -> None:
        """Index an array of records, or lines of them."""
        is_array = file.head.lstrip().startswith(b"[")
        with open(file.path, "rb") as opened:
            opened.seek(file.start)
            records = _elements(opened, file) if is_array else _lines(opened, file.start)
            surely = named and not is_array and file.suffix in LINES
            other = self._add_records(file.origin, records, surely=surely, copy=file.copy)
        if other is None:
            return
        if not (file.has_suffix_of_json or other.is_object):
            self._add_text(file)  # It only begins like JSON.
        elif named and other.is_object:
            raise DataError(f"{file.origin}, {'record' if is_array else 'line'} 1 {other}; {AS_TEXT}")
        elif named:
            raise DataError(f"{file.origin} is no array of objects, and no object on each line: make it one; {AS_TEXT}")
        elif other.is_object:
            what = f"JSON without text in field {self.text_field!r}, see --text-field and --as-text"
            self.skipped.add(what, file.origin)
        else:
            self.skipped.add("JSON that is no records, see --as-text", file.origin)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (self.text_field, *FIELDS, *PREFERENCE)

    def _add_records(self, path: Path, records: Records, *, surely: bool, copy: int) -> NotARecord | None:
        """Index records; return why the first of them is none, unless they are so `surely`.

        `copy` is the number of the copy that they lie in. Raises DataError, naming the place, for another that is none.
        """
        for position, (kind, number, offset, raw) in enumerate(records):
            place = DocumentPlace(path, kind, number, offset, len(raw), copy)
            try:
                fields = parse_object(raw)
                record = read_record(fields, self.text_field)
                check_characters(raw, record)
            except NotARecord as error:
                if not surely and not isinstance(error, Damaged):
                    return error
                raise DataError(f"{place} {error}") from error.__cause__
            if position == 0 and (other := other_fields(fields, self.text_field)):
                self.notes.append(f"{path} has {self.text_field!r} beside {other}: the text is what is trained on")
            surely = True
            if isinstance(record, Chat):
                self._count_roles(record)
            if is_blank(record):
                self.blank += 1
            else:
                self._index.append(place)
        return None

    def _count_roles(self, chat: Chat) -> None:
        for turn in chat.messages:
            role = turn["role"]
            self.roles[role if role in self.roles or len(self.roles) < ROLES_MAX else "..."] += 1


def _changed(path: Path) -> DataError:
    """Return the error for a file that has changed since it was indexed."""
    return DataError(f"{path} changed while it was being read")


def _copied(found: Iterator[tuple[int, bytes]], kind: str, copy: BinaryIO) -> Records:
    """Write records to `copy`, and yield each with its place there."""
    for number, raw in found:
        offset = copy.tell()
        copy.write(raw)
        yield kind, number, offset, raw


def _lines(file: BinaryIO, offset: int) -> Records:
    """Yield number, offset and bytes of each line that is not blank; the first begins at `offset`."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield LINE, number, offset, line
        offset += len(line)


def _elements(file: BinaryIO, about: File) -> Records:
    """Yield number, offset and bytes of each object of an array; of another element, bytes that are none.

    Raises DataError for an array that goes on otherwise.
    """
    number = 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for number, (offset, length) in enumerate(objects(data, about.start), start=1):
                yield RECORD, number, offset, data[offset : offset + length]
        except ValueError as error:
            if number:
                raise DataError(f"{about.origin}, after record {number}: {error}") from error
            yield RECORD, 1, 0, b""
