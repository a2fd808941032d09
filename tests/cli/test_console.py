"""Output of other libraries that the command lets through."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

import forked
import pytest

from memascend.cli import console, main
from memascend.errors import DefectError
from memascend.memory_plan.lines import Line, table_of

PROGRAM = """
from memascend.cli.console import quiet_libraries
quiet_libraries()
from deepspeed.accelerator import get_accelerator
get_accelerator()
"""


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_says_nothing_of_a_device_that_is_not_there() -> None:
    done = subprocess.run([forked.python(), "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "accelerator" not in done.stdout + done.stderr


WARNED = """
import warnings
from memascend.cli.console import quiet_libraries
quiet_libraries()
warnings.warn_explicit("a name will go", FutureWarning, "peft/tuners/lora.py", 1, module="peft.tuners.lora")
import trl.experimental
"""


def test_warnings_of_trainers_are_for_those_who_write_programs() -> None:
    done = subprocess.run([forked.python(), "-P", "-c", WARNED], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()


def test_a_panic_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def panic(_: object) -> int:
        raise DefectError("index out of bounds (crates/a.rs:1:2)")

    monkeypatch.setattr(main.subcommands, "run", panic)
    assert main.main(["doctor"]) == main.FAILED
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("memascend: error: a defect of memascend: index out of bounds (crates/a.rs:1:2). What is")


def test_closed_streams_are_no_number_of_a_file() -> None:
    """A store that got the number of standard output would hold the lines of libraries."""
    program = "import os, sys; from memascend.cli import main; main.main = lambda: report(); " + (
        "report = lambda: sys.exit(0 if all(os.path.samefile(n, os.devnull) for n in range(3)) "
        "and not sys.stdout.isatty() else 1); main.run()"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -P -c "$1" <&- >&- 2>&-', sys.executable, program], timeout=240)
    assert done.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_the_terminal_cannot_show_ends_no_command(encoding: str) -> None:
    program = "from memascend.cli import main; main.main = lambda: print('caf\\udce9') or 0; main.run()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stdout) == (0, "caf\\udce9\n"), done.stderr


@pytest.mark.parametrize(("columns", "rows"), [(80, 5), (200, 3)])
def test_a_row_of_the_plan_is_not_broken_by_the_terminal(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lines = [
        Line("weights of model.layers.0 and 29 like it", 13 << 20, 22, "22 of 30 cached, and the rest by turns"),
        Line("staging", 1 << 20, 16, "on the move"),
    ]
    console._ToStderr().emit(logging.makeLogRecord({"msg": table_of(lines)}))
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == rows and max(map(len, printed)) <= columns
    assert "22 of 30 cached" in printed[1 if columns == 80 else 0]
