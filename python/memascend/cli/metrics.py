"""Where the metrics file of a run lies. `run_log` writes it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from memascend.common.outputs import beside, under_way, writing
from memascend.errors import DataError, MemascendError
from memascend.hardware.drives import is_device
from memascend.recovery.inspect import last_record
from memascend.recovery.running_store import holds_store

METRICS_NAME = "metrics.jsonl"


def records_of(run: Path) -> Path:
    """Return the metrics file of a run: given that file, its store, or the model directory that it writes or wrote.

    Of a run that is going on, or that did not finish, it is hidden beside that directory. Raises DataError where there
    is none.
    """
    if run.is_file():
        return run
    if run.is_dir() and (run / METRICS_NAME).is_file() and under_way(run, METRICS_NAME) is None:
        return run / METRICS_NAME
    out = _written_by(run) if run.is_dir() or is_device(run) else run
    if out is not None:
        out = out.absolute()  # "." has no name, beside which a file could be hidden, and the root has none at all.
        out = out if out.name else None
    if out is not None and out.is_file():
        return out
    for file in (None if out is None else under_way(out, METRICS_NAME), None if out is None else hidden_records(out)):
        if file is not None and file.is_file():
            return file
    if out is not None and (out / METRICS_NAME).is_file():
        return out / METRICS_NAME
    if not run.exists():
        raise DataError(f"{run} does not exist: name a directory that `memascend finetune` writes, or a metrics file")
    raise DataError(
        f"{run} has no {METRICS_NAME}: name a directory that `memascend finetune` wrote, its store, or what --metrics "
        "named"
    )


def _written_by(run: Path) -> Path | None:
    """Return the output of a store's run, its directory or the file of --metrics; `run` itself if it is no store."""
    if not holds_store(run):
        return run
    with suppress(MemascendError, KeyError, TypeError):
        file = Path(last_record([run])["tracked"]["progress"]["records"])
        return file.parent if file.name == METRICS_NAME and not file.is_file() else file
    return None


def hidden_records(out: Path) -> Path:
    """Return the file that keeps the metrics of a run to `out` that did not finish and can be resumed."""
    return beside(out, METRICS_NAME)


def take_over_records(out: Path, path: Path) -> None:
    """Copy to `path` the records of the last run that did not finish `out`, if there are any."""
    if hidden_records(out).is_file():
        with writing(path):
            shutil.copyfile(hidden_records(out), path)
