"""APOLLO over ranks has the bits of one process, however shares cut the channels of matrices."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_models
import rank_programs
import rank_runs

import memascend
from memascend.layout.shards import Shard, channels_of

if TYPE_CHECKING:
    from pathlib import Path

APOLLO: dict[str, Any] = {"kind": "matrices", "algorithm": "Apollo", "projection": {"rank": 8}}
MINI: dict[str, Any] = {"kind": "matrices", "algorithm": "ApolloMini", "projection": {"rank": 1}}
CASES: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": 2},
    "four ranks": {"ranks": 4, "dtype": "bfloat16", "projection": {"rank": 33}},
    "micro-batches": {"ranks": 2, "micro": 2, "projection": {"rank": 20}},
    "redrawn": {"ranks": 2, "steps": 4, "projection": {"rank": 8, "update_proj_gap": 2}},
    "front": {"ranks": 2, "steps": 3, "projection": {"rank": 8, "scale": 4.0, "scale_front": True}},
    "one factor": {"ranks": 4, "projection": {"rank": 8, "scale_type": "tensor"}},
    "not clipped": {"ranks": 2, "max_norm": None, "steps": 3},
    "scaled": {"ranks": 2, "dtype": "float16", "scaled": True},
    "maximize": {"ranks": 2, "maximize": True, "weight_decay": 0.1},
    "no masters": {"ranks": 2, "dtype": "bfloat16", "master": False, "seed": 3},
    "least memory": {"ranks": 2, "micro": 2, "offloading": {"least": True}},
    "budgets that differ": {"ranks": 2, "offloading": {"least": "first", "durability": "none"}},
    "8 bits of the others": {"ranks": 2, "states": "8bit"},
    "mini": {"ranks": 2, **MINI, "steps": 3},
    "mini, four ranks": {"ranks": 4, **MINI, "dtype": "bfloat16"},
}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_micro_batches(case: str, tmp_path: Path) -> None:
    options = {"steps": 2} | APOLLO | CASES[case]
    ranks = options.pop("ranks")
    results = rank_programs.run("train", ranks, tmp_path, **options)
    options.pop("offloading", None)
    expected = rank_programs.in_one_process(ranks, **options)
    losses: dict[int, float] = {}
    for result in results:
        assert "error" not in result, result
        losses |= result["losses"]
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    assert losses == expected["losses"] and len(losses) >= 2 * ranks
    before = dict(rank_runs.build(options.get("dtype", "float32"), kind="matrices").named_parameters())
    moved = {name for name, value in expected["weights"].items() if not bit_equality.same(value, before[name].detach())}
    assert {name for name in before if "experts" not in name} <= moved


def test_shares_cut_the_channels_of_the_model() -> None:
    """The cases above meet what they are for."""
    layer = rank_models.MatrixLayer()
    for ranks in (2, 4):
        for name in ("tall", "wide"):
            shape = tuple(getattr(layer, name).weight.shape)
            shards = [Shard.of(shape[0] * shape[1], False, rank, ranks) for rank in range(ranks)]
            ends = [first + count for first, _, count in (s.part(0, shape[0] * shape[1]) for s in shards) if count]
            assert len(ends) > 1 and all(end % shape[1] for end in ends[:-1])
            channels = [channels_of(shape, 0, shard) for shard in shards]
            seen = [number for first, count in channels for number in range(first, first + count)]
            assert seen == list(range(max(shape)))
    used = [{int(rank_runs.batch(b)[0, n]) % rank_models.EXPERTS for n in range(2)} for b in range(2)]
    assert used[0] != used[1]


def test_states_are_shown_and_loaded(tmp_path: Path) -> None:
    options = APOLLO | {"projection": {"rank": 20, "update_proj_gap": 3}}
    expected = rank_runs.Run(rank_runs.build(kind="matrices"), 2, range(2), **_without_kind(options)).go(2)
    states = copy.deepcopy(expected.optimizer.state_dict())
    assert sum("norm" in of_parameter for of_parameter in states["state"].values()) > 10
    expected.go(4, 2)
    for result in rank_programs.run("save_projected", 2, tmp_path, steps=2, **options):
        assert "error" not in result, result
        assert bit_equality.difference(result["states"]["state"], states["state"]) is None
        assert bit_equality.difference(result["weights"], expected.result()["weights"]) is None


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 2), (4, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    batches = 4
    rank_programs.run("train", before, tmp_path, micro=batches // before, offloading={"keep_store": True}, **APOLLO)
    assert memascend.reshard(tmp_path / "store{rank}", tmp_path / "new{rank}", ranks=after) == 2
    # Three ranks share no four batches: their stores are written anew for four.
    name = "new"
    if batches % after:
        memascend.reshard(tmp_path / "new{rank}", tmp_path / "four{rank}", ranks=4)
        name, after = "four", 4
    options = {"steps": 4, "micro": batches // after, "name": name, "kind": "matrices"}
    expected = rank_programs.in_one_process(batches, 4, **APOLLO)
    for result in rank_programs.run("resume", after, tmp_path, "again", **options):
        assert "error" not in result, result
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


@pytest.mark.parametrize("moment", ["commit", "meet", "gather"])
def test_a_run_goes_on_after_a_rank_was_lost(moment: str, tmp_path: Path) -> None:
    rank_programs.run("train_until_lost", 2, tmp_path, victim=1, moment=moment, steps=2, **APOLLO)
    expected = rank_programs.in_one_process(2, 4, **APOLLO)
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=4, kind="matrices"):
        assert "error" not in result, result
        assert result["steps"] in (1, 2)
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_killed_at_any_instant_all_go_on(tmp_path: Path) -> None:
    chance = random.Random(5)
    expected = rank_programs.in_one_process(2, 6, **APOLLO)
    for attempt in range(4):
        name = f"-{attempt}"
        processes = rank_programs.start("train_or_resume", 2, tmp_path, name, steps=6, **APOLLO)
        if attempt < 3:
            processes[attempt % 2].join(chance.uniform(1.0, 4.0))
            processes[attempt % 2].kill()
        results = rank_programs.results_of(processes, tmp_path, name)
    for result in results:
        assert "error" not in result, result
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_ranks_with_other_options_are_told(tmp_path: Path) -> None:
    for result in rank_programs.run("change_between", 2, tmp_path, **APOLLO):
        assert "the ranks were to do different things" in result["error"], result
        assert "rank 0: find factors of" in result["error"] and "lr=0.02" in result["error"]


def _without_kind(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "kind"}
