"""Collectives of ranks: in one order, and with an end where a rank goes astray or is lost."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import rank_runs

import memascend
from memascend._memascend import ClosedStore

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 4


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return rank_programs.in_one_process(2, STEPS)


def generation(store: Path) -> int:
    with contextlib.closing(ClosedStore([store])) as kept:
        return kept.generation


def test_another_order_raises_on_every_rank(tmp_path: Path) -> None:
    errors = [result["error"] for result in rank_programs.run("go_astray", 2, tmp_path)]
    assert errors[0] == errors[1]
    assert "rank 0: exchange the gradients of embedding; rank 1: gather" in errors[0]


@pytest.mark.parametrize("moment", ["commit", "meet", "gather"])
def test_a_killed_rank_ends_the_others_and_all_resume(moment: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    first, killed = rank_programs.run("train_until_lost", 2, tmp_path, victim=1, moment=moment, steps=2)
    assert killed == -9
    assert "RankError: rank 1 does not answer: rank 0 of 2 was to" in first["error"]
    stores = [generation(tmp_path / f"store{rank}") for rank in range(2)]
    # The second commit is under way when a rank is killed. Where the other one has it, it goes back.
    assert stores == ([1, 1] if moment == "gather" else [2, 1])
    results = rank_programs.run("resume", 2, tmp_path, "again", steps=STEPS)
    for rank, result in enumerate(results):
        assert result["steps"] == 1
        assert result["losses"] == {n: expected["losses"][n] for n in range(2 + rank, 2 * STEPS, 2)}
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_states_of_8_bits_and_weights_without_masters_are_resumed(tmp_path: Path) -> None:
    training = {"dtype": "bfloat16", "states": "8bit", "master": False}
    rank_programs.run("train", 2, tmp_path, steps=2, offloading={"keep_store": True}, **training)
    expected = rank_programs.in_one_process(2, STEPS, **training)
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=STEPS, dtype="bfloat16"):
        assert result["steps"] == 2
        assert bit_equality.difference(result["norms"], expected["norms"][2:]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_an_error_on_one_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    first, second = rank_programs.run("give_up", 2, tmp_path)
    assert second["error"] == "OSError: no such batch"
    assert "RankError: rank 1 has given up (no such batch): rank 0 of 2 was to gather embedding" in first["error"]


def test_a_rank_that_does_not_answer_ends_the_others(tmp_path: Path) -> None:
    first, _ = rank_programs.run("train_until_lost", 2, tmp_path, victim=1, moment="hang", steps=1)
    assert "RankError: rank 1 does not answer: rank 0 of 2 was to gather embedding" in first["error"]
    assert first["seconds"] >= rank_programs.TIMEOUT


def test_stores_of_other_ranks_are_not_resumed(tmp_path: Path) -> None:
    rank_programs.run("train", 2, tmp_path, steps=1, offloading={"keep_store": True})
    with pytest.raises(memascend.CheckpointError, match="the shares of rank 0 of 2: resume it with torchrun"):
        memascend.resume(tmp_path / "store0", model=rank_runs.build(), host_memory="64MiB")
    (tmp_path / "store0").rename(tmp_path / "store")
    (tmp_path / "store1").rename(tmp_path / "store0")
    (tmp_path / "store").rename(tmp_path / "store1")
    for result in rank_programs.run("resume", 2, tmp_path, "exchanged", steps=2):
        assert "is that of rank 1: give each rank the store that it had" in result["error"]
    for result in rank_programs.run("resume", 3, tmp_path, "more", steps=2):
        assert "is one of 2, and there are 3 ranks: start as many as the run had" in result["error"]
