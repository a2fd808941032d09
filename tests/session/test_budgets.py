"""Budgets, arguments, and one buffer for all layers by turns."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable


# ---- budget and arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_a_budget_too_small_says_the_smallest(store: Path, architecture: str) -> None:
    model = tiny_models.build(architecture)
    with pytest.raises(memascend.BudgetError) as caught:
        memascend.offload(model, store=store, host_memory="1MiB", allocator="pageable")
    smallest, text = caught.value.smallest_bytes, str(caught.value)
    assert str(smallest) in text and "1.0 MiB" in text
    assert "weights of" in text, "the message says what asks for it"
    assert not store.exists() and "_memascend" not in model.__dict__
    with pytest.raises(memascend.BudgetError):
        memascend.offload(model, store=store, host_memory=smallest - 1, allocator="pageable")
    memascend.offload(model, store=store, host_memory=smallest, allocator="pageable")
    optimizer = memascend.AdamW(model.parameters())
    tiny_models.step(model, optimizer, architecture, 0)
    stats = memascend.stats(model)
    assert stats["host_bytes_peak"] <= stats["host_bytes_reserved"] <= smallest
    memascend.close(model)


class Towers(nn.Module):
    """Large modules of one size, one after another, none of them repeated: one buffer for all at the least."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1024, bias=False)
        self.second = nn.Linear(1024, 1024, bias=False)
        self.third = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)).tanh()).float().square().mean()


class Tall(nn.Sequential):
    """Many layers of one size, and two buffers for them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


@pytest.mark.parametrize("kind", [Towers, Tall])
@pytest.mark.parametrize("flush", [False, True])
def test_buffers_still_being_written_back_are_waited_for(
    offloaded: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[nn.Module],
    flush: bool,
) -> None:
    # Collecting garbage must not give the drive its time.
    monkeypatch.setattr(gc, "collect", lambda: 0)

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            model(torch.full((2, 1024), 0.1 * (number + 1), dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if flush:
                optimizer.flush()
        return dict(memascend.parameters_of(model))

    def fresh() -> nn.Module:
        torch.manual_seed(4)
        return kind().bfloat16()

    expected = run(fresh())
    model = fresh()
    offloaded(model, host_memory=tiny_models.smallest_budget(model))
    tiny_models.assert_same_weights(run(model), expected)
    memascend.save_pretrained(model, tmp_path / "out")
    tiny_models.assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_parameters_that_cannot_be_trained(store: Path) -> None:
    for model in (nn.Linear(256, 256, device="meta"), nn.Linear(256, 256).double()):
        untouched = copy.copy(model.__dict__)
        with pytest.raises(ValueError, match=r"meta|float64"):
            memascend.offload(model, store=store, host_memory="256MiB", allocator="pageable")
        assert model.__dict__ == untouched
        assert not store.exists()
    for bad in ({"engine": "warp"}, {"allocator": "cloud"}, {"host_memory": "8 parsecs"}, {"host_memory": 0}):
        with pytest.raises(ValueError):
            memascend.offload(
                nn.Linear(256, 256), **{"store": store, "host_memory": "256MiB", "allocator": "pageable"} | bad
            )
        assert not store.exists()


def test_an_undeterministic_forward_is_told(offloaded: Callable[..., nn.Module]) -> None:
    class Fickle(tiny_models.Block):
        calls = itertools.count()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sin() if next(self.calls) % 2 else super().forward(x)

    model = nn.Sequential(Fickle(256), Fickle(256)).bfloat16()
    offloaded(model)
    with pytest.raises(memascend.MemascendError, match="not deterministic"):
        model(torch.ones(1, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


# ---- one buffer for all layers by turns ---------------------------------------------------------------------


def wide(tie: bool = False) -> nn.Module:
    """Return a Llama whose embedding, head and layers are each too large to share a unit."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **tiny_models.SMALL_DECODER
        | {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 128},
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config).bfloat16().train()


