"""What a run tells: a progress line, a metrics file of JSON lines, and the memory of this process."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from memascend.common.sizes import format_size
from memascend.common.timeline import describe
from memascend.errors import MemascendError
from memascend.machine.drives import rate_of

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line in this time, and always the first and last step
SSD_COUNTERS = ("ssd_bytes_read", "ssd_bytes_written")


class OutputError(MemascendError, OSError):
    """The output cannot be written where it was asked for."""


@contextlib.contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Have an error of the system name `what` was being written: of an open file it names nothing."""
    try:
        yield
    except MemascendError:  # it says what it is about; some are errors of the system too
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename and str(error.filename) != str(what) else ""
        hint = " (this process may write no larger files: see `ulimit -f`)" if error.errno == errno.EFBIG else ""
        raise OutputError(f"cannot write {what}: {error.strerror or error}{where}{hint}") from error


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
    """A file of JSON lines: a "start" or "resume" record, one "step" record per step, one "end" record."""

    def __init__(self, path: Path, *, go_on: bool = False) -> None:
        """Create `path`, which must not exist, or `go_on` behind what is in it."""
        self.path = path
        try:
            self._file: TextIO = open(path, "a+" if go_on else "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
            if go_on and self._file.tell():
                # A process that was killed in the middle of a line has left the half of it.
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
        # Every record was flushed; one that could not be was told then, and closing would only try it again.
        with contextlib.suppress(OSError):
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
    if step["waited_seconds"] is not None:
        parts.append(describe(step["waited_seconds"]))
    if step["host_bytes_budget"] is not None:
        read, written = (step[name] / step["seconds"] / 1e9 for name in SSD_COUNTERS)
        parts.append(f"SSD {read:.2f} GB/s read, {written:.2f} written")
        parts.append(f"host {format_size(step['host_bytes_in_use'])} of {format_size(step['host_bytes_budget'])}")
    return "  ".join(parts)


def bench_text(measured: dict[str, Any]) -> str:
    """Return what `memascend.drives.measure` found, as a table."""
    direct = "direct I/O" if measured["direct_io"] else "buffered I/O: the page cache is measured too"
    lines = [
        f"{measured['place']}: {measured['engine']} ({', '.join(measured['features'])}), {direct}, "
        f"blocks of {measured['block_bytes']} bytes, requests cut at {format_size(measured['part_bytes'])}",
        f"  {'':<24}{'MB/s':>9}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'CPU s/GiB':>11}",
    ]
    titles = {
        "write": "write, 1 MiB",
        "read": "read, 1 MiB",
        "mix": "55 % reads, 1 MiB",
        "random_read": "random read, 4 KiB",
    }
    for name, title in titles.items():
        found = measured["workloads"][name]
        times = "".join(f"{found[f'latency_{part}'] * 1e3:>9.2f}" for part in ("p50", "p99", "max"))
        lines.append(
            f"  {title:<24}{found['bytes_per_second'] / 1e6:>9.0f}{found['requests_per_second']:>12.0f}{times}"
            f"{found['cpu_seconds_per_gib']:>11.3f}"
        )
    for option, gain in measured["polling"].items():
        verdict = ("" if option in measured["worth_it"] else "not ") + "worth a processor"
        gains = f"{gain['mix'] - 1:+.0%} of the mix, {gain['random_read'] - 1:+.0%} random reads"
        lines.append(f"  with {option}: {gains}: {verdict}")
    lines.extend(f"  note: {notice}" for notice in measured["notices"])
    return "\n".join(lines)


def gpu_text(measured: dict[str, Any]) -> str:
    """Return what `memascend.rates.measure_gpu` found, as a table."""
    rows = [(f"products, {dtype}", rate / 1e12, "TFLOP/s") for dtype, rate in measured["flops"].items()]
    rows += [
        (title, measured[name] / 1e9, "GB/s")
        for name, title in (
            ("h2d", "to the GPU, pinned"),
            ("d2h", "from the GPU, pinned"),
            ("dram", "host memory, copy"),
        )
    ]
    lines = [f"{measured['gpu']}, {format_size(measured['memory_bytes'])}"]
    return "\n".join([*lines, *(f"  {title:<24}{rate:>9.1f} {unit}" for title, rate, unit in rows)])


def bench_tail(measurements: list[dict[str, Any]], remembered_in: Path | None) -> str:
    """Return what follows from measurements of several drives, and where they are kept."""
    lines = []
    if len(measurements) > 1:
        rates = [rate_of(measured) for measured in measurements]
        shares = (
            f"{measured['place']} {rate / sum(rates):.0%}" for measured, rate in zip(measurements, rates, strict=True)
        )
        lines.append(f"a store on all of these gives them: {', '.join(shares)}")
    lines.append("not remembered" if remembered_in is None else f"remembered in {remembered_in}")
    return "\n".join(lines)
