"""The metrics file of a run. `memascend.report.figures` assembles what it records."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from memascend.common.outputs import beside, writing
from memascend.errors import DataError, OutputError

METRICS_NAME = "metrics.jsonl"


class Metrics:
    """A file of JSON lines: a "start" or "resume" record, one "step" record per step, one "end" record."""

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        """Create `path`, which must not exist, or with `go_on` open it to append to it; see `keep`."""
        self.path = path
        try:
            self._file: TextIO = open(path, "a" if go_on else "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise OutputError(f"--metrics {path}: {error.strerror}") from error

    def keep(self, steps: int, run: dict[str, Any], *, before: Path | None, named: bool) -> None:
        """Keep the records up to step `steps` of a run that goes on, and cut off what lies after them.

        Args:
            steps: the last step that is not taken again.
            run: fields of the run's first record, by which it is known.
            before: a file from which the records are copied where this one has none of them.
            named: whether the user has named this file, so that what it holds of something else stays.

        Raises OutputError where such a file is not this run's.
        """
        with writing(self.path):
            kept_bytes = recorded_bytes(self.path, steps, run)
            if kept_bytes is None and named:
                raise OutputError(f"--metrics {self.path} holds no records of the run in the store: choose another")
            os.truncate(self.path, kept_bytes or 0)
            if not kept_bytes and before is not None and before.is_file():
                with open(before, "rb") as source, open(self.path, "ab") as target:
                    target.write(source.read(recorded_bytes(before, steps, run) or 0))

    def write(self, record: str, **fields: Any) -> None:
        """Append one record, at once visible to a reader."""
        with writing(self.path):
            self._file.write(json.dumps({"record": record, **fields}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        # Every record was flushed. A failed write was reported then, and closing would only try it
        # again.
        with contextlib.suppress(OSError):
            self._file.close()


def recorded_bytes(path: Path, steps: int, run: dict[str, Any]) -> int | None:
    """Return the length of the records in `path` up to step `steps`, or None where they are not those of `run`.

    Records end at the first step after `steps`, or at a line that a killed process left unfinished. Before the first
    step there is nothing to keep.
    """
    kept_bytes = 0
    with open(path, "rb") as file:
        for line in file:
            record = _parsed(line)
            if not kept_bytes and record is None:
                # The very first line was left unfinished.
                return 0 if line.startswith(b'{"record": "') and not line.endswith(b"\n") else None
            if not kept_bytes and any(record.get(name) != value for name, value in run.items()):
                return None
            if record is None or record.get("step", 0) > steps:
                break
            kept_bytes += len(line)
    return kept_bytes if steps else 0


def _parsed(line: bytes) -> Any:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "record" in record else None


def records_of(run: Path) -> Path:
    """Return the metrics file of a model directory, of a run that did not finish it, or the file itself.

    Raises DataError where there is none.
    """
    if run.is_file():
        return run
    if not run.is_dir() and hidden_records(run).is_file():
        return hidden_records(run)
    if not run.is_dir():
        raise DataError(f"{run} does not exist: name a directory that `memascend finetune` wrote, or a metrics file")
    if not (run / METRICS_NAME).is_file():
        raise DataError(
            f"{run} has no {METRICS_NAME}: name a directory that `memascend finetune` wrote, or what --metrics named"
        )
    return run / METRICS_NAME


def hidden_records(out: Path) -> Path:
    """The file that keeps the metrics of a run to `out` that did not finish and can be resumed."""
    return beside(out, METRICS_NAME)


def take_over_records(out: Path, path: Path) -> None:
    """Copy to `path` the records of the last run that did not finish `out`, if there are any."""
    if hidden_records(out).is_file():
        with writing(path):
            shutil.copyfile(hidden_records(out), path)
