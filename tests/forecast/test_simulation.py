"""What PyTorch holds in a step, from a run without memory, is what the allocator counts in a real step."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from memascend.forecast.simulation import StepBytes, simulate_step
from memascend.forecast.traffic import Work
from memascend.layout import tables
from memascend.vocabulary.fused import fuse_loss

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 4}
WIDTHS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
MOE = WIDTHS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 200}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDTHS,
    "gemma2": WIDTHS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "qwen3_moe": MOE,
    "gpt2": {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8},
}


def config_of(name: str) -> Any:
    return AutoConfig.for_model(name, **CONFIGS[name])


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Give the list of what the CPU's allocator is asked for, and gets back, in order."""
    found: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    found += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def measure(config: Any, dtype: torch.dtype, work: Work) -> StepBytes:
    """Run a step in memory, where gradients are dropped as they come."""
    torch.manual_seed(0)
    model = fuse_loss(AutoModelForCausalLM.from_config(config, dtype=dtype)).train()
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, config.vocab_size, (work.batch_size, work.seq_len))

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    with allocations() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with allocations() as backward:
        loss.backward()
    kept = sum(forward)
    return StepBytes(max(accumulate(forward)), kept + max(accumulate(backward)))


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_a_step_in_memory_allocates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, work = config_of(name), Work(256, 3, 1, recompute=False)
    measured = measure(config, torch.float32, work)
    found = simulate_step(config, Path(), torch.float32, work, in_memory=False)
    assert found is not None
    assert found.forward == pytest.approx(measured.forward, rel=0.03)
    assert found.backward == pytest.approx(measured.backward, rel=0.03)
