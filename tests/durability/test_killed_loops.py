"""Loops that are killed at any instant, again and again: each goes on, and ends with the bits of memory.

MEMASCEND_KILLS says how often (default: a few). `recovery/test_kills.py` kills the command line, and
`integrations/test_killed_trainer.py` the Trainer.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import faults
import pytest
import torch
from durable_run import LEAST, Run, build, go_on, same

import memascend
from memascend._memascend import ClosedStore

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MEMASCEND_KILLS", "4"))
STEPS = 10
#: A run that is not killed counts as hung after so many seconds.
PATIENCE = 120


def loop(_pipe: Any, room: Path, durability: str) -> None:
    """Run a loop of a program's own, which goes on where it was, with a checkpoint of its half."""
    store, result = room / "store", room / "result"
    options: dict[str, Any] = {"durability": durability, "keep_store": True}
    if memascend.can_resume(store):
        _, _, state = go_on(store, "normed", STEPS, **options)
    else:
        model = memascend.offload(build("normed"), store=store, host_memory="64MiB", **options, **LEAST)
        run = Run(model, "normed").go(STEPS // 2)
        memascend.save_checkpoint(model, "half")
        state = run.go(STEPS, STEPS // 2).state()
        memascend.close(model)
    torch.save(state, result.with_suffix(".new"))
    result.with_suffix(".new").rename(result)


def nothing(_pipe: Any) -> None:
    """Do nothing in the first process."""


@pytest.mark.parametrize("durability", ["step", pytest.param("every:3", marks=pytest.mark.soak)])
def test_a_loop_that_is_killed_at_any_instant_comes_to_the_same_end(tmp_path: Path, durability: str) -> None:
    expected = Run(build("normed"), "normed").go(STEPS).state()
    seed = os.environ.get("MEMASCEND_SEED", "0")
    chance = random.Random(f"{seed} {durability}")
    (tmp_path / "alone").mkdir()
    with faults.Child(tmp_path, nothing) as child:
        child.wait(PATIENCE)  # from here on processes begin at once
    begun = time.monotonic()
    with faults.Child(tmp_path, loop, tmp_path / "alone", durability) as child:
        assert child.wait(PATIENCE).code == 0, child.told()
    seconds = time.monotonic() - begun
    kills, runs, resumed, most = 0, 0, 0, -(-KILLS // 2)
    while kills < most:
        runs += 1
        room = tmp_path / f"run {runs}"
        room.mkdir()
        attempts = 0
        while not (room / "result").exists():
            attempts += 1
            patient = kills >= most or attempts > 20
            on = (room / "store" / "memascend.json").exists()
            with faults.Child(tmp_path, loop, room, durability) as child:
                end = time.monotonic() + (PATIENCE if patient else chance.uniform(0, seconds))
                while child.alive() and time.monotonic() < end:
                    time.sleep(0.001)
                if not child.alive():
                    ended = child.wait()
                    assert ended.code == 0, f"seed {seed}, run {runs}, attempt {attempts}: {ended.err}"
                    continue
                assert not patient, child.told()
            kills, resumed = kills + 1, resumed + on
            if (room / "store" / "memascend.json").exists():
                store = ClosedStore([room / "store"])
                assert store.verify(lambda _done, _total: None) == []
                store.close()
        same(torch.load(room / "result"), expected)
    print(f"{durability}: {kills} kills, {resumed} of them of runs that had gone on, {runs} runs, seed {seed}")
