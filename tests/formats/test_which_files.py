"""Which files of a directory are read, and in which dtype: those that transformers' `from_pretrained` takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

WEIGHTS = "model.safetensors"


def make(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**tiny_models.SMALLEST_DECODER))


@pytest.fixture
def assert_same(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Assert that a directory gives the weights and the dtype that transformers reads from it."""

    def compare(directory: Path, **options: Any) -> None:
        theirs: Any = LlamaForCausalLM.from_pretrained(directory, **{"dtype": torch.float32} | options)
        ours: nn.Module = memascend.from_pretrained(
            directory,
            **{"dtype": "float32"} | options,
            store=tmp_path / "store",
            host_memory="64MiB",
            allocator="pageable",
            keep_store=False,
        )
        try:
            tiny_models.assert_same_weights(dict(memascend.parameters_of(ours)), dict(memascend.parameters_of(theirs)))
        finally:
            memascend.close(ours)

    yield compare


def test_a_whole_file_before_an_index_that_was_left(tmp_path: Path, assert_same: Callable[..., None]) -> None:
    make(0).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    make(1).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    assert_same(tmp_path / "model")


def test_a_whole_file_before_shards(tmp_path: Path, assert_same: Callable[..., None]) -> None:
    make(0).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    make(1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / WEIGHTS).rename(tmp_path / "model" / WEIGHTS)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert_same(tmp_path / "model")


def test_tensors_of_a_shard_that_the_index_does_not_name(tmp_path: Path, assert_same: Callable[..., None]) -> None:
    make(0).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(described))
    assert_same(tmp_path / "model")


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_a_variant_and_a_subfolder(tmp_path: Path, assert_same: Callable[..., None], shard: str) -> None:
    folder = tmp_path / "model" / "inner"
    make(0).save_pretrained(folder)
    make(1).save_pretrained(folder, variant="fp16", max_shard_size=shard)
    assert_same(tmp_path / "model", subfolder="inner")
    assert_same(tmp_path / "model", subfolder="inner", variant="fp16")
    with pytest.raises(memascend.CheckpointError, match=r"no model\.bf16\.safetensors and no "):
        assert_ours(folder, tmp_path / "store", variant="bf16")


def assert_ours(directory: Path, store: Path, **options: Any) -> None:
    memascend.from_pretrained(directory, store=store, host_memory="64MiB", **options)


def test_a_file_that_the_configuration_names(tmp_path: Path, assert_same: Callable[..., None]) -> None:
    folder = tmp_path / "model"
    make(0).save_pretrained(folder)
    save_file(make(1).state_dict(), folder / "named.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "named.safetensors"}))
    assert_same(folder)
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../other.safetensors"}))
    with pytest.raises(memascend.CheckpointError, match="is no file of the directory"):
        assert_ours(folder, tmp_path / "store")


@pytest.mark.parametrize("named", [None, "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_dtype_auto(tmp_path: Path, assert_same: Callable[..., None], named: str | None, stored: torch.dtype) -> None:
    folder = tmp_path / "model"
    make(0).to(stored).save_pretrained(folder)
    # One tensor of another dtype, which is not the first: transformers goes by the first.
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | ({} if named is None else {"dtype": named})))
    assert_same(folder, dtype="auto")
