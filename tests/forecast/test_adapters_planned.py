"""The traffic of adapters over frozen weights, forecast and counted in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from traffic import build, saved, settle
from transformers import LlamaConfig

import memascend
from memascend.cli import adapters
from memascend.cli.lora import Adapters
from memascend.forecast.forecast import forecast
from memascend.forecast.traffic import divided
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("spare", [0, 8 << 20])
def test_traffic_of_adapters_is_that_of_a_real_run(spare: int, tmp_path: Path, offloaded: Callable[..., Any]) -> None:
    requirements.package("peft", "peft")
    model = build(SMALL).requires_grad_(False)
    budget = smallest_plan(divided(model)).total + spare
    offloaded(model, host_memory=budget, durability="none")
    adapted = adapters.add_adapters(model, Adapters(rank=4), tmp_path)
    optimizer = memascend.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for step in range(4):
        ids = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(step))
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        settle(memascend.offload_of(model))
        seen.append(memascend.stats(model))
    found = forecast(saved(SMALL, tmp_path / "c"), seq_len=128, batch_size=2, budget=budget, adapters_bytes=1)
    planned = found["ssd_traffic"]["planned"]
    for direction in ("read", "written"):
        name = f"ssd_bytes_{direction}"
        measured = seen[-1][name] - seen[-2][name]
        assert planned[direction]["total_bytes"] == pytest.approx(measured, rel=0.1, abs=1 << 20)
    assert found["host_memory"]["total_bytes"] == memascend.offload_of(model).plan.total
