"""Rows of CSV and TSV files, whose first line names the columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence

from memascend.cli.data.files import File, not_utf8_after
from memascend.errors import DataError, first_line

#: Separators of cells; the one that occurs most often in the first line does.
_SEPARATORS = ",\t;|"
#: The longest cell. A quote that is never closed makes the rest of a file one cell.
CELL_CHARACTERS_MAX = 64 << 20


def table_rows(file: File, fields: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the line and the `fields`, as JSON, of each row.

    Of a table without any of them, one row with every column and no values. Raises DataError where it is no table.
    """
    csv.field_size_limit(max(csv.field_size_limit(), CELL_CHARACTERS_MAX))
    with open(file.path, encoding="utf-8-sig", newline="") as text:
        separator = _separator(file.head.partition(b"\n")[0].decode(errors="replace"))
        reader = csv.reader(text, delimiter=separator, strict=True)
        columns = _columns(file, reader)
        wanted = [(place, name) for place, name in enumerate(columns) if name in fields]
        if not wanted:
            yield 1, json.dumps(dict.fromkeys(columns)).encode()
            return
        line = reader.line_num + 1
        for cells in _cells(file, reader):
            if len(cells) != len(columns) and cells:
                raise DataError(
                    f"{file.origin}, line {line} has {len(cells)} cells, but the first line names "
                    f"{len(columns)} columns: put quotes around a cell that holds what separates cells, or a line break"
                )
            if cells:
                yield line, json.dumps({name: cells[place] for place, name in wanted}).encode()
            line = reader.line_num + 1


def _separator(line: str) -> str:
    """Return the separator of the columns that a line names."""
    unquoted = "".join(line.split('"')[::2])
    return max(_SEPARATORS, key=unquoted.count)


def _columns(file: File, reader: Iterator[list[str]]) -> list[str]:
    columns = [name.strip() for name in next(_cells(file, reader), [])]
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise DataError(f"{file.origin}, line 1 names the column {twice!r} twice: give each a name of its own")
    return columns


def _cells(file: File, reader: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from reader
    except UnicodeDecodeError as error:
        raise not_utf8_after(getattr(reader, "line_num", 0)) from error
    except csv.Error as error:
        line = getattr(reader, "line_num", 0)
        raise DataError(f"{file.origin}, line {line} cannot be read as a table: {first_line(error)}") from error
