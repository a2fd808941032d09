"""A record of a generation as far as it is read without PyTorch: the run, and the contents of its store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.common.shapes import Absent, check, count, dimensions
from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend._memascend import ClosedStore

#: Version of the record, under its key "format". A later version refuses records that it cannot
#: read.
RECORD_VERSION = 1
#: Keys of every record.
_KEYS = {"steps", "model", "recompute", "units", "buffers", "optimizers", "random", "tracked"}
_OUTLINE = {
    "steps": count,
    "model": {"kind": str, "class": str},
    "gradients": Absent(str),
    "units": [
        {
            "name": str,
            "tensors": [
                {
                    "name": str,
                    "dtype": str,
                    "trained": Absent(bool),
                    "parameters": [(str, dimensions, count, bool)],
                    "states": [(str, str, str)],
                    "moments": Absent([(str, str, count)]),
                }
            ],
        }
    ],
    "optimizers": [{"class": str, "defaults": dict}],
    "tracked": dict,
}


def parse(
    text: str | None, paths: Sequence[Any], loads: Callable[[str], Any], check_record: Callable[[Any], None]
) -> dict[str, Any]:
    """Return the record that a store in `paths` keeps as `text`, read by `loads` and checked by `check_record`.

    Raises CheckpointError for any other text, and for a record of another version.
    """
    where = ", ".join(str(path) for path in paths)
    try:
        record = loads(text or "")
        version = record["format"]
        missing = _KEYS - record.keys() if version == RECORD_VERSION else None
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if version == RECORD_VERSION:
            check_record(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the store in {where} keeps something that is no run of memascend: {error}") from None
    if version != RECORD_VERSION:
        raise CheckpointError(
            f"the store in {where} keeps a run in format {version}, this version reads {RECORD_VERSION}"
        )
    return record


def parse_outline(text: str | None, paths: Sequence[Any]) -> dict[str, Any]:
    """Return a record as `parse` does, with its tensors, tuples and the like as JSON has them."""
    return parse(text, paths, json.loads, _check_outline)


def _check_outline(record: Any) -> None:
    check(record, _OUTLINE, "the record")
    fill_defaults(record)


def fill_defaults(record: dict[str, Any]) -> None:
    """Add the entries that earlier versions did not record."""
    for unit in record["units"]:
        for tensor in unit["tensors"]:
            tensor.setdefault("trained", True)
            tensor.setdefault("moments", [])
    record.setdefault("fused_loss", False)
    record.setdefault("gradients", "auto")


def what_it_has(kept_store: ClosedStore, paths: Sequence[Any]) -> str:
    """Name the last durable step of an open store, or its checkpoints where there is none."""
    if kept_store.state is None:
        return f"checkpoints alone ({', '.join(tag for tag, _, _, _ in kept_store.snapshots())})"
    return f"step {parse_outline(kept_store.state, paths)['steps']}"
