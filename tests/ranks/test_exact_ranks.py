"""N ranks with a batch each have the bits of one process, in memory, that accumulates the N batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import rank_runs
import requirements

import memascend

if TYPE_CHECKING:
    from pathlib import Path

CASES: dict[str, dict[str, Any]] = {
    "float32": {"ranks": 2},
    "bfloat16": {"ranks": 2, "dtype": "bfloat16"},
    "four ranks": {"ranks": 4, "dtype": "bfloat16"},
    "micro-batches": {"ranks": 2, "micro": 2},
    "not clipped": {"ranks": 2, "max_norm": None, "offloading": {"durability": "none"}},
    "not recomputed": {"ranks": 2, "offloading": {"recompute": False}},
    "least memory": {"ranks": 2, "micro": 2, "offloading": {"least": True}},
    "least memory, not recomputed": {"ranks": 2, "offloading": {"least": True, "recompute": False}},
    "budgets that differ": {"ranks": 2, "micro": 2, "offloading": {"least": "first"}},
    "opaque outputs": {"ranks": 2, "opaque": True},
    "scaled": {"ranks": 2, "dtype": "float16", "scaled": True},
    "group": {"ranks": 2, "grouped": "group"},
    "mesh": {"ranks": 2, "grouped": "mesh"},
    "8 bits": {"ranks": 4, "states": "8bit", "amsgrad": True},
    "8 bits, bfloat16": {"ranks": 2, "dtype": "bfloat16", "states": "8bit"},
    "8 bits, float16": {"ranks": 2, "dtype": "float16", "scaled": True, "states": "8bit"},
    "bfloat16 states": {"ranks": 2, "states": "bfloat16"},
    "SGD": {"ranks": 2, "algorithm": "SGD", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "SGD without momentum": {"ranks": 2, "dtype": "bfloat16", "algorithm": "SGD", "master": False},
    "Lion": {"ranks": 2, "dtype": "bfloat16", "algorithm": "Lion", "states": "bfloat16"},
    "no masters": {"ranks": 2, "dtype": "bfloat16", "master": False},
    "no masters, 8 bits": {"ranks": 2, "dtype": "bfloat16", "master": False, "states": "8bit"},
    "no masters, bfloat16 states": {"ranks": 4, "dtype": "bfloat16", "master": False, "states": "bfloat16"},
}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_micro_batches(case: str, tmp_path: Path) -> None:
    options = dict(CASES[case])
    ranks = options.pop("ranks")
    results = rank_programs.run("train", ranks, tmp_path, **options)
    expected = rank_programs.in_one_process(
        ranks, **{name: value for name, value in options.items() if name not in ("offloading", "grouped", "opaque")}
    )
    losses: dict[int, float] = {}
    for result in results:
        assert "error" not in result, result
        losses |= result["losses"]
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    assert losses == expected["losses"] and len(losses) >= 2 * ranks
    before = dict(rank_runs.build(options.get("dtype", "float32")).named_parameters())
    moved = [name for name, value in expected["weights"].items() if not bit_equality.same(value, before[name].detach())]
    # Some experts had a batch of one rank alone, or none; the frozen layer stays.
    assert "embedding.weight" in moved and "frozen.weight" not in moved
    assert 0 < sum("experts" in name for name in moved) < 36


@pytest.mark.parametrize("cut", [{"micro_batch_size": 1}, {"tile_tokens": 3}], ids=["slices", "tiles"])
def test_layers_on_slices_and_tiles(cut: dict[str, int], tmp_path: Path) -> None:
    results = rank_programs.run("train", 2, tmp_path, offloading={"least": True, **cut})
    cut_in_memory = memascend.run_in_tiles if "tile_tokens" in cut else memascend.run_in_slices
    model = cut_in_memory(rank_runs.build(), *cut.values())
    expected = rank_runs.Run(model, 2, range(2)).go(2).result()
    for result in results:
        assert "error" not in result, result
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


@pytest.mark.parametrize("training", [{"states": "8bit"}, {"dtype": "bfloat16", "master": False}])
def test_three_ranks_are_one_process_that_divides_in_the_update(training: dict[str, Any], tmp_path: Path) -> None:
    dtype = training.get("dtype", "float32")
    model = rank_runs.offload(rank_runs.build(dtype), tmp_path / "alone")
    options = {name: value for name, value in training.items() if name != "dtype"}
    alone = rank_runs.Run(model, 3, range(3), divides_in_update=True, **options).go(2)
    expected = alone.result()
    memascend.close(model)
    # Some tensors have elements on two of the ranks, or on one.
    begun = rank_programs.run("train", 3, tmp_path, steps=1, offloading={"keep_store": True}, **training)
    resumed = rank_programs.run("resume", 3, tmp_path, "again", steps=2, dtype=dtype)
    losses: dict[int, float] = {}
    for first, second in zip(begun, resumed, strict=True):
        losses |= first["losses"] | second["losses"]
        assert bit_equality.difference([*first["norms"], *second["norms"]], expected["norms"]) is None
        assert bit_equality.difference(second["weights"], expected["weights"]) is None
    assert losses == expected["losses"]


# Attributes that PEFT reads of transformers' models are deprecated there.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["t5", "lora"])
def test_models_of_transformers(kind: str, ranks: int, tmp_path: Path) -> None:
    if kind == "lora":
        requirements.package("peft")
    expected = rank_programs.in_one_process(ranks, kind=kind)
    for result in rank_programs.run("train", ranks, tmp_path, kind=kind, offloading={"least": True}):
        assert "error" not in result, result
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    before = dict(rank_runs.build(kind=kind).named_parameters())
    moved = {name for name, value in expected["weights"].items() if not bit_equality.same(value, before[name].detach())}
    trained = {name for name, parameter in before.items() if parameter.requires_grad}
    assert moved == trained
    assert ("lora" in kind) == (trained != before.keys())


def test_experts_that_only_one_rank_uses_are_among_the_cases() -> None:
    used = [{(n, int(rank_runs.batch(b)[0, n]) % rank_runs.EXPERTS) for n in range(3)} for b in range(2)]
    assert used[0] - used[1] and used[1] - used[0]


def test_a_group_of_one_rank_divides_nothing(tmp_path: Path) -> None:
    results = rank_programs.run("train_alone", 2, tmp_path)
    expected = rank_runs.Run(rank_runs.build(), 1, range(1)).go(2).result()
    for result in results:
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_an_overflow_on_one_rank_is_known_to_all(tmp_path: Path) -> None:
    for result in rank_programs.run("overflow", 2, tmp_path):
        assert result == {"scale": 128.0, "norm": "nan", "skipped": 1, "same": True}


def test_the_pattern_of_a_program_by_itself_is_rank_0(tmp_path: Path) -> None:
    model = rank_runs.offload(rank_runs.build(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["store0"]
    memascend.close(model)
