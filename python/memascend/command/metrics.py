"""The metrics file of a run, and the counters and memory of this process that it records."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import memascend
from memascend.common.outputs import writing
from memascend.errors import OutputError

SSD_COUNTERS = ("ssd_bytes_read", "ssd_bytes_written")


def _status_bytes(field: str) -> int:
    """A kB field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


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
        """Create `path`, which must not exist, or with `go_on` append to it."""
        self.path = path
        try:
            self._file: TextIO = open(path, "a+" if go_on else "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
            if go_on and self._file.tell():
                # A process killed in the middle of a line left half of it.
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise OutputError(f"--metrics {path}: {error.strerror}") from error

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
