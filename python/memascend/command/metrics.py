"""Where the metrics file of a run lies. `run_log` writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from memascend.common.outputs import beside, writing
from memascend.errors import DataError

METRICS_NAME = "metrics.jsonl"


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
