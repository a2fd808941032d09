"""A model whose store is divided over ranks is saved as one process saves it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import bit_equality
import pytest
import rank_programs
import rank_runs
import rank_saving
import torch

import memascend
from memascend.formats.dcp import DistributedReader

if TYPE_CHECKING:
    from pathlib import Path


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("least", [False, True])
def test_the_files_are_those_of_one_process(least: bool, tmp_path: Path) -> None:
    results = rank_programs.run("save", 2, tmp_path, least=least)
    after_one = rank_programs.in_one_process(2, 1)["weights"]
    model = rank_runs.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(after_one[name])
    alone = rank_runs.offload(model, tmp_path / "alone")
    memascend.save_pretrained(alone, tmp_path / "expected", max_shard_size="1MB")
    memascend.save_pretrained(alone, tmp_path / "expected half", dtype="bfloat16")
    memascend.close(alone)
    assert len(files_of(tmp_path / "out")) > 3
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    assert files_of(tmp_path / "half") == files_of(tmp_path / "expected half")
    # An error on rank 0 is raised on both, and both go on to the same bits.
    expected = rank_programs.in_one_process(2, 2)
    for rank, result in enumerate(results):
        assert "error" not in result, result
        exists, full = result["errors"]
        assert "exists: give another directory" in exists and "No space left on device" in full
        told = "OutputError: rank 0 could not save the model: "
        assert not rank or (exists.startswith(told) and full.startswith(told))
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    assert not [file for file in (tmp_path / "full").iterdir() if file.suffix == ".tmp"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    expected = rank_runs.Run(rank_runs.build(dtype), 2, range(2)).go(2)
    memascend.save_distributed(expected.model, expected.optimizer, tmp_path / "expected")
    states = copy.deepcopy(expected.optimizer.state_dict())
    expected.go(3, 2)
    for result in rank_programs.run("save_states", 2, tmp_path, dtype=dtype):
        assert "error" not in result, result
        assert bit_equality.difference(result["states"]["state"], states["state"]) is None
        assert result["states"]["param_groups"] == states["param_groups"]
        assert bit_equality.difference(result["weights"], expected.result()["weights"]) is None
    saved, alone = (DistributedReader(tmp_path / name) for name in ("saved", "expected"))
    assert saved.entries.keys() == alone.entries.keys()
    tensors = {key: (saved.read(key), alone.read(key)) for key in alone.entries}
    assert any(key.startswith("optim.state.") for key in tensors)
    assert [key for key, (one, other) in tensors.items() if bit_equality.difference(one, other) is not None] == []


def test_adapters_are_saved_once(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for folder, ranks in (("alone", 1), ("divided", 2)):
        (tmp_path / folder).mkdir()
        assert rank_programs.run("save_adapters", ranks, tmp_path / folder, micro=2 // ranks) == [{}] * ranks
    saved = files_of(tmp_path / "divided" / "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved.keys()
    assert saved == files_of(tmp_path / "alone" / "out")


def test_a_model_of_transformers_saves_itself(tmp_path: Path) -> None:
    first, second = rank_programs.run("save_llama", 2, tmp_path)
    assert first == second == {"steps": 1}
    alone = rank_runs.offload(rank_saving.llama(), tmp_path / "alone")
    alone.save_pretrained(tmp_path / "expected")
    memascend.close(alone)
    assert {"config.json", "generation_config.json", "model.safetensors"} <= files_of(tmp_path / "out").keys()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
