"""Files of data: in which encoding their text is, and which format they have, by their contents and then by name.

A file in UTF-16 or UTF-32 is copied to disk as UTF-8, since places in a file are kept in bytes of that.
"""

from __future__ import annotations

import codecs
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.cli.data.pieces import PIECE_BYTES
from memascend.cli.data.skipped import BINARY, ENCODING
from memascend.common.outputs import writing

if TYPE_CHECKING:
    from memascend.cli.data.copies import FileCopies

_SNIFF_BYTES = 8 << 10
#: The marks with which text can begin. UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: How files begin that hold others.
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_PARQUET, _ARROW = b"PAR1", b"ARROW1"
LINES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_JSON = LINES | {".json"}
_CONVERT = "convert it, such as by iconv -f LATIN1 -t UTF-8"
_TABLES = frozenset({".csv", ".tsv"})


class NotText(Exception):
    """A file that holds no text; `reason` is the class of such files that it is counted among."""

    def __init__(self, reason: str, message: str) -> None:
        """Take the text that follows the path."""
        super().__init__(message)
        self.reason = reason


class Format(enum.Enum):
    """How the documents lie in a file."""

    COLUMNS = "Parquet"
    JSON = "JSON"
    TABLE = "a table of text"
    TEXT = "text"


@dataclass(frozen=True)
class File:
    """A file of data: `path` is where its UTF-8 is, from byte `start` on, and `copy` the number of that copy, or 0."""

    origin: Path
    path: Path
    start: int
    copy: int
    head: bytes  # the first bytes of the text

    @property
    def suffix(self) -> str:
        """The end of its name, in lower case."""
        return self.origin.suffix.lower()

    @property
    def has_suffix_of_json(self) -> bool:
        """Whether it is called JSON, and thus nothing else."""
        return self.suffix in _JSON

    def format(self) -> Format:
        """Return how the documents lie in it.

        Raises NotText for a binary file.
        """
        if self.head.startswith(_PARQUET) or self.suffix == ".parquet":
            return Format.COLUMNS
        if self.head.startswith(_ARROW):
            raise NotText(BINARY, "is a file of Arrow: save it as Parquet, or with Dataset.save_to_disk")
        for begin, name in _PACKED.items():
            if self.head.startswith(begin):
                raise NotText(BINARY, f"is packed ({name}): unpack it first")
        if b"\0" in self.head:
            raise NotText(BINARY, "is not UTF-8 text: it holds a zero byte, so it is taken for binary")
        if self.has_suffix_of_json or self.head.lstrip()[:1] in (b"{", b"["):
            return Format.JSON
        return Format.TABLE if self.suffix in _TABLES else Format.TEXT


def open_file(path: Path, copies: FileCopies) -> File:
    """Look at the first bytes of a file, and copy it where it is in another encoding than UTF-8.

    Raises NotText where it is not in the encoding that its mark says.
    """
    with open(path, "rb") as file:
        head = file.read(_SNIFF_BYTES)
    encoding, start = next(((name, len(mark)) for mark, name in _MARKS if head.startswith(mark)), ("utf-8", 0))
    if encoding == "utf-8":
        return File(path, path, start, 0, head[start:])
    number = copies.begin()
    copy = copies.path(number)
    decoder = codecs.getincrementaldecoder(encoding)()
    with open(path, "rb") as file, writing(copy), open(copy, "w", encoding="utf-8", newline="") as written:
        try:
            while piece := file.read(PIECE_BYTES):
                written.write(decoder.decode(piece))
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            text = f"begins as {encoding.upper()} but is not in it ({error.reason}): save it as UTF-8"
            raise NotText(ENCODING, text) from error
    with open(copy, "rb") as file:
        return File(path, copy, 0, number, file.read(_SNIFF_BYTES))


def not_utf8(path: Path, offset: int) -> NotText:
    """Return the error of a text whose bytes at `offset` are no UTF-8."""
    line, left = 1, offset
    with open(path, "rb") as file:
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            line, left = line + piece.count(b"\n"), left - len(piece)
    return NotText(ENCODING, f"is not UTF-8 text (line {line}, byte {offset}): {_CONVERT}")


def not_utf8_after(line: int) -> NotText:
    """Return the error of a table that cannot be decoded somewhere after a line."""
    return NotText(ENCODING, f"is not UTF-8 text (after line {line}): {_CONVERT}")
