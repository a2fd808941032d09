"""How PyTorch's threads wait: processor time of an idle process.

Processor time is counted, so that these tests say the same on a busy machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memascend.hardware import neighbours, waits
from memascend.hardware.processors import Processors

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds of processor time that a thread spins: GNU's OpenMP by itself for more than the first, asleep for less than
#: the second. Seen: 5 to 10 ms, and 0.2 to 0.3.
SPINS, SLEEPS = 0.002, 0.001

PROGRAM = """
import json, os, sys, threading, time
import torch
torch.set_num_threads(2)
from memascend.hardware import waits
seen = {}
def measure(name):
    seen[name] = min(waits.spin_seconds() for _ in range(3))
"""


def measured(program: str, **environment: str) -> dict[str, Any]:
    """Return the value of `seen` in a process of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in waits.VARIABLES and not name.startswith(("OMP_", "MKL_", "MEMASCEND_"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{PROGRAM}\n{program}\nprint(json.dumps(seen))"],
        capture_output=True,
        text=True,
        timeout=240,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(autouse=True)
def _gnu() -> None:
    if not waits.is_gnu(waits.library()):
        pytest.skip(f"PyTorch's OpenMP is {waits.library()}, not GNU's")


def test_a_crowd_has_threads_sleep_while_it_lasts() -> None:
    seen = measured(
        "measure('before')\n"
        "crowd = waits.Crowd(); time.sleep(0.2); measure('within')\n"
        "crowd.end(); time.sleep(0.2); measure('after')\n"
        "seen['threads'] = threading.active_count()"
    )
    assert seen["before"] > SPINS and seen["after"] > SPINS, seen
    assert seen["within"] < SLEEPS, seen
    assert seen["threads"] == 1


def test_openmp_reads_the_environment_when_it_is_loaded() -> None:
    """Variables set in a program that has imported PyTorch change nothing, so memascend sets none there."""
    assert measured("measure('set before')", OMP_WAIT_POLICY="passive")["set before"] < SLEEPS
    assert measured("os.environ['OMP_WAIT_POLICY'] = 'passive'; measure('set late')")["set late"] > SPINS


OPENED = """
open = [True]
waits.watch(lambda: open[0])
def until(state):
    end = time.monotonic() + 60
    while waits.state() != state and time.monotonic() < end:
        time.sleep(0.05)
    assert waits.state() == state, (waits.state(), state)
"""


def test_threads_yield_while_something_is_open() -> None:
    seen = measured(
        f"{OPENED}until('yield'); time.sleep(0.2); measure('open')\n"
        "open[0] = False; until('as OpenMP does by itself'); time.sleep(1.5); measure('closed')",
        MEMASCEND_THREADS="waits=yield",
    )
    assert seen["open"] < SLEEPS and seen["closed"] > SPINS, seen


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MEMASCEND_THREADS": "waits=spin"}, "as OpenMP does by itself"),
        ({"OMP_WAIT_POLICY": "active"}, "as OMP_WAIT_POLICY=active says"),
    ],
)
def test_what_the_user_has_set_stays(environment: dict[str, str], said: str) -> None:
    seen = measured(f"{OPENED}seen['said'] = waits.state(); seen['threads'] = threading.active_count()", **environment)
    assert seen == {"said": said, "threads": 1}


def test_a_busy_neighbour_has_threads_yield() -> None:
    """A real neighbour, at a lower priority, on every processor; the test says nothing of a quiet machine."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "import os; os.nice(5)\nwhile True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        seen = measured(f"{OPENED}until('yield'); time.sleep(0.2); measure('open')")
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert seen["open"] < SLEEPS, seen


def test_neighbours_are_what_others_use_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """User, nice, system, irq, softirq and steal on processors 0 and 2, less this process's own time."""
    now, own = [10.0], [1.0]
    busy = {"cpu": 900, "cpu0": 100, "cpu1": 500, "cpu2": 100}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: own[0])
    monkeypatch.setattr(neighbours, "_SECONDS_PER_TICK", 0.01)
    line = "{} {} 10 20 9999 99 1 2 {} 77 0"
    monkeypatch.setattr(neighbours, "lines_of", lambda _: [line.format(name, n, n) for name, n in busy.items()])
    counted = neighbours.Neighbours()
    now[0], own[0] = 12.0, 2.5
    busy |= {"cpu0": 150, "cpu1": 700, "cpu2": 175}
    # 125 ticks of user time and as many of steal: 2.5 s in 2 s, and 1.5 s are its own.
    assert counted.processors() == pytest.approx(0.5)
    now[0], own[0] = 13.0, 4.0
    assert counted.processors() == 0.0, "clocks differ"


# ---- when ---------------------------------------------------------------------------------------------------


class Others:
    """Neighbours that take as much as a test says."""

    def __init__(self) -> None:
        self.taken = 0.0

    def processors(self) -> float:
        return self.taken


class Team:
    """A crowd of no threads."""

    def end(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waits, "Crowd", Team)
    monkeypatch.setattr(waits, "processors", lambda: Processors(4, 4))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield now
    torch.set_num_threads(before)


def test_threads_spin_again_once_the_machine_is_quiet(clock: list[float]) -> None:
    others = Others()
    chosen = waits.Waits("auto", others)  # type: ignore[arg-type]

    def look(taken: float, seconds: float = 1.0) -> bool:
        others.taken, clock[0] = taken, clock[0] + seconds
        chosen.look()
        return chosen.crowd is not None

    assert not look(0.0) and not look(0.2), "the kernel's own threads are no neighbours"
    assert look(0.4)
    assert look(0.0) and look(0.0), "a neighbour that waits for a drive is one still"
    assert not look(0.0)
    torch.set_num_threads(2)
    assert not look(1.9), "two processors are left"
    assert look(2.4)
    torch.set_num_threads(1)
    assert not look(4.0), "one thread waits for none"


def test_a_quota_is_spent_by_spinning(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = waits.Waits("auto", Others())  # type: ignore[arg-type]
    monkeypatch.setattr(waits, "processors", lambda: Processors(16, 16, 8.0, "a group"))
    chosen.look()
    assert chosen.crowd is None
    monkeypatch.setattr(waits, "processors", lambda: Processors(16, 16, 3.5, "a group"))
    chosen.look()
    assert chosen.crowd is not None
    chosen.close()
    assert chosen.crowd is None
