"""Rows of Parquet files and of directories that `datasets` has saved, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memascend.errors import DataError, first_line

ROWS_AT_ONCE = 128
#: Of a directory that `Dataset.save_to_disk` wrote, and of one with several of them.
SAVED, SPLITS = "state.json", "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` wrote a directory."""
    return (folder / SAVED).is_file() and (folder / "dataset_info.json").is_file()


def splits_of(folder: Path) -> list[str]:
    """Return the splits in a directory that `DatasetDict.save_to_disk` wrote; empty for another one."""
    try:
        return json.loads((folder / SPLITS).read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def rows(path: Path, fields: Sequence[str]) -> Iterator[bytes]:
    """Yield the `fields` that a row has, as JSON, for each row of a Parquet file or a saved dataset.

    Where there are none of them, one row with every column and no values. Raises DataError where it cannot be read.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from error
    number = 1
    try:
        for batch in _saved(path) if path.is_dir() else _parquet(path, fields):
            present = batch.select([name for name in batch.schema.names if name in fields])
            if not present.schema.names:
                yield json.dumps(dict.fromkeys(batch.schema.names)).encode()
                return
            for first in range(0, present.num_rows, ROWS_AT_ONCE):
                for row in present.slice(first, ROWS_AT_ONCE).to_pylist():
                    yield json.dumps({name: plain(value) for name, value in row.items()}, default=str).encode()
                    number += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {number} holds bytes that are not UTF-8 text: decode the column and save it as strings"
        ) from error
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name in fields]
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names or None)


def _saved(folder: Path) -> Iterator[Any]:
    import pyarrow

    for file in json.loads((folder / SAVED).read_bytes())["_data_files"]:
        name = file["filename"]
        if Path(name).name != name:
            raise ValueError(f"its {SAVED} names {name!r}, which is not a file within it")
        with pyarrow.memory_map(str(folder / name)) as source:
            yield from pyarrow.ipc.open_stream(source)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as text, and no fields without a value.

    A column has every field that any row has, also within messages; text is often a column of bytes.
    """
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, bytes):
        return value.decode()
    return [plain(inner) for inner in value] if isinstance(value, list) else value
