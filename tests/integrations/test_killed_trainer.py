"""A Trainer that is killed at any instant, again and again: it goes on, and ends with the bits of a run left alone.

MEMASCEND_KILLS says how often (default: a few), MEMASCEND_SEED when.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from typing import TYPE_CHECKING, Any

import forked
import trainer_runs

from memascend._memascend import ClosedStore

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MEMASCEND_KILLS", "2"))
#: A run that is not killed counts as hung after so many seconds.
PATIENCE = 600


def start(folder: Path) -> forked.Program:
    """Begin the run of a folder, or go on with it."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    variables = forked.variables() | {"HF_HUB_OFFLINE": "1"}
    return forked.Program(["-P", trainer_runs.__file__, folder], env=variables, **pipes)


def is_killed(folder: Path, after: float) -> bool:
    """Have a run go on, and kill it `after` seconds; returns False where it has ended before."""
    process = start(folder)
    try:
        output, _ = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, output
    return False


def test_a_run_that_is_killed_at_any_instant_has_the_same_end(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        trainer_runs.build().save_pretrained(tmp_path / name / "model")
        return tmp_path / name

    for name in ("first", "whole"):  # the first has modules imported
        folder, begun = fresh(name), time.monotonic()
        assert not is_killed(folder, PATIENCE)
        seconds = time.monotonic() - begun
    expected = json.loads((folder / "result.json").read_text())
    seed = os.environ.get("MEMASCEND_SEED", "2")
    chance = random.Random(seed)
    kills = runs = resumed = verified = 0
    while kills < KILLS:
        runs += 1
        folder = fresh(f"run {runs}")
        store = folder / "out" / "store"
        while not (folder / "result.json").exists():
            on, is_last = (store / "memascend.json").exists(), kills == KILLS
            if not is_killed(folder, PATIENCE if is_last else chance.uniform(0, seconds)):
                continue
            assert not is_last, f"seed {seed}, run {runs}: hung"
            kills, resumed = kills + 1, resumed + on
            if (store / "memascend.json").exists():
                verified += 1
                kept = ClosedStore([store])
                assert kept.verify(lambda _done, _total: None) == []
                kept.close()
        assert json.loads((folder / "result.json").read_text()) == expected, f"seed {seed}, run {runs}"
    told = f"{kills} kills, {resumed} of them of runs that had gone on, {verified} stores verified"
    print(f"{told}, {runs} runs, seed {seed}")
