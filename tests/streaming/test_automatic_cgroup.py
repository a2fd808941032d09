"""A budget that follows a memory cgroup of the kernel's, whose limit drops by half and comes back."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requirements

from memascend.hardware import cgroups, memory_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
RUN = Path(__file__).with_name("automatic_run.py")
LAYERS, WIDTH = 40, 1024
#: For growth of Python and PyTorch after the beginning.
SLACK = 160 * MIB


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a memory cgroup of version 1 without a limit; skips where that is not allowed."""
    mounted = cgroups.CGROUPS / "memory"
    if not (mounted / "memory.limit_in_bytes").exists():
        requirements.unmet("root", "the memory controller of version 1 of cgroups is not mounted")
    entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = mounted / next(path for _, controllers, path in entries if "memory" in controllers.split(",")).lstrip("/")
    # In a container the path may be the host's.
    made = (own if own.exists() else mounted) / f"memascend-auto-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        requirements.unmet("root", f"cannot make a memory cgroup here: {error}")
    yield made
    deadline = time.monotonic() + 10
    while made.exists():
        try:
            made.rmdir()
        except OSError:  # The process that left it is still listed.
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Told:
    """A run in another process, and its messages."""

    def __init__(self, **job: Any) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        job = {"architecture": (LAYERS, WIDTH), "group": None, "steps": None, "pause": 0.0} | job
        self.process = subprocess.Popen(
            [sys.executable, str(RUN), json.dumps(job, default=str)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.steps: list[dict[str, Any]] = []
        self.log = ""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log = self.process.stderr.read()

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 120)
        assert ready, "the run tells nothing"
        line = self.process.stdout.readline()
        if not line:
            self._reader.join(10)
            pytest.fail(f"the run ended with {self.process.wait()}: {self.log}")
        told = json.loads(line)
        if "step" in told:
            self.steps.append(told)
        return told

    def go(self, until: Any, most: int) -> dict[str, Any]:
        """Return the first step for which `until` is true, of `most` at most."""
        for _ in range(most):
            if until(told := self.next()):
                return told
        pytest.fail(f"not within {most} steps: {self.steps[-most:]}")

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("end\n")
        self.process.stdin.close()
        while "digest" not in (told := self.next()):
            pass
        assert self.process.wait(60) == 0
        return told


@pytest.fixture
def begin() -> Iterator[Callable[..., Told]]:
    """Begin runs; those that still go on when the test ends are killed."""
    begun: list[Told] = []

    def begin(**job: Any) -> Told:
        begun.append(Told(**job))
        return begun[-1]

    yield begin
    for run in begun:
        run.process.kill()
        run.process.wait(30)
        for pipe in (run.process.stdin, run.process.stdout, run.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.root
@pytest.mark.parametrize("durability", [pytest.param("none", marks=pytest.mark.soak), "step"])
def test_a_limit_that_drops_by_half_and_comes_back(
    group: Path, begin: Callable[..., Told], tmp_path: Path, durability: str
) -> None:
    def read(name: str) -> int:
        return int((group / name).read_text())

    def soft(limit: int) -> None:
        (group / "memory.soft_limit_in_bytes").write_text(str(limit))

    def hard(limit: int) -> bool:
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit))
        except OSError:  # EBUSY: the group holds more, and the kernel can take nothing back
            return False
        return True

    (tmp_path / "store").mkdir()
    options = {"store": tmp_path / "store", "durability": durability}
    run = begin(group=group, options={**options, "host_memory": "auto"}, pause=0.02)
    opened = run.next()
    least, most = opened["least"], opened["most"]
    full = run.go(lambda step: step["planned"] == most, 20)
    run.go(lambda step: step["step"] >= full["step"] + 4, 10)
    beside = read("memory.usage_in_bytes") - most
    # With the reserve, and a step's memory beside the plan.
    whole = beside + most + SLACK
    half = whole // 2
    assert half > beside + least + memory_limits.group_reserve(half) + 16 * MIB, "half has to hold the least plan"
    assert hard(whole)
    run.go(lambda step: step["step"] >= full["step"] + 8, 10)
    assert run.steps[-1]["planned"] == most

    assert not hard(half), "locked pages cannot be reclaimed"
    soft(half)
    before = len(run.steps)
    # The step under way, and the one that is told after it.
    shrunk = run.go(lambda step: step["planned"] < most, 3)
    assert full["rss"] - shrunk["rss"] > (full["planned"] - shrunk["planned"]) * 0.9
    deadline = time.monotonic() + 30
    while not hard(half):
        run.next()
        assert time.monotonic() < deadline
    assert len(run.steps) - before <= 4
    for _ in range(3):
        run.next()
    assert read("memory.usage_in_bytes") <= half
    soft(1 << 62)
    assert hard(whole)
    grown = run.go(lambda step: step["planned"] == most, 80)
    assert grown["rss"] - shrunk["rss"] > (most - shrunk["planned"]) * 0.9
    done = run.end()
    assert all(step["swap"] == 0 for step in run.steps)
    events = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    assert int(events.get("oom_kill", 0)) == 0

    fixed = begin(options={**options, "host_memory": "1GiB"}, steps=done["steps"])
    while "digest" not in (expected := fixed.next()):
        pass
    assert fixed.process.wait(60) == 0
    assert [step["loss"] for step in run.steps] == [step["loss"] for step in fixed.steps]
    assert done == expected
