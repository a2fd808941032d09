"""The metrics file of a run of the command line, as the Trainer writes it and `memascend report` reads it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from memascend.common.outputs import writing
from memascend.errors import OutputError
from memascend.integrations.trainer_position import TrainerLog, is_entry, parsed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class RunLog(TrainerLog):
    """A file of JSON lines: a "start" or "resume" record, a record of every step and evaluation, one "end" record."""

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        """Create `path`, which must not exist, or with `go_on` append to it if it does; see `keep`."""
        super().__init__(path)
        try:
            open(path, "a" if go_on else "x").close()
        except OSError as error:
            raise OutputError(f"--metrics {path}: {error.strerror}") from error
        #: Returns entries of the first record beside the machine, the plan and the store; given the latter.
        self.about: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
        #: Called with the record of every step and evaluation.
        self.on_record: Callable[[dict[str, Any]], None] = lambda _: None
        #: Whether the present step was left out, for a loss or gradient that is not finite.
        self.skipped = False

    def keep(self, entries: int, run: dict[str, Any], *, before: Path | None, named: bool) -> None:
        """Keep the records up to entry `entries` of a run that goes on, and cut off later ones.

        Args:
            entries: the number of entries (see `is_entry`) that were recorded when the run was.
            run: fields of the run's first record, by which it is known.
            before: a file from which the records are copied where this one has none of them.
            named: whether the user has named this file, so that other contents of it stay.

        Raises OutputError where such a file is not this run's.
        """
        with writing(self.path):
            kept_bytes = recorded_bytes(self.path, entries, run)
            if kept_bytes is None and named:
                raise OutputError(f"--metrics {self.path} holds no records of the run in the store: choose another")
            os.truncate(self.path, kept_bytes or 0)
            if not kept_bytes and before is not None and before.is_file():
                with open(before, "rb") as source, open(self.path, "ab") as target:
                    target.write(source.read(recorded_bytes(before, entries, run) or 0))

    def write(self, *records: dict[str, Any]) -> None:
        """Append records, at once visible to a reader. Raises OutputError where they cannot be written."""
        with writing(self.path):
            super().write(*map(_as_json, records))

    def append(self, entry: dict[str, Any], figures: dict[str, Any]) -> None:
        """Add the record of a step or an evaluation."""
        record = self._record(entry)
        if record["record"] != "log":  # The Trainer's summary: the last record of a run has its own.
            super().append(entry, figures)
            self.on_record(record | figures)

    def read(self, count: int) -> list[dict[str, Any]]:
        """Return nothing: the Trainer's log would grow with the steps, and the file has it."""
        return []

    def _about(self, opening: dict[str, Any]) -> dict[str, Any]:
        return self.about(opening)

    def _record(self, entry: dict[str, Any]) -> dict[str, Any]:
        record = super()._record(entry)
        del record["logged"]
        if record["record"] == "step":
            record["skipped"] = self.skipped
        return _as_json(record)


def _as_json(value: Any) -> Any:
    """Return the values of a record with None for numbers that are not finite, for which JSON has nothing."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def recorded_bytes(path: Path, entries: int, run: dict[str, Any]) -> int | None:
    """Return the length of the records in `path` up to entry `entries`, or None where they do not belong to `run`.

    Records end at the entry, or at a line that a killed process left unfinished. Before the first entry there is
    nothing to keep.
    """
    kept_bytes = 0
    with open(path, "rb") as file:
        for line in file:
            record = parsed(line)
            if not kept_bytes and record is None:
                # The very first line was left unfinished.
                return 0 if line.startswith(b'{"record": "') and not line.endswith(b"\n") else None
            if not kept_bytes and record is not None and any(record.get(name) != run[name] for name in run):
                return None
            if record is None or not entries:
                break
            kept_bytes += len(line)
            entries -= is_entry(record)
    return kept_bytes
