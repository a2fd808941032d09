"""Workspaces of killed processes: cleared away by the next one, unless a process lives in them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import flushes
import forked
import pytest

from memascend.common.outputs import KEPT, beside, put_in_place, workspace

if TYPE_CHECKING:
    from pathlib import Path

LIVES = """
import sys
from pathlib import Path
from memascend.common.outputs import KEPT, workspace
with workspace(Path(sys.argv[1])) as work:
    (work / KEPT).mkdir()
    (work / KEPT / "records").write_text("of the process")
    print(work, flush=True)
    sys.stdin.read()
"""


def start(out: Path) -> tuple[forked.Program, str]:
    process = forked.Program(["-P", "-c", LIVES, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_the_next_workspace_clears_those_of_killed_processes_alone(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-1-stranger").mkdir()  # without a lock: it is being made, or something else
    killed, left = start(tmp_path / "out")
    living, held = start(tmp_path / "other")
    killed.kill()
    killed.communicate()
    assert os.path.isdir(left), "or else nothing is tested"
    with workspace(tmp_path / "third") as work, workspace(tmp_path / "fourth"):
        assert not os.path.exists(left)
        assert os.path.isdir(held) and work.is_dir()
    assert beside(tmp_path / "out", "records").read_text() == "of the process"
    living.communicate("")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial-1-stranger", ".out.records"]


def test_what_is_newer_stays(tmp_path: Path) -> None:
    killed, _ = start(tmp_path / "out")
    killed.kill()
    killed.communicate()
    newer = beside(tmp_path / "out", "records")
    newer.write_text("of a later process")
    with workspace(tmp_path / "out"):
        pass
    assert newer.read_text() == "of a later process"
    assert list(tmp_path.iterdir()) == [newer]


@pytest.mark.root
def test_a_workspace_of_another_user_stays(tmp_path: Path) -> None:
    killed, left = start(tmp_path / "out")
    killed.kill()
    killed.communicate()
    os.chown(left, 12345, 12345)
    with workspace(tmp_path / "out"):
        assert os.path.isdir(os.path.join(left, KEPT))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_directory_is_on_the_medium_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    finished, out = tmp_path / "work" / "model", tmp_path / "out"
    (finished / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (finished / name).write_text(name)
    if replaces:
        out.mkdir()
    operations = flushes.recorded(monkeypatch)
    put_in_place(finished, out, replaces=replaces)
    assert (out / "inner" / "b").read_text() == "inner/b"
    renamed = operations.index(("rename", str(finished)))
    inside = (finished, finished / "a", finished / "inner", finished / "inner" / "b")
    assert flushes.flushed(operations[:renamed]) == set(map(str, inside))
    assert operations[renamed + 1 :] == [("flush", str(tmp_path))]
