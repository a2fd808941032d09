"""An offloaded model computes the bits of the same model in memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


def freeze(model: nn.Module, which: str | None) -> None:
    """Stop training some parameters."""
    frozen: Callable[[str], bool] = {
        None: lambda name: False,
        "embedding": lambda name: "embed" in name or name.startswith("shared"),
        "layers": lambda name: "layers.0." in name or "layers.1." in name,
        "small": lambda name: "norm" in name or name.endswith("bias"),
        "all but the head": lambda name: "head" not in name,
        "all but norms": lambda name: "norm" not in name,
    }[which]
    hit = 0
    for name, parameter in model.named_parameters():
        if frozen(name):
            parameter.requires_grad_(False)
            hit += 1
    assert (hit > 0) == (which is not None)


@cache
def reference(
    architecture: str,
    dtype: torch.dtype = torch.bfloat16,
    frozen: str | None = None,
    checkpointing: bool = False,
    **options: Any,
) -> tiny_models.Trace:
    """Train in memory; the same settings are trained once for all tests."""
    model = tiny_models.build(architecture, dtype)
    freeze(model, frozen)
    if checkpointing:
        tiny_models.enable_checkpointing(model)
    return tiny_models.train(model, architecture, **options)


def check(
    offloaded: Callable[..., nn.Module],
    architecture: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    frozen: str | None = None,
    checkpointing: bool = False,
    where: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Train offloaded and compare; returns the model, still open."""
    expected = reference(architecture, dtype, frozen, checkpointing, **options)
    start = dict(tiny_models.build(architecture, dtype).named_parameters())
    moved = sum(not torch.equal(start[name], value) for name, value in expected.weights.items())
    assert moved > 0, "the reference did not train, so it proves nothing"
    model = tiny_models.build(architecture, dtype)
    freeze(model, frozen)
    if checkpointing:
        tiny_models.enable_checkpointing(model)
    offloaded(model, **where or {})
    tiny_models.assert_same(tiny_models.train(model, architecture, **options), expected)
    return model


@pytest.mark.core
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_every_architecture(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    check(offloaded, architecture, generate=architecture != "plain")


@pytest.mark.parametrize("architecture", ["gemma", "t5_dropout", "mixtral"])
def test_activations_saved(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    check(offloaded, architecture, where={"recompute": False})


@pytest.mark.parametrize("tight", [False, True], ids=["in spare memory", "on SSD"])
def test_activations_put_aside(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, tight: bool
) -> None:
    # Inputs of every layer, however small: the encoder's output too, once for all decoder layers.
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    budget = tiny_models.smallest_budget(tiny_models.build("t5_dropout")) if tight else "256MiB"
    check(offloaded, "t5_dropout", where={"host_memory": budget})


def test_activations_go_to_the_ssd_only_when_memory_is_short(
    offloaded: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)

    def deep() -> nn.Module:
        config = LlamaConfig(
            **tiny_models.SMALL_DECODER | {"num_hidden_layers": 12}
        )  # more inputs than staging has buffers
        return LlamaForCausalLM(config).bfloat16()

    written = {}
    for budget in (tiny_models.smallest_budget(deep()), "256MiB"):
        model = deep()
        offloaded(model, store=tmp_path / str(budget), host_memory=budget)
        memascend.flush(model)
        before = memascend.stats(model)["ssd_bytes_written"]
        tokens = torch.arange(32).view(2, 16)
        loss = model(input_ids=tokens, labels=tokens).loss
        written[budget] = memascend.stats(model)["ssd_bytes_written"] - before
        loss.backward()
    tight, ample = written.values()
    assert tight > 0
    assert ample == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5_dropout", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [True, False])
def test_gradient_checkpointing_enabled(
    offloaded: Callable[..., nn.Module], architecture: str, recompute: bool
) -> None:
    check(offloaded, architecture, checkpointing=True, where={"recompute": recompute})


def test_checkpointing_changes_nothing_in_memory_either() -> None:
    tiny_models.assert_same(reference("llama", checkpointing=True), reference("llama"))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "plain"])
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("tight", [False, True], ids=["ample", "tight"])
def test_accumulation(
    offloaded: Callable[..., nn.Module], architecture: str, max_norm: float | None, tight: bool
) -> None:
    budget = tiny_models.smallest_budget(tiny_models.build(architecture)) if tight else "256MiB"
    check(offloaded, architecture, accumulate=4, steps=2, max_norm=max_norm, where={"host_memory": budget})


def test_the_clip_limit_matters() -> None:
    # Otherwise the comparisons above could not see a lost clip scale.
    clipped, unclipped = reference("llama", max_norm=0.5), reference("llama", max_norm=None)
    assert clipped.norms[0] > 0.5
    assert any(not torch.equal(clipped.weights[name], unclipped.weights[name]) for name in clipped.weights)


def test_no_clipping(offloaded: Callable[..., nn.Module]) -> None:
    check(offloaded, "qwen2", max_norm=None)


@pytest.mark.parametrize(
    ("architecture", "frozen"),
    [
        ("llama", "embedding"),
        ("gemma", "embedding"),
        ("t5", "embedding"),
        ("llama", "layers"),
        ("plain", "layers"),
        ("qwen2", "small"),
        ("plain", "small"),
        ("llama", "all but the head"),
        ("qwen3", "all but norms"),
    ],
)
def test_frozen_parameters(offloaded: Callable[..., nn.Module], architecture: str, frozen: str) -> None:
    check(offloaded, architecture, frozen=frozen)


