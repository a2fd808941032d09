"""Runs that are killed, again and again, at any instant: each goes on, and ends like a run that was never killed.

MEMASCEND_KILLS says how often (default: a few). Every kill is SIGKILL, which no process can see coming.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import faults
import pytest
import tiny_models
import torch
from commands import command, words_of
from safetensors.torch import load_file

from memascend._memascend import ClosedStore

KILLS = int(os.environ.get("MEMASCEND_KILLS", "6"))
STEPS = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over bytes with 0.3M parameters."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64, layers=4, positions=64)


def losses(metrics: Path) -> dict[int, list[Any]]:
    """Return the messages of each step, as often as it was taken."""
    found: dict[int, list[Any]] = {}
    for line in metrics.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        if record["record"] == "step":
            found.setdefault(record["step"], []).append((record["loss"], record["grad_norm"], record["lr"]))
    return found


def words(model_dir: Path, room: Path, *more: str) -> list[str]:
    """Return a run whose layers go to the SSD and come back, with all that a run keeps beside its tensors."""
    flags = {
        "host_memory": "24MiB",
        "steps": STEPS,
        "metrics": room / "metrics.jsonl",
        "warmup_steps": 3,
        "grad_accum": 2,
    }
    return [*words_of(model_dir, room / "out", room / "store", **flags), *more]


def steps_told(room: Path) -> int:
    """Return the bytes of a run's messages about its steps."""
    metrics = room / "metrics.jsonl"
    return metrics.stat().st_size if metrics.exists() else 0


def wait_for_steps(child: faults.Child, room: Path, told: int) -> None:
    """Wait until the run says something of a step, or ends."""
    deadline = time.monotonic() + 120
    while child.alive() and steps_told(room) <= told:
        assert time.monotonic() < deadline, child.told()
        time.sleep(0.001)


VARIANTS = {
    "every step": [],
    "every third, threads": ["--durability", "every:3"],
    "8 bits": ["--states", "8bit", "--no-master"],
    "apollo": ["--optimizer", "apollo", "--lr", "1e-3"],
    "apollo-mini": ["--optimizer", "apollo-mini", "--lr", "1e-3"],
    # States and weights stay in memory: written beside each step, or by every third step alone.
    "written through": ["--host-memory", "128MiB"],
    "in memory, every third": ["--host-memory", "128MiB", "--durability", "every:3"],
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.soak) if name == "apollo-mini" else name for name in VARIANTS]
)
def test_a_run_killed_at_any_instant_comes_to_the_same_end(tmp_path: Path, model_dir: Path, variant: str) -> None:
    more = VARIANTS[variant]
    alone = tmp_path / "alone"
    alone.mkdir()
    with faults.Child(tmp_path, command, ["--version"]) as child:
        child.wait()  # from here on processes begin at once
    begun = time.monotonic()
    with faults.Child(tmp_path, command, words(model_dir, alone, *more)) as child:
        wait_for_steps(child, alone, 0)
        working = time.monotonic()
        assert child.wait(120).code == 0, child.told()
    seconds, seconds_of_steps = time.monotonic() - begun, time.monotonic() - working
    expected, weights = losses(alone / "metrics.jsonl"), load_file(alone / "out" / "model.safetensors")
    assert expected.keys() == set(range(1, STEPS + 1))
    seed = int(os.environ.get("MEMASCEND_SEED", "0"))
    chance = random.Random(f"{seed} {variant}")
    kills, runs, resumed, verified = 0, 0, 0, 0
    wanted = -(-KILLS // len(VARIANTS))
    while kills < wanted:
        runs += 1
        room = tmp_path / f"run {runs}"
        room.mkdir()
        for attempt in range(100):
            on = (room / "store" / "memascend.json").exists()
            with faults.Child(tmp_path, command, [*words(model_dir, room, *more), "--resume"]) as child:
                patient = kills >= wanted or attempt > 20
                # Most of a short run is its beginning: every second kill is among the steps.
                among_steps = not patient and chance.random() < 0.5
                if among_steps:
                    wait_for_steps(child, room, steps_told(room))
                span = seconds_of_steps if among_steps else seconds
                end = time.monotonic() + (120 if patient else chance.uniform(0, span))
                while child.alive() and time.monotonic() < end:
                    time.sleep(0.001)
                assert not patient or not child.alive(), child.told()
                if (room / "out").exists():
                    break  # all that was left to do, if it was killed, was to remove the store
                if not child.alive():
                    ended = child.wait()
                    assert ended.code == 0, f"seed {seed}, run {runs}, attempt {attempt}: {ended.err}"
                    break
                if on:
                    assert "Traceback" not in child.told()
            kills += 1
            resumed += on
            if (room / "store" / "memascend.json").exists():
                verified += 1
                store = ClosedStore([room / "store"])
                assert store.verify(lambda _done, _total: None) == []
                store.close()
        taken = losses(room / "metrics.jsonl")
        assert taken.keys() == expected.keys()
        for step, seen in taken.items():
            assert set(seen) == set(expected[step]), f"seed {seed}, run {runs}: step {step}"
        for name, value in load_file(room / "out" / "model.safetensors").items():
            assert torch.equal(value, weights[name]), f"seed {seed}, run {runs}: {name}"
        left = {path.name for path in room.iterdir()} - {"store", "out", "metrics.jsonl"}
        # Of a process that was killed when its output was in place; those before it were cleared away.
        assert len(left) <= 1 and all(name.startswith(".out.partial-") for name in left)
        shutil.rmtree(room)
    told = f"{kills} kills, {resumed} of them of runs that had gone on, {verified} stores verified"
    print(f"{variant}: {told}, {runs} runs, seed {seed}")
