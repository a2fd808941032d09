"""Checkpoints in the stores of ranks: all of them have one, or none has."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs

from memascend._memascend import ClosedStore
from memascend.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def expected() -> dict[int, Any]:
    return {steps: rank_programs.in_one_process(2, steps) for steps in (2, 3)}


def tags_in(store: Path) -> list[str]:
    with contextlib.closing(ClosedStore([store])) as kept:
        return [tag for tag, _, _, _ in kept.snapshots()]


def test_ranks_go_back_together(tmp_path: Path, expected: dict[int, Any]) -> None:
    for result in rank_programs.run("go_back", 2, tmp_path):
        assert "error" not in result, result
        assert result["steps"] == 1 and result["tags"] == ["two", "three", "four"]
        for run in ("first", "again"):
            assert bit_equality.difference(result[run]["weights"], expected[3]["weights"]) is None
    for tag, steps in (("two", 2), (None, 3)):
        for result in rank_programs.run("resume", 2, tmp_path, f"to {tag}", steps=3, tag=tag):
            assert result["steps"] == steps and result["tags"] == ["two", "three"]
            assert bit_equality.difference(result["weights"], expected[3]["weights"]) is None
    for result in rank_programs.run("resume", 2, tmp_path, "to one", steps=3, tag="one"):
        assert "have no checkpoint one together, but ['three', 'two']" in result["error"]


def test_a_checkpoint_that_one_rank_refuses_is_kept_on_none(tmp_path: Path, expected: dict[int, Any]) -> None:
    first, second = rank_programs.run("keep_on_some", 2, tmp_path, victim=None)
    assert "could not be kept on every rank: rank 1: " in first["told"] and first["left"] == ["one"]
    assert "two" in second["told"]
    for result in (first, second):
        assert bit_equality.difference(result["weights"], expected[2]["weights"]) is None
    # Checkpoints that rank 1 alone had are gone once the run is resumed.
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=2):
        assert result["tags"] == ["one"]


def test_a_rank_is_killed_before_it_has_the_checkpoint(tmp_path: Path, expected: dict[int, Any]) -> None:
    first, killed = rank_programs.run("keep_on_some", 2, tmp_path, victim=1)
    assert killed == -9 and "RankError: rank 1 does not answer" in first["error"]
    assert [tags_in(tmp_path / f"store{rank}") for rank in range(2)] == [["one", "two"], ["one"]]
    for result in rank_programs.run("resume", 2, tmp_path, "to two", steps=2, tag="two"):
        assert "have no checkpoint two together, but ['one']" in result["error"]
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=2):
        assert result["steps"] == 1 and result["tags"] == ["one"]
        assert bit_equality.difference(result["weights"], expected[2]["weights"]) is None


def test_a_deletion_leaves_the_step_before(tmp_path: Path, expected: dict[int, Any]) -> None:
    first, killed = rank_programs.run("delete_too_early", 2, tmp_path, victim=1)
    assert killed == -9 and "RankError: rank 1 does not answer" in first["error"]
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=2):
        assert result["steps"] == 1 and result["tags"] == ["one"]
        assert bit_equality.difference(result["weights"], expected[2]["weights"]) is None


def test_stores_that_were_set_back_apart_are_not_gone_on_with(tmp_path: Path) -> None:
    rank_programs.run("go_back", 2, tmp_path)

    def restore(rank: int, tag: str) -> None:
        assert main(["checkpoints", str(tmp_path / f"store{rank}"), "--restore", tag]) == 0

    restore(0, "two")
    # The other rank does not have that generation: both go on from the one before.
    for result in rank_programs.run("resume", 2, tmp_path, "once", steps=3):
        assert result["steps"] == 3
    restore(0, "two")
    restore(1, "three")
    for result in rank_programs.run("resume", 2, tmp_path, "apart", steps=3):
        assert "(rank 0: step 2; rank 1: step 3): go back to the same checkpoint on each" in result["error"]
    for rank in range(2):
        restore(rank, "two")
    for result in rank_programs.run("resume", 2, tmp_path, "together", steps=3):
        assert result["steps"] == 2