def wide_steps(model: nn.Module, **backward: Any) -> list[torch.Tensor]:
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(3):
        tokens = torch.randint(3, 2048, (2, 80), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if backward:
            loss.backward(**backward)
            optimizer.zero_grad()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("options", [{}, {"recompute": False}], ids=["recomputed", "saved"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_units_by_turns_train_like_in_memory(
    offloaded: Callable[..., nn.Module], options: dict[str, Any], tie: bool, twice: bool
) -> None:
    backward = {"retain_graph": True} if twice else {}
    expected = wide_steps(wide(tie), **backward)
    model = wide(tie)
    budget = tiny_models.smallest_budget(model)
    assert budget < tiny_models.overlapping_budget(model)
    offloaded(model, host_memory=budget, **options)
    [line] = [line for line in memascend.offload_of(model).plan.units if line.nbytes > 1 << 20]
    assert line.count == 1
    assert all(torch.equal(a, b) for a, b in zip(wide_steps(model, **backward), expected, strict=True))


def test_an_abandoned_backward_pass_gives_the_only_buffer_back(offloaded: Callable[..., nn.Module]) -> None:
    model = wide()
    offloaded(model, host_memory=tiny_models.smallest_budget(model))
    tokens = torch.arange(160).view(2, 80)

    class Broken(Exception):
        pass

    def fail(_: torch.Tensor) -> None:
        raise Broken

    hook = model.model.layers[1].self_attn.q_proj.weight.register_hook(fail)
    abandoned = model(input_ids=tokens, labels=tokens).loss
    with pytest.raises(Broken):
        abandoned.backward()
    hook.remove()
    # The loss of the failed pass still lives, and with it the recomputed tensors.
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert abandoned.isfinite()


def test_layers_that_share_their_weights_with_the_embedding_have_buffers_of_their_own(
    offloaded: Callable[..., nn.Module],
) -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.inner = nn.Linear(1024, 1024, bias=False)
            self.inner2 = nn.Linear(1024, 1024, bias=False)
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner2(self.inner(x) @ self.shared.t() @ self.shared)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1500, 1024)
            self.layers = nn.ModuleList(Block(self.embedding.weight) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return x.float().square().mean()

    torch.manual_seed(0)
    reference = Net().bfloat16()
    model = copy.deepcopy(reference)
    offloaded(model, host_memory=tiny_models.smallest_budget(model))
    tokens = torch.arange(64)
    for net in (reference, model):
        optimizer = memascend.AdamW(net.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            loss = net(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if net is reference:
            expected = losses
    assert losses == expected


def test_a_layer_that_another_reads_by_turns_is_told_the_budget_that_works(
    offloaded: Callable[..., nn.Module],
) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1024, 1024, bias=False)
            self.second = nn.Linear(1024, 1024, bias=False)
            self.third = nn.Linear(1024, 900, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.third.weight  # in use until the pass ends
            return (self.second(self.first(x)) @ weight.t()).float().square().mean()

    model = Reader().bfloat16()
    enough = tiny_models.overlapping_budget(model)
    offloaded(model, host_memory=tiny_models.smallest_budget(model))
    x = torch.randn(4, 1024).bfloat16()
    with pytest.raises(memascend.MemascendError, match="raise host_memory to") as caught:
        model(x)
    assert memascend.format_size(enough) in str(caught.value)
    memascend.close(model)
    again = Reader().bfloat16()
    offloaded(again, host_memory=enough)
    again(x).backward()


@pytest.mark.parametrize("architecture", ["llama", "plain"])
def test_a_forward_without_a_backward_leaves_nothing(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    model = offloaded(tiny_models.build(architecture))
    model(**tiny_models.batch(architecture, 0))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "Recomputation"]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loop_that_calls_the_models_parts(offloaded: Callable[..., nn.Module], recompute: bool) -> None:
    def train(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        optimizer, losses = memascend.AdamW(model.parameters(), lr=3e-3), []
        for step in range(3):
            inputs = tiny_models.batch("llama", step)["input_ids"]
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            loss = nn.functional.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), inputs.flatten())
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, dict(memascend.parameters_of(model))

    losses, weights = train(tiny_models.build("llama"))
    actual, kept = train(offloaded(tiny_models.build("llama"), recompute=recompute))
    assert all(torch.equal(one, other) for one, other in zip(actual, losses, strict=True))
    tiny_models.assert_same_weights(kept, weights)


def test_a_closed_model_is_used_again_only_by_resume(store: Path) -> None:
    options: dict[str, Any] = {"store": store, "host_memory": "256MiB", "allocator": "pageable"}
    model = memascend.offload(tiny_models.build("plain"), **options, keep_store=True)
    expected = tiny_models.logits(model, "plain")
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="the model was closed"):
        memascend.offload(model, store=store.with_name("other"), host_memory="256MiB")
    with pytest.raises(memascend.MemascendError, match="the model was closed"):
        tiny_models.logits(model, "plain")
    resumed = memascend.resume(store, model=model, host_memory="256MiB", allocator="pageable").model
    assert torch.equal(tiny_models.logits(resumed, "plain"), expected)
    memascend.close(resumed)
