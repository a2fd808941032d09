"""PyTorch's memory in a step, by a run without memory, equals the allocator's count in a real step."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memascend.forecast import simulation
from memascend.forecast.simulation import StepBytes, simulate_step
from memascend.forecast.workload import Workload
from memascend.layout import tables
from memascend.memory_plan.lines import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

# Allocations of PyTorch's products are counted.
pytestmark = pytest.mark.own_products
WIDTHS = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 4}
WIDTHS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
MOE = WIDTHS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 200}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": WIDTHS,
    "gemma2": WIDTHS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "qwen3_moe": MOE,
    # Values are narrower than keys, which the fused attention does not take.
    "deepseek_v3": WIDTHS
    | {"head_dim": 16, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    | {"v_head_dim": 24, "first_k_dense_replace": 4, "num_key_value_heads": 8},
    "gpt2": {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8},
}


def config_of(name: str) -> Any:
    return AutoConfig.for_model(name, **CONFIGS[name])


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Give the list of allocations and frees of the CPU's allocator, in order."""
    found: list[int] = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        yield found
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    found += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@pytest.fixture(autouse=True)
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers be computed again: activations for which a plan leaves room are counted apart."""
    monkeypatch.setattr(Plan, "activations_bytes", 0)


def measure(model: nn.Module, work: Workload) -> StepBytes:
    """Run a step, and return the most that lives at once in each pass."""
    ids = torch.randint(0, model.config.vocab_size, (work.batch_size, work.seq_len))
    with allocations() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with allocations() as backward:
        loss.backward()
    return StepBytes(max(accumulate(forward)), sum(forward) + max(accumulate(backward)))


def drop(parameter: torch.Tensor) -> None:
    """Drop a gradient."""
    parameter.grad = None


def assert_near(found: StepBytes | None, measured: StepBytes, near: float = 0.03) -> None:
    assert found is not None
    assert found.forward == pytest.approx(measured.forward, rel=near)
    assert found.backward == pytest.approx(measured.backward, rel=near)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_a_step_in_memory_allocates(name: str) -> None:
    config, work = config_of(name), Workload(256, 3, 1, recompute=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    measured = measure(model, work)
    assert_near(simulate_step(config, Path(), torch.float32, work, in_memory=False), measured)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_an_offloaded_model_allocates(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, offloaded: Callable[..., nn.Module]
) -> None:
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 1 << 20)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1 << 18)
    config, work = config_of(name), Workload(256, 3, 1)
    torch.manual_seed(0)
    model = offloaded(AutoModelForCausalLM.from_config(config, dtype=dtype).train())
    assert any(unit.is_table for unit in model._memascend.units)
    # Products of bfloat16, and attention that is not fused, take some memory of their own, which shows where tensors
    # are as small as here.
    near = 0.1 if dtype == torch.bfloat16 or name == "deepseek_v3" else 0.03
    if dtype == torch.bfloat16 and "amx_bf16" in Path("/proc/cpuinfo").read_text():
        near = 0.2  # Products by AMX lay their matrices out anew: 0.15 was seen.
    assert_near(simulate_step(config, Path(), dtype, work, in_memory=False), measure(model, work), near)


@pytest.mark.usefixtures("small_experts_in_pieces")
def test_gradients_of_experts_that_are_made_one_by_one(offloaded: Callable[..., nn.Module]) -> None:
    config = AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"] | {"vocab_size": 64, "num_experts": 32})
    work = Workload(64, 1, 1, experts="pieces")
    torch.manual_seed(0)
    model = offloaded(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(), experts="pieces")
    found = simulate_step(config, Path(), torch.float32, work, in_memory=False)
    assert_near(found, measure(model, work), 0.15)  # Experts get unequal shares.
    whole = simulate_step(config, Path(), torch.float32, Workload(64, 1, 1), in_memory=False)
    assert found is not None and whole is not None and found.backward < 0.3 * whole.backward


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_layers_on_slices_hold_the_activations_of_one(name: str, offloaded: Callable[..., nn.Module]) -> None:
    config = AutoConfig.for_model(name, **CONFIGS[name] | {"vocab_size": 256})  # without a loss that takes more
    work = Workload(256, 6, 1, micro_batch_size=2)
    torch.manual_seed(0)
    model = offloaded(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(), micro_batch_size=2)
    measure(model, work)  # with the trial
    model.zero_grad()
    found = simulate_step(config, Path(), torch.float32, work, in_memory=False)
    assert_near(found, measure(model, work))
    whole = simulate_step(config, Path(), torch.float32, Workload(256, 6, 1), in_memory=False)
    assert found is not None and whole is not None and found.backward < 0.8 * whole.backward


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_tiles_hold_the_intermediate_tensors_of_one(name: str, offloaded: Callable[..., nn.Module]) -> None:
    config = AutoConfig.for_model(name, **CONFIGS[name] | {"vocab_size": 64})  # without a loss that takes more
    work = Workload(1024, 1, 1, tile_tokens=128)
    torch.manual_seed(0)
    model = offloaded(AutoModelForCausalLM.from_config(config, dtype=torch.float32).train(), tile_tokens=128)
    measure(model, work)  # with the trials
    model.zero_grad()
    found = simulate_step(config, Path(), torch.float32, work, in_memory=False)
    assert_near(found, measure(model, work))
    whole = simulate_step(config, Path(), torch.float32, Workload(1024, 1, 1), in_memory=False)
    assert found is not None and whole is not None and found.backward < 0.7 * whole.backward


def test_more_sequences_than_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama")
    whole = simulate_step(config, Path(), torch.float32, Workload(64, 64, 1), in_memory=False)
    assert whole is not None
    monkeypatch.setattr(simulation, "TOKENS_MAX", 64 * 16)
    assert_near(simulate_step(config, Path(), torch.float32, Workload(64, 64, 1), in_memory=False), whole)


def test_layers_that_differ_are_all_run() -> None:
    """A layer with experts is larger than one without; two dense ones come first."""
    widths = MOE | {"intermediate_size": 100, "vocab_size": 64}
    with_experts, without = (
        simulate_step(
            AutoConfig.for_model("qwen3_moe", **widths, mlp_only_layers=dense),
            Path(),
            torch.float32,
            Workload(256, 3, 1),
            in_memory=False,
        )
        for dense in ([0, 1], [0, 1, 2, 3])
    )
    assert with_experts is not None and without is not None
    assert with_experts.backward > without.backward


def test_a_model_whose_code_needs_values_is_not_known() -> None:
    config = config_of("llama")
    model_class = type(AutoModelForCausalLM.from_config(config))
    with mock.patch.object(model_class, "forward", lambda *_, input_ids, **__: input_ids.numpy()):
        assert simulate_step(config, Path(), torch.float32, Workload(64, 1, 1), in_memory=False) is None
