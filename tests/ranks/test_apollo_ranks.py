"""APOLLO over ranks has the bits of one process, however shares cut the channels of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bits
import pytest
import rank_models
import rank_programs

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
        assert bits.difference(result["norms"], expected["norms"]) is None
        assert bits.difference(result["weights"], expected["weights"]) is None
    assert losses == expected["losses"] and len(losses) >= 2 * ranks
    before = dict(rank_programs.build(options.get("dtype", "float32"), kind="matrices").named_parameters())
    moved = {name for name, value in expected["weights"].items() if not bits.same(value, before[name].detach())}
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
    used = [{int(rank_programs.batch(b)[0, n]) % rank_models.EXPERTS for n in range(2)} for b in range(2)]
    assert used[0] != used[1]