def test_frozen_parameters_cost_nothing(offloaded: Callable[..., nn.Module]) -> None:
    model = tiny_models.build("llama")
    freeze(model, "layers")
    offloaded(model, durability="none")
    before = memascend.stats(model)["store_bytes_used"]
    memascend.AdamW([p for p in model.parameters() if p.requires_grad])
    grown = memascend.stats(model)["store_bytes_used"] - before
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Two fp32 moments, the low half, the gradient; a page of rounding for each of the 40 tensors at most.
    assert 12 * trained <= grown <= 12 * trained + 40 * 4 * 4096


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5", "plain", "mixtral"])
def test_fp32(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    check(offloaded, architecture, dtype=torch.float32)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_the_smallest_budget(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    budget = tiny_models.smallest_budget(tiny_models.build(architecture))
    model = check(offloaded, architecture, where={"host_memory": budget}, generate=architecture != "plain")
    stats = memascend.stats(model)
    assert stats["host_bytes_reserved"] <= budget
    assert stats["host_bytes_peak"] <= budget


def spilled_bytes(offloaded: Callable[..., nn.Module], store: Path, dtype: torch.dtype, tight: bool) -> int:
    model = tiny_models.build("llama", dtype)
    budget = tiny_models.smallest_budget(model) if tight else "256MiB"
    offloaded(model, store=store, host_memory=budget)
    memascend.AdamW(model.parameters())
    before = memascend.stats(model)["ssd_bytes_written"]
    model(**tiny_models.batch("llama", 0)).loss.backward()
    written = memascend.stats(model)["ssd_bytes_written"] - before
    return written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_spill_only_when_the_budget_is_tight(
    offloaded: Callable[..., nn.Module], tmp_path: Path, dtype: torch.dtype
) -> None:
    tight = spilled_bytes(offloaded, tmp_path / "tight", dtype, tight=True)
    ample = spilled_bytes(offloaded, tmp_path / "ample", dtype, tight=False)
    assert ample == 0, "an ample budget keeps every gradient in memory"
    assert tight > 2048 * 256 * dtype.itemsize, "more than one tensor's gradient went to the SSD, in several chunks"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_spilled_gradients(offloaded: Callable[..., nn.Module], dtype: torch.dtype, accumulate: int) -> None:
    budget = tiny_models.smallest_budget(tiny_models.build("llama", dtype))
    check(
        offloaded,
        "llama",
        dtype=dtype,
        accumulate=accumulate,
        steps=2,
        max_norm=0.5,
        where={"host_memory": budget, "recompute": False},
    )


@pytest.mark.core
@pytest.mark.parametrize("engine", ["ring", "threads"])
@pytest.mark.parametrize("volumes", [1, 2, 3])
def test_engines_and_volumes(offloaded: Callable[..., nn.Module], tmp_path: Path, engine: str, volumes: int) -> None:
    stores = [tmp_path / f"volume{index}" for index in range(volumes)]
    budget = tiny_models.smallest_budget(tiny_models.build("llama"))
    where = {"store": stores, "engine": engine, "host_memory": budget}
    try:
        model = check(offloaded, "llama", where=where)
    except memascend.StoreError as error:
        if engine == "ring" and "io_uring" in str(error):
            pytest.skip(f"io_uring is refused here: {error}")
        raise
    assert memascend.stats(model)["engine"] == engine
    sizes = [sum(file.stat().st_size for file in store.iterdir()) for store in stores]
    assert max(sizes) - min(sizes) <= 2 << 20, "the stripes are spread evenly"


@pytest.mark.parametrize("compute_threads", [1, 3])
def test_threads_of_the_update(offloaded: Callable[..., nn.Module], compute_threads: int) -> None:
    check(offloaded, "llama", where={"compute_threads": compute_threads})


def test_buffered_io(offloaded: Callable[..., nn.Module]) -> None:
    model = check(offloaded, "llama", where={"direct": False})
    assert memascend.stats(model)["direct_io"] is False


@pytest.mark.core
@pytest.mark.parametrize("tight", [False, True])
def test_many_evaluations_between_steps(offloaded: Callable[..., nn.Module], tight: bool) -> None:
    # A pass in the other mode between backward and step, and between two backward passes of one step.
    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for step in range(3):
            for micro in range(2):
                seen.append(tiny_models.logits(model, "qwen3"))
                loss = model(**tiny_models.batch("qwen3", 2 * step + micro)).loss
                seen.append(tiny_models.logits(model, "qwen3"))
                loss.backward()
                seen.append(tiny_models.generated(model, "qwen3"))
            optimizer.clip_grad_norm_(1.0)
            seen.append(tiny_models.logits(model, "qwen3"))
            optimizer.step()
            optimizer.zero_grad()
        weights = dict(memascend.parameters_of(model))
        seen.extend(weights[name] for name in sorted(weights))
        return seen

    expected = run(tiny_models.build("qwen3"))
    model = tiny_models.build("qwen3")
    budget = tiny_models.smallest_budget(model) if tight else "256MiB"
    offloaded(model, host_memory=budget)
    actual = run(model)
    assert len(actual) == len(expected) > 20
    differing = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if not torch.equal(*pair)]
    assert not differing


def test_two_losses_of_one_step(offloaded: Callable[..., nn.Module]) -> None:
    # Two forward passes before one backward pass: both graphs need their weights, in the order of the second.
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            one = model(**tiny_models.batch("mistral", 2 * step)).loss
            other = model(**tiny_models.batch("mistral", 2 * step + 1)).loss
            (one + 0.5 * other).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = run(tiny_models.build("mistral"))
    for recompute in (True, False):
        model = offloaded(tiny_models.build("mistral"), recompute=recompute)
        tiny_models.assert_same_weights(run(model), expected)
        memascend.close(model)
