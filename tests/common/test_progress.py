"""The progress line: on a terminal of a given width, and in a file."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
from typing import TYPE_CHECKING

import pytest

from memascend.cli.tables import step_text
from memascend.common import progress
from memascend.common.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = {
    "loss": 2.3456,
    "tokens_per_s": 1234.5,
    "waited_seconds": {"ssd_read": 0.7, "compute": 0.5},
    "host_bytes_budget": 8 << 30,
    "host_bytes_in_use": 7 << 30,
    "ssd_bytes_read": 3e9,
    "ssd_bytes_written": 2e9,
    "seconds": 1.2,
}


def on_a_terminal(columns: int, rows: int, show: Callable[[Progress], None]) -> str:
    """Return the last line that `show` leaves on a terminal of that size."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        show(Progress("training", 100_000, stream=stream))
    told = b""
    with contextlib.suppress(OSError):  # EIO: it was closed, and everything was read
        while part := os.read(ours, 1 << 16):
            told += part
    os.close(ours)
    return re.split(r"[\r\n]+", told.decode().strip())[-1].strip()


def a_step(progress: Progress) -> None:
    progress.update(30, step_text(STEP))


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (200, ["| ", "loss 2.346", "host 7.0 GiB of 8.0 GiB", "1,234 tokens/s", "bound by", "SSD"], []),
        (110, ["| ", "loss 2.346", "host 7.0 GiB of 8.0 GiB"], ["bound by"]),
        (80, ["loss 2.346", "s/step", "tokens/s"], ["| ", "bound by"]),
        (50, ["loss 2.346"], ["host", "| "]),
        (60, ["loss 2.346", "s/step"], ["host", "| "]),
        (24, ["training 30/100000"], ["loss"]),
        (0, ["loss 2.346", "s/step"], ["bound by"]),
    ],
)
def test_a_line_shows_what_it_has_room_for(columns: int, shown: list[str], left_out: list[str]) -> None:
    line = on_a_terminal(columns, 0 if columns == 0 else 40, a_step)
    assert len(line) <= (columns or 80), line
    assert all(part in line for part in shown), line
    assert not any(part in line for part in left_out), line


def test_other_work_shows_how_far_it_is_without_parts() -> None:
    assert "training 50000/100000" in on_a_terminal(80, 24, lambda progress: progress.update(50_000))


def test_a_file_gets_every_part() -> None:
    stream = io.StringIO()
    a_step(Progress("training", 30, stream=stream))
    assert stream.getvalue() == "  ".join(["training 30/30", *step_text(STEP), "0:00:00 elapsed"]) + "\n"


def test_lines_say_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    bar = Progress("training", 1000, stream=stream)
    for done, seconds in ((401, 30.0), (402, 12.0), (403, 2.0), (500, 194.0), (1000, 1000.0)):
        now[0] += seconds  # The first step of a run that goes on comes after the loading.
        bar.update(done, ["loss 1"])
    bar.update(1000, ["evaluating 1/9"])  # a moment later
    assert stream.getvalue().splitlines() == [
        "training 401/1000  loss 1  0:00:30 elapsed",
        "training 402/1000  loss 1  0:00:42 elapsed  1:59:36 left",
        "training 500/1000  loss 1  0:03:58 elapsed  0:17:31 left",
        "training 1000/1000  loss 1  0:20:38 elapsed",
    ]


def test_within_a_step_lines_come_at_the_same_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    bar = Progress("training", 9, stream=stream)
    bar.update(1, ["loss 1"])
    for share in range(0, 100, 10):
        now[0] += 4
        bar.pulse(f"step 2: {share}%")
    assert stream.getvalue().splitlines() == [
        "training 1/9  loss 1  0:00:00 elapsed",
        "training 1/9  step 2: 20%  0:00:12 elapsed",
        "training 1/9  step 2: 50%  0:00:24 elapsed",
        "training 1/9  step 2: 80%  0:00:36 elapsed",
    ]


def test_within_a_step_a_terminal_keeps_what_it_showed() -> None:
    def pulsed(bar: Progress) -> None:
        bar.update(30, step_text(STEP))
        bar.pulse("step 31: 40%")

    line = on_a_terminal(110, 40, pulsed)
    assert "step 31: 40%" in line and "loss 2.346" in line
