"""Hazards of offloading: one test for each, each failing without that care."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable


# ---- absent parameters --------------------------------------------------------------------------------------


def test_an_absent_parameter_describes_itself(offloaded: Callable[..., nn.Module]) -> None:
    expected = tiny_models.build("gpt2")
    model = offloaded(tiny_models.build("gpt2"))
    optimizer = memascend.AdamW(model.parameters())
    for moment in ("before", "after a step", "with gradients"):
        if moment == "after a step":
            tiny_models.step(model, optimizer, "gpt2", 0)
        if moment == "with gradients":
            model(**tiny_models.batch("gpt2", 1)).loss.backward()
        count = 0
        for (name, parameter), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            count += 1
            assert parameter.shape == other.shape and parameter.dtype == other.dtype, name
            assert parameter.numel() == other.numel() and parameter.device == other.device, name
            assert parameter.requires_grad and parameter.is_leaf and parameter.element_size() == 2
            assert isinstance(parameter, nn.Parameter) and parameter.stride() == other.stride()
            if moment == "with gradients":
                assert parameter.grad is not None and parameter.grad.shape == other.shape
        assert count > 20
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in expected.parameters())


def test_absent_again_after_a_failed_forward(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[99_999]]))
    with pytest.raises(ValueError, match="stop here"):
        hook = model.model.layers[1].mlp.register_forward_hook(_stop)
        model(**tiny_models.batch("llama", 0))
    hook.remove()
    assert not any(cached.users for cached in memascend.offload_of(model).streamer.cached_units.values())
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))


def _stop(*_: Any) -> None:
    raise ValueError("stop here")


# ---- weights used elsewhere ---------------------------------------------------------------------------------


class Fused(nn.Module):
    """Reads weights of other modules in its own forward, as Liger's fused linear cross entropy does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny_models.VOCABULARY, tiny_models.WIDE)
        self.layers = nn.ModuleList(tiny_models.Block(tiny_models.WIDE) for _ in range(3))
        self.head = nn.Linear(tiny_models.WIDE, tiny_models.VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        # A weight of a layer, outside that layer; a weight of the head, twice.
        x = x + nn.functional.linear(x, self.layers[1].mlp[0].weight[: tiny_models.WIDE])
        logits = x @ self.head.weight.t() + 0.01 * self.head.weight.sum()
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return tiny_models.CausalLMOutput(loss=loss, logits=logits)


def fused() -> nn.Module:
    torch.manual_seed(11)
    return Fused().bfloat16()


@pytest.mark.core
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("tight", [True, False])
def test_weights_used_outside_their_module(offloaded: Callable[..., nn.Module], recompute: bool, tight: bool) -> None:
    expected = tiny_models.train(fused(), "llama")
    model = fused()
    budget = tiny_models.smallest_budget(model) if tight else "256MiB"
    tiny_models.assert_same(
        tiny_models.train(offloaded(model, recompute=recompute, host_memory=budget), "llama"), expected
    )


def test_the_head_used_by_the_root_of_a_transformers_model(offloaded: Callable[..., nn.Module]) -> None:
    def patched() -> nn.Module:
        model = tiny_models.build("llama")

        def forward(input_ids: torch.Tensor, labels: torch.Tensor | None = None, use_cache: bool = False) -> Any:
            hidden = model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
            logits = nn.functional.linear(hidden, model.lm_head.weight)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            return tiny_models.CausalLMOutput(loss=loss, logits=logits)

        model.forward = forward
        return model

    expected = tiny_models.train(patched(), "llama")
    tiny_models.assert_same(tiny_models.train(offloaded(patched()), "llama"), expected)


@pytest.mark.parametrize("architecture", ["gemma", "gpt2", "qwen3"])
def test_tied_weights_are_one(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    model = tiny_models.build(architecture)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    offloaded(model, durability="none")
    assert head.weight is embedding.weight
    names = [name for name, _ in memascend.parameters_of(model)]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    before = memascend.stats(model)["store_bytes_used"]
    memascend.AdamW(model.parameters())
    grown = memascend.stats(model)["store_bytes_used"] - before
    assert grown < 12.5 * sum(p.numel() for p in model.parameters()) + 4096 * 4 * 60


def test_tying_across_layers(offloaded: Callable[..., nn.Module]) -> None:
    # One matrix shared by all layers, registered inside each: its gradient is the sum over them.
    def shared() -> nn.Module:
        torch.manual_seed(12)
        model = tiny_models.Plain()
        for layer in model.layers[1:]:
            layer.mlp[0].weight = model.layers[0].mlp[0].weight
        return model.bfloat16()

    expected = tiny_models.train(shared(), "plain", accumulate=2)
    for recompute in (True, False):
        model = offloaded(shared(), recompute=recompute)
        tiny_models.assert_same(tiny_models.train(model, "plain", accumulate=2), expected)
        memascend.close(model)


# ---- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "plain", "mixtral", "gemma"])
def test_saved_views_outlive_the_release(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    # Without recomputation the graph keeps views of every layer's weights, and the buffers are two.
    expected = tiny_models.train(tiny_models.build(architecture), architecture, accumulate=2)
    model = tiny_models.build(architecture)
    offloaded(model, recompute=False, host_memory=tiny_models.smallest_budget(model))
    tiny_models.assert_same(tiny_models.train(model, architecture, accumulate=2), expected)


def test_a_view_kept_by_the_user_keeps_its_values(offloaded: Callable[..., nn.Module]) -> None:
    model = tiny_models.build("llama")
    expected = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    kept = []
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
    offloaded(model, host_memory=tiny_models.overlapping_budget(model))
    with torch.no_grad():
        model(**tiny_models.batch("llama", 0))
        hook.remove()
        try:
            for number in range(3):
                model(**tiny_models.batch("llama", number))
        except memascend.MemascendError as error:
            assert "still alive" in str(error)  # the buffer that the view holds is missing elsewhere
    assert torch.equal(kept[0], expected), "a buffer was reused under a living view"
    kept.clear()
    with torch.no_grad():
        model(**tiny_models.batch("llama", 0))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "plain"])
def test_backward_twice(offloaded: Callable[..., nn.Module], architecture: str, recompute: bool) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            loss = model(**tiny_models.batch(architecture, number)).loss
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = run(tiny_models.build(architecture))
    model = tiny_models.build(architecture)
    offloaded(model, recompute=recompute, host_memory=tiny_models.smallest_budget(model))
    tiny_models.assert_same_weights(run(model), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_losses_kept_across_steps(offloaded: Callable[..., nn.Module], recompute: bool) -> None:
    # A common leak: total += loss. The graphs stay alive, used up or not; the training must not change.
    def run(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        total: Any = 0.0
        kept = []
        for number in range(4):
            kept.append(model(**tiny_models.batch("llama", 50 + number)).loss)  # never backpropagated
            loss = model(**tiny_models.batch("llama", number)).loss
            total = total + loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(total.detach()), dict(memascend.parameters_of(model))

    expected_total, expected = run(tiny_models.build("llama"))
    model = tiny_models.build("llama")
    offloaded(model, recompute=recompute, host_memory=tiny_models.smallest_budget(model))
    total, weights = run(model)
    assert total == expected_total
    tiny_models.assert_same_weights(weights, expected)
