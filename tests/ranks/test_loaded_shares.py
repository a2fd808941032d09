"""Distributed checkpoints that ranks load, each its share: the bits of one process that loads the same."""

from __future__ import annotations

import copy
import shutil
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import rank_runs

import memascend
from memascend.formats.dcp import DistributedReader

if TYPE_CHECKING:
    from pathlib import Path


def save(folder: Path, dtype: str, states: str = "float32") -> None:
    run = rank_runs.Run(rank_runs.build(dtype), 2, range(2), states=states).go(2)
    memascend.save_distributed(run.model, run.optimizer, folder / "saved")


def loaded_alone(folder: Path, dtype: str, states: str = "float32") -> dict[str, Any]:
    run = rank_runs.Run(rank_runs.build(dtype, seed=5), 2, range(2), states=states).go(1)
    memascend.load_distributed(run.model, run.optimizer, folder / "saved")
    loaded = copy.deepcopy(run.optimizer.state_dict())
    return run.go(2, 1).result() | {"states": loaded}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert "error" not in result, result
    assert bit_equality.difference(result["states"]["state"], expected["states"]["state"]) is None
    assert result["states"]["param_groups"] == expected["states"]["param_groups"]
    assert result["losses"].items() <= expected["losses"].items() and result["norms"] == expected["norms"]
    assert bit_equality.difference(result["weights"], expected["weights"]) is None


@pytest.mark.parametrize(("dtype", "states"), [("float32", "float32"), ("bfloat16", "8bit")])
def test_ranks_load_what_one_process_saved(dtype: str, states: str, tmp_path: Path) -> None:
    save(tmp_path, dtype, states)
    expected = loaded_alone(tmp_path, dtype, states)
    for result in rank_programs.run("load_states", 2, tmp_path, source="saved", dtype=dtype, states=states):
        assert_same(result, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_load_what_fsdp_saved(dtype: str, tmp_path: Path) -> None:
    assert rank_programs.run("save_as_fsdp", 4, tmp_path, dtype=dtype) == [None] * 4
    expected = loaded_alone(tmp_path, dtype)
    reader = DistributedReader(tmp_path / "saved")
    stored = sum(shown.numel() for key in reader.entries if (shown := reader.shown(key)) is not None)
    results = rank_programs.run("load_states", 2, tmp_path, "loading", source="saved", dtype=dtype)
    for result in results:
        assert_same(result, expected)
    # Each rank reads the pieces that its share lies in: FSDP's do not begin where ours do.
    assert sum(result["elements"] for result in results) < 1.4 * stored


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save(tmp_path, "float32")
    other = rank_runs.Run(rank_runs.build(seed=1), 2, range(2)).go(2)
    memascend.save_distributed(other.model, other.optimizer, tmp_path / "other1")
    for name in ("nothing0", "missing0", "missing1", "other0", "damaged0", "damaged1"):
        shutil.copytree(tmp_path / "saved", tmp_path / name)
    max((tmp_path / "missing1").glob("*.distcp"), key=lambda file: file.stat().st_size).unlink()
    for file in (tmp_path / "damaged1").glob("*.distcp"):  # Behind the part that is compared before.
        data = bytearray(file.read_bytes())
        data[4096:] = bytes(len(data[4096:]))
        file.write_bytes(data)
    expected = loaded_alone(tmp_path, "float32")
    first, second = rank_programs.run("load_damaged", 2, tmp_path)
    assert "error" not in first, first
    assert "rank 1 could not load a checkpoint: " in first["nothing"] and "has no .metadata" in first["nothing"]
    assert second["nothing"].startswith("CheckpointError: ") and "has no .metadata" in second["nothing"]
    assert "is missing" in first["missing"] and "is missing" in second["missing"]
    for told in (first, second):
        assert "rank 1 has other weights in its" in told["other"] and told["unchanged"]
        assert bit_equality.difference(told["loaded"]["weights"], expected["weights"]) is None
    assert "rank 1 could not load the weights of a checkpoint: cannot read model." in first["damaged"]
    assert "cannot read model." in second["damaged"]
