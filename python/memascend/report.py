"""What a run tells: a progress line, a metrics file of JSON lines, and the memory of this process."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from memascend import MemascendError
from memascend.plan import format_size

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line in this time, and always the first and last step
SSD_COUNTERS = ("ssd_bytes_read", "ssd_bytes_written")


class OutputError(MemascendError, OSError):
    """The output cannot be written where it was asked for."""


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
    """Start the peak anew at what is resident now; False where the system does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def machine() -> dict[str, Any]:
    """The machine and the versions that a metrics file should name."""
    import torch
    import transformers

    from memascend import __version__

    return {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memascend": __version__,
    }


class Metrics:
    """A file of JSON lines: one "start" record, one "step" record per step, one "end" record."""

    def __init__(self, path: Path) -> None:
        """Create `path`, which must not exist."""
        self.path = path
        try:
            self._file: TextIO = open(path, "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise OutputError(f"--metrics {path}: {error.strerror}") from error

    def write(self, record: str, **fields: Any) -> None:
        """Append one record, at once visible to a reader."""
        self._file.write(json.dumps({"record": record, **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, title: str, total: int, *, unit: str = "step", stream: TextIO | None = None) -> None:
        """Show `total` units of work under `title`. With unit "B" the numbers are bytes."""
        self._stream = stream if stream is not None else sys.stderr
        self._title, self._total, self._unit = title, total, unit
        self._bar: Any = None
        self._shown = -math.inf if unit == "step" else time.monotonic()  # of other work only what takes long
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=title,
                total=total,
                unit=unit,
                unit_scale=unit == "B",
                unit_divisor=1024,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar:12}| {elapsed}<{remaining}{postfix}",
            )

    def update(self, done: int, text: str = "") -> None:
        """Show that `done` of the total is done, with `text` beside it."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if text:
                self._bar.refresh()
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_LINE_SECONDS or done == self._total:
            self._shown = now
            amount = (format_size(done), format_size(self._total)) if self._unit == "B" else (done, self._total)
            self._stream.write(f"{self._title} {amount[0]}/{amount[1]}{'  ' + text if text else ''}\n")
            self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


class Meter:
    """Turns cumulative counters into what one step moved."""

    def __init__(self, read_stats: Callable[[], dict[str, Any]]) -> None:
        """Count from what `read_stats` gives now; it may give an empty dict (a model in memory)."""
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


def step_text(step: dict[str, Any]) -> str:
    """One step's record as the text beside the bar."""
    parts = [f"loss {step['loss']:.3f}", f"{step['tokens_per_s']:,.0f} tokens/s"]
    if step["host_bytes_budget"] is not None:
        read, written = (step[name] / step["seconds"] / 1e9 for name in SSD_COUNTERS)
        parts.append(f"SSD {read:.2f} GB/s read, {written:.2f} written")
        parts.append(f"host {format_size(step['host_bytes_in_use'])} of {format_size(step['host_bytes_budget'])}")
    return "  ".join(parts)
