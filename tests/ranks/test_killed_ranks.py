"""Ranks that are killed at any instant, again and again: all go on, and end like a run that was never killed.

MEMASCEND_KILLS says how often (default: a few), MEMASCEND_SEED in which order.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from typing import TYPE_CHECKING

import bit_equality
import pytest
import rank_programs

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MEMASCEND_KILLS", "3"))
STEPS = 10


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_every_resume_has_the_same_bits(ranks: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("MEMASCEND_SEED", "1"))
    chance = random.Random(seed)
    for folder in ("first", "whole"):  # The first imports the modules of every rank.
        (tmp_path / folder).mkdir()
        began = time.monotonic()
        rank_programs.run("train_or_resume", ranks, tmp_path / folder, steps=STEPS)
        takes = time.monotonic() - began
    expected = rank_programs.in_one_process(ranks, STEPS)
    killed = attempt = 0
    while True:
        attempt += 1
        name = f"-{attempt}"
        processes = rank_programs.start("train_or_resume", ranks, tmp_path, name, steps=STEPS)
        victim = chance.randrange(ranks)
        last = killed == KILLS
        if not last:
            processes[victim].join(chance.uniform(0, takes))
            processes[victim].kill()
        results = rank_programs.results_of(processes, tmp_path, name)
        if all(isinstance(result, dict) and "error" not in result for result in results):
            for result in results:
                assert bit_equality.difference(result["weights"], expected["weights"]) is None, seed
            if last:
                break
            # It ended before it was killed: the next begins anew, and is killed sooner.
            takes *= 0.8
            for rank in range(ranks):
                shutil.rmtree(tmp_path / f"store{rank}")
            continue
        killed += 1
        told = [result["error"] for result in results if isinstance(result, dict) and "error" in result]
        assert results.count(-9) <= 1 and all("RankError" in text for text in told), (seed, results)
