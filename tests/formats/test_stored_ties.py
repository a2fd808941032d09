"""Checkpoints with both tensors that their configuration ties: trained, resumed and written as transformers does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM, T5ForConditionalGeneration

import memascend
from memascend.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

WEIGHTS = "model.safetensors"
DECODER = tiny_models.SMALL_DECODER | {"vocab_size": tiny_models.VOCABULARY, "tie_word_embeddings": True}


def directory_of(tmp_path: Path, kind: str, *, differing: bool = True) -> tuple[Path, str]:
    """Write a checkpoint that holds a head and the embedding that it is tied to; returns it and the head's name."""
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(tiny_models.LlamaConfig(**DECODER))
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    elif kind == "t5":
        model, head, embedding = tiny_models.build("t5", torch.float32), "lm_head.weight", "shared.weight"
    else:
        config = BertConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        model = BertForMaskedLM(config)
        head, embedding = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
    directory = tmp_path / kind
    model.save_pretrained(directory)
    tensors = load_file(directory / WEIGHTS)
    tensors[head] = torch.randn_like(tensors[embedding]) * 0.05 if differing else tensors[embedding].clone()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    if kind == "t5":  # as Flan-T5's are published
        config_file = directory / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": False}))
    return directory, head


def by_transformers(kind: str, directory: Path) -> nn.Module:
    cls: Any = {"llama": LlamaForCausalLM, "t5": T5ForConditionalGeneration, "bert": BertForMaskedLM}[kind]
    return cls.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    def open_model(directory: Path, **options: Any) -> nn.Module:
        defaults: dict[str, Any] = {"store": tmp_path / "store", "host_memory": "256MiB", "allocator": "pageable"}
        model = memascend.from_pretrained(directory, dtype="float32", **defaults | options)
        request.addfinalizer(lambda: memascend.close(model))
        return model

    return open_model


@pytest.mark.core
@pytest.mark.parametrize("kind", ["llama", "t5", "bert"])
def test_values_of_their_own_are_trained(
    tmp_path: Path, opened: Callable[..., nn.Module], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, head = directory_of(tmp_path, kind)
    model, twin = opened(directory), by_transformers(kind, directory).train()
    assert [record for record in caplog.records if record.name == "memascend" and head in record.getMessage()]
    inputs = tiny_models.batch("t5" if kind == "t5" else "llama", 0)
    inputs = {name: value % 96 for name, value in inputs.items()}
    for one in (model.eval(), twin.eval()):  # BERT has dropout
        optimizer = memascend.AdamW(one.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            loss = one(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        one.losses = losses
    assert [loss.item() for loss in model.losses] == [loss.item() for loss in twin.losses]
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(memascend.parameters_of(twin)))
    assert head in dict(memascend.parameters_of(model))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_run_is_resumed_and_exported_without_a_model(
    tmp_path: Path, opened: Callable[..., nn.Module], kind: str
) -> None:
    directory, head = directory_of(tmp_path, kind)
    model = opened(directory, keep_store=True)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    tiny_models.step(model, optimizer, kind, 0)
    expected = dict(memascend.parameters_of(model))
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", host_memory="256MiB", allocator="pageable", keep_store=True)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(resumed.model)), expected)
    memascend.close(resumed.model)
    assert main(["export", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) in (0, None)
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(written[head], expected[head])
    loaded = by_transformers(kind, tmp_path / "out")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(loaded)), expected)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_equal_values_stay_tied(
    tmp_path: Path, opened: Callable[..., nn.Module], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, head = directory_of(tmp_path, kind, differing=False)
    model = opened(directory)
    assert head not in dict(model.named_parameters())
    assert not [record for record in caplog.records if head in record.getMessage()]
    twin = by_transformers(kind, directory).train()
    tiny_models.assert_same(tiny_models.train(model, kind), tiny_models.train(twin, kind))


def test_a_plan_is_of_the_model_that_is_stored(tmp_path: Path) -> None:
    from memascend.forecast.forecast import forecast

    parameters = {}
    for name, differing in (("own", True), ("tied", False)):
        directory, _ = directory_of(tmp_path / name, "llama", differing=differing)
        parameters[name] = forecast(directory, budget=1 << 28, seq_len=16, batch_size=1)["model"]["parameters"]
    table = DECODER["vocab_size"] * DECODER["hidden_size"]
    assert parameters["own"] - parameters["tied"] == table
