"""The rows that a recipe is trained on, read by `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.data.hub import HubData
from memascend.errors import DataError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.cli.recipes.tasks import Task

#: Columns with answers to a prompt.
ANSWERS = ("completion", "chosen", "rejected")
_READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def load_rows(flag: str, paths: Sequence[Path], task: Task) -> Any:
    """Return the rows of all files as one `datasets.Dataset`, with the task's columns alone.

    Raises DataError that names the file and the columns it lacks.
    """
    import datasets

    parts = []
    for path in paths:
        rows = _read(flag, path)
        lacking = [name for name in task.columns if name not in rows.column_names]
        if lacking:
            raise DataError(
                f"{flag} {path} has no column {' and no '.join(lacking)}: --task {task.name} takes rows with "
                f"{', '.join(task.columns)}{' and, if given, ' + ', '.join(task.others) if task.others else ''}; these "
                f"have {', '.join(rows.column_names)}"
            )
        # In this order: sentence-transformers goes by it.
        wanted = [name for name in task.columns + task.others if name in rows.column_names]
        rows = rows.select_columns(wanted)
        _check_types(f"{flag} {path}", rows, task)
        parts.append(rows)
    rows = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if not len(rows):
        raise DataError(f"{flag} has no rows")
    return rows


def _check_types(where: str, rows: Any, task: Task) -> None:
    """Raise DataError for a column whose values the trainer would end in an error of its own for, steps later."""
    for name, feature in rows.features.items():
        kind = getattr(feature, "dtype", None)
        lacking = rows.data.column(name).null_count
        if lacking:
            raise DataError(f"{where} has no {name} in {lacking} of {len(rows)} rows: fill them in, or leave them out")
        if name == "label":
            if task.name == "kto" and kind != "bool":
                told = f"labels of {kind}" if kind is not None else "labels of several kinds"
                raise DataError(f"{where} has {told}: --task {task.name} takes true or false")
        elif kind not in ("string", "large_string") and not _is_conversation(feature):
            raise DataError(
                f"{where} has a {name} that is no text in every row: --task {task.name} takes texts"
                f"{'' if task.name in ('classify', 'embed') else ', or messages with role and content'}"
            )
    _check_answers(where, rows)


def _check_answers(where: str, rows: Any) -> None:
    """Raise DataError where prompts are messages and answers are texts, or the other way round."""
    kinds = {
        name: "messages" if _is_conversation(rows.features[name]) else "text"
        for name in ("prompt", *ANSWERS)
        if name in rows.features
    }
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise DataError(f"{where} mixes texts and messages ({told}): write all of them as texts, or all as messages")


def _is_conversation(feature: Any) -> bool:
    """Return whether a column holds lists of messages."""
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
    return isinstance(inner, dict) and {"role", "content"} <= inner.keys()


def _read(flag: str, path: Path) -> Any:
    import datasets

    try:
        if path.is_dir():
            return _one_split(flag, path, datasets.load_from_disk(str(path)))
        if path.is_file() and not path.stat().st_size:
            raise DataError(f"{flag} {path} is empty: give a file with rows")
        if path.exists():
            reader = _READERS.get(path.suffix.lower())
            if reader is None:
                raise DataError(f"{flag} {path} is not one of {', '.join(_READERS)}, which hold rows with columns")
            options = {"delimiter": "\t"} if path.suffix.lower() == ".tsv" else {}
            try:
                return datasets.load_dataset(reader, data_files=str(path), split="train", **options)
            except ValueError as error:
                if "corresponds to no data" not in str(error):
                    raise
                raise DataError(f"{flag} {path} has no rows: give a file with some") from error
        if (hub := HubData.of(str(path))) is not None:
            return datasets.load_dataset(hub.name, hub.configuration, split=hub.split)
    except DataError:
        raise
    except Exception as error:  # of the file's contents, the hub, or the network
        raise DataError(f"{flag} {path} cannot be read: {first_line(error)}") from error
    raise DataError(f"{flag} {path}: no such file or directory, and no data set of the hub is called so")


def _one_split(flag: str, path: Path, found: Any) -> Any:
    if hasattr(found, "column_names") and isinstance(found.column_names, dict):
        raise DataError(f"{flag} {path} holds the splits {', '.join(found)}: give the directory of one of them")
    return found


def divided(rows: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Return the rows to train on, and a fraction that is held out. Raises DataError where either has none."""
    try:
        parts = rows.train_test_split(test_size=fraction, seed=seed)
    except ValueError as error:
        raise DataError(f"--eval {fraction} of {len(rows)} rows: {first_line(error)}") from error
    return parts["train"], parts["test"]
