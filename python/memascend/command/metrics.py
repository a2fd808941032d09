"""The metrics file of a run, and the counters and memory of this process that it records."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import memascend
from memascend.common.outputs import beside, writing
from memascend.errors import OutputError

METRICS_NAME = "metrics.jsonl"
SSD_COUNTERS = ("ssd_bytes_read", "ssd_bytes_written")


def _status_bytes(field: str) -> int:
    """A kB field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_rss_bytes() -> int:
    """The most this process has held resident since it began, or since reset_peak_rss."""
    return _status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Reset the peak to the memory resident now; return False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def machine() -> dict[str, Any]:
    """The machine and the versions of libraries, for the metrics file."""
    import torch
    import transformers

    return {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memascend": memascend.__version__,
    }


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


def hidden_records(out: Path) -> Path:
    """The file that keeps the metrics of a run to `out` that did not finish and can be resumed."""
    return beside(out, METRICS_NAME)


def take_over_records(out: Path, path: Path) -> None:
    """Copy to `path` the records of the last run that did not finish `out`, if there are any."""
    if hidden_records(out).is_file():
        with writing(path):
            shutil.copyfile(hidden_records(out), path)


class Meter:
    """Turns cumulative counters into the difference made by one step."""

    def __init__(self, read_stats: Callable[[], dict[str, Any]]) -> None:
        """Count from the present values of `read_stats`, which may return an empty dict (a model in memory)."""
        self._read_stats = read_stats
        self._before = read_stats()
        self._began = time.monotonic()

    def lap(self) -> dict[str, Any]:
        """Seconds and SSD bytes since the last lap, with the host bytes now. Absent counters are None."""
        now, after = time.monotonic(), self._read_stats()
        seconds, self._began = now - self._began, now
        lap: dict[str, Any] = {"seconds": seconds}
        for name in SSD_COUNTERS:
            lap[name] = after[name] - self._before[name] if name in after else 0
        for name in ("host_bytes_in_use", "host_bytes_peak", "host_bytes_budget"):
            lap[name] = after.get(name)
        self._before = after
        return lap
