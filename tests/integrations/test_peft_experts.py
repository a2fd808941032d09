"""PEFT's adapters on fused experts of a frozen model: the bits of memory, and nothing of the base is written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memascend

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT 0.21 looks for the fused experts' ranks among modules.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match:RuntimeWarning"),
]
STEPS = 3


def adapt(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(5)
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**config | options))


def build(architecture: str) -> nn.Module:
    torch.manual_seed(0)
    return tiny_models.build(architecture).requires_grad_(False).train()


def on_experts(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and "experts" in name]


def trained(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train with two micro-batches a step, whose forwards come before either's backward pass."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = memascend.AdamW(parameters.values(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        pair = [model(**tiny_models.batch("mixtral", 2 * step + number)).loss for number in range(2)]
        (pair[0] + pair[1]).backward()
        losses += [loss.detach().clone() for loss in pair]
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in parameters.items()}


def written(model: nn.Module) -> int:
    return memascend.stats(model)["ssd_bytes_written"]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_frozen_base_with_experts_is_only_read(
    offloaded: Callable[..., nn.Module], architecture: str, recompute: bool
) -> None:
    expected = trained(adapt(build(architecture)))
    base = build(architecture)
    budget = tiny_models.smallest_budget(base)
    model = adapt(offloaded(base, recompute=recompute, host_memory=budget))
    assert on_experts(model)
    before = written(model)
    losses, adapters = trained(model)
    assert written(model) == before
    assert all(torch.equal(one, other) for one, other in zip(losses, expected[0], strict=True))
    tiny_models.assert_same_weights(adapters, expected[1])


def directory(tmp_path: Path) -> Path:
    """Return a checkpoint as it is published, each expert by itself, with the tokenizer of other tests' models."""
    path = tiny_models.llama_directory(tmp_path, hidden=64, layers=2)
    config = json.loads((path / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=config["vocab_size"],
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=config["max_position_embeddings"],
        )
    )
    for file in path.glob("*.safetensors"):
        file.unlink()
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_the_command_line_trains_adapters_on_experts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from commands import in_memory, words_of

    from memascend.cli import main

    model_dir = directory(tmp_path)
    changed = {"lora_rank": 4, "steps": 4, "lr": 1e-2, "dtype": "bfloat16"}
    words = words_of(model_dir, tmp_path / "out", tmp_path / "store", **changed)
    assert main.main(words) == 0, capfd.readouterr().err
    memory = in_memory(words_of(model_dir, tmp_path / "mem", tmp_path / "store", **changed))
    assert main.main(memory) == 0, capfd.readouterr().err
    runs = []
    for out in (tmp_path / "out", tmp_path / "mem"):
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        runs.append(
            ([r["loss"] for r in records if r["record"] == "step"], load_file(out / "adapter_model.safetensors"))
        )
        if out.name == "out":
            steps = [record for record in records if record["record"] == "step"]
            assert [record["ssd_bytes_written"] for record in steps] == [0] * 4
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) == 4
    tiny_models.assert_same_weights(runs[0][1], runs[1][1])
    assert any("experts" in name for name in runs[0][1])


def test_memory_of_adapters_is_that_of_all_that_are_trained() -> None:
    from memascend.cli import adapters
    from memascend.cli.lora import Adapters

    for architecture in ("qwen3_moe", "llama"):
        with torch.device("meta"):
            empty = tiny_models.BUILDERS[architecture]()
        forecast = adapters.memory_bytes(empty, Adapters(rank=4))
        assert all(parameter.requires_grad for parameter in empty.parameters())
        model = adapters._adapted(build(architecture), Adapters(rank=4))
        assert forecast == sum(p.numel() for p in model.parameters() if p.requires_grad) * 16
        assert bool(on_experts(model)) == (architecture == "qwen3_moe")


def test_experts_that_peft_does_not_know_are_named() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    from memascend.cli import adapters
    from memascend.cli.lora import Adapters

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = adapters._adapted(GptOssForCausalLM(GptOssConfig(**sizes, **heads)), Adapters(rank=4))
    names = [
        f"base_model.model.model.layers.{layer}.mlp.experts.{name}_proj"
        for layer in (0, 1)
        for name in ("gate_up", "down")
    ]
    assert sorted(adapters.experts_without(model)) == sorted(names)
    for architecture in ("qwen3_moe", "mixtral", "llama"):
        assert adapters.experts_without(adapters._adapted(build(architecture), Adapters(rank=4))) == []
