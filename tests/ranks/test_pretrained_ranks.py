"""Each rank reads its share of a model directory, and trains with the bits of the whole model in memory."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import rank_programs
import rank_runs

from memascend.formats.weight_files import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path

#: Elements of each tensor that ranks compare.
COMPARED = 1024


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory, max_shard_size="1MB")
    return directory


def bytes_in(directory: Path) -> tuple[int, int]:
    """Return the bytes of all tensors, and of the parts that ranks compare."""
    with closing(WeightFiles(directory)) as files:
        tensors = [(math.prod(e.shape), e.dtype.itemsize) for reader in files.readers for e in reader.entries.values()]
    assert len(tensors) > 20
    return sum(n * size for n, size in tensors), sum(min(n, COMPARED) * size for n, size in tensors)


@pytest.mark.parametrize(("kind", "dtype", "ranks"), [("t5", "float32", 2), ("llama", "bfloat16", 4)])
def test_every_element_is_read_by_one_rank(kind: str, dtype: str, ranks: int, tmp_path: Path) -> None:
    model: Any = rank_runs.build(kind=kind)
    directory = save(model, tmp_path / "model")
    results = rank_programs.run("train_pretrained", ranks, tmp_path, directories=[directory], dtype=dtype)
    loaded = type(model).from_pretrained(directory, dtype=dtype).train()
    expected = rank_runs.Run(loaded, ranks, range(ranks)).go(2).result()
    for result in results:
        assert "error" not in result, result
        assert bit_equality.difference(result["norms"], expected["norms"]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None
    nbytes, compared = bytes_in(directory)
    assert sum(result["bytes_read"] for result in results) == nbytes + ranks * compared
    if kind == "llama":  # Tensors of a block are rank 0's, as all of the T5's are.
        assert max(result["bytes_read"] for result in results) < 0.6 * nbytes


def test_tensors_that_are_merged_and_a_resume(tmp_path: Path) -> None:
    directory = save(rank_runs.build(kind="mixtral"), tmp_path / "model")
    first = rank_programs.run("train_pretrained", 2, tmp_path, directories=[directory], steps=1)
    assert ["error" in result for result in first] == [False, False], first
    expected = rank_programs.in_one_process(2, kind="mixtral")
    for result in rank_programs.run("resume", 2, tmp_path, "again", steps=2, described=True):
        assert "error" not in result, result
        assert bit_equality.difference(result["norms"], expected["norms"][1:]) is None
        assert bit_equality.difference(result["weights"], expected["weights"]) is None


def test_directories_of_other_weights_are_refused(tmp_path: Path) -> None:
    directories = [save(rank_runs.build(kind="t5", seed=seed), tmp_path / str(seed)) for seed in range(2)]
    for result in rank_programs.run("train_pretrained", 2, tmp_path, directories=directories):
        assert result["error"].startswith("CheckpointError: rank 1 has other weights in its ")
