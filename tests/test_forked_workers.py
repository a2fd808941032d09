"""Processes that run tests: each test once, in whatever order they become free, and a result for each."""

from __future__ import annotations

import random
import re
from pathlib import Path

import forked
import pytest
from forked_workers import Shares

TESTS = """
import os, pathlib, signal, sys, warnings
import pytest

SEEN = pathlib.Path({seen!r})

@pytest.fixture(scope="module")
def room(tmp_path_factory):
    room = tmp_path_factory.mktemp("room")
    print(room, file=(SEEN / "rooms").open("a"))
    return room

@pytest.mark.parametrize("number", range(6))
def test_passes(number, room, tmp_path, capfd):
    assert room.parent == tmp_path.parent
    os.write(1, b"of %d" % number)
    assert capfd.readouterr().out == f"of {{number}}"
    print(f"{{number}} in {{os.getpid()}}", file=(SEEN / "passed").open("a"))

def test_fails():
    print("what it printed")
    assert {{"a": 1}} == {{"a": 2}}

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_is_skipped():
    pytest.skip("not here")

def test_warns():
    warnings.warn("mind the gap")
"""
CONFTEST = """
import forked_workers

def pytest_runtestloop(session):
    forked_workers.run(session, 2)
    return True
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("test_one", "test_two"):
        (tmp_path / f"{name}.py").write_text(TESTS.format(seen=str(tmp_path)))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(project: Path, *words: str) -> str:
    told = ["-P", "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", project / "temporary", "-rA", *words, project]
    return forked.run(told, env=forked.variables(), cwd=project, timeout=120).stdout


def test_every_test_has_its_result(project: Path) -> None:
    """A failure with its output, a skip, a warning; and one that ends its process fails alone."""
    out = run(project)
    assert re.search(r"collected 20 items\n+[.Fs]{20} +\[100%\]\n", out), out
    assert re.search(r"= 4 failed, 14 passed, 2 skipped, \d warnings in ", out), out
    for name in ("test_one", "test_two"):
        assert f"FAILED {name}.py::test_fails - AssertionError: assert {{'a': 1}} == {{'a': 2}}" in out
        assert re.search(rf"FAILED {name}.py::test_dies - worker \d ended with -9 in this test", out), out
    assert out.count("what it printed\n") == 2 and out.count("UserWarning: mind the gap") == 2
    passed = (project / "passed").read_text().splitlines()
    assert sorted(line[0] for line in passed) == sorted([*"012345"] * 2)
    # Each file in one process while both are busy, and none of it twice.
    assert len((project / "rooms").read_text().splitlines()) == len({line.split()[-1] for line in passed}) == 2


def test_the_first_failure_can_end_the_run(project: Path) -> None:
    out = run(project, "-x", "--deselect", "test_one.py::test_dies", "--deselect", "test_two.py::test_dies")
    assert re.search(r"stopping after [12] failures !+\n=+ [12] failed, \d+ passed, 2 deselected", out), out


@pytest.mark.parametrize("seed", range(5))
def test_each_test_is_handed_out_once(seed: int) -> None:
    chance = random.Random(seed)
    files = [f"{file}" for file in range(9) for _ in range(chance.randrange(1, 12))]
    shares = Shares(files, 3)
    handed: list[int] = []
    while any(shares.left):
        worker = chance.choice([0, 0, 0, 1, 2])
        test = shares.take(worker)
        assert test is not None
        if chance.random() < 0.1:
            shares.give_back(worker, [test])
        else:
            handed.append(test)
    assert sorted(handed) == list(range(len(files)))
    assert shares.take(0) is None


def test_what_is_left_is_divided_between_files() -> None:
    shares = Shares([*"aaaaaaaabbbb", *"cccccccccccc"], 2)
    for _ in range(12):
        shares.take(1)
    # Half of twelve would cut the first file.
    assert [shares.take(1) for _ in range(5)] == [8, 9, 10, 11, 4]
