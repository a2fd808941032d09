"""GradScaler over gradients on SSD: PyTorch's behaviour, and overflowed steps that change nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

OPTIONS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


def train(
    model: nn.Module, scaler: torch.amp.GradScaler, *, overflow_at: tuple[int, ...] = (), clip: float | None = None
) -> tuple[list[torch.Tensor], list[float], memascend.AdamW]:
    """Take steps with scaled losses, and some overflow; return the norms, the scales and the optimizer."""
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    norms, scales = [], []
    for step in range(5):
        loss = model(**tiny_models.batch("llama", step)).loss
        scaler.scale(loss * math.inf if step in overflow_at else loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(optimizer.clip_grad_norm_(clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return norms, scales, optimizer


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_same_bits_as_in_memory_with_pytorchs_own(offloaded: Callable[..., nn.Module], clip: float | None) -> None:
    expected = tiny_models.build("llama")
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    norms, scales, reference = train(expected, scaler, overflow_at=(1, 3), clip=clip)
    model = offloaded(tiny_models.build("llama"))
    ours = memascend.GradScaler(**OPTIONS)
    our_norms, our_scales, optimizer = train(model, ours, overflow_at=(1, 3), clip=clip)
    assert our_scales == scales
    assert scales[1] == scales[0] / 2, "the test overflows"
    assert ours.state_dict() == scaler.state_dict()
    for one, other in zip(our_norms, norms, strict=True):
        # This norm sums squares of scaled gradients; PyTorch unscales before it sums.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)
    if clip is None:
        tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    states, others = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert {int(state["step"]) for state in states.values()} == {3} == {int(state["step"]) for state in others.values()}


def test_an_overflowed_step_moves_no_state(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"), host_memory=tiny_models.smallest_budget(tiny_models.build("llama")))
    scaler = memascend.GradScaler(**OPTIONS)
    _, _, optimizer = train(model, scaler)
    before = optimizer.state_dict()
    weights = {name: value.clone() for name, value in memascend.parameters_of(model)}
    scaler.scale(model(**tiny_models.batch("llama", 9)).loss * math.inf).backward()
    memascend.flush(model)  # gradients may still be on their way
    counted = memascend.stats(model)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    memascend.flush(model)
    after = memascend.stats(model)
    for name in ("ssd_bytes_read", "ssd_bytes_written"):
        assert after[name] == counted[name], f"{name} grew"
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), weights)
    now = optimizer.state_dict()
    for key, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(now["state"][key][name], value), name
    # The next step is an ordinary one.
    scaler.scale(model(**tiny_models.batch("llama", 10)).loss).backward()
    scaler.step(optimizer)
    assert int(optimizer.state_dict()["state"][0]["step"]) == int(before["state"][0]["step"]) + 1


def test_a_gradient_put_there_after_unscaling_is_taken_as_it_is(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module, scaler: torch.amp.GradScaler) -> torch.Tensor:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        scaler.scale(model(**tiny_models.batch("llama", 0)).loss).backward()
        scaler.unscale_(optimizer)
        parameter = next(model.parameters())
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        norm = optimizer.clip_grad_norm_(0.25)
        scaler.step(optimizer)
        return norm

    expected, model = tiny_models.build("llama"), offloaded(tiny_models.build("llama"))
    norm = run(expected, torch.amp.GradScaler("cpu", **OPTIONS))
    torch.testing.assert_close(run(model, memascend.GradScaler(**OPTIONS)), norm, rtol=1e-6, atol=0)
    others = dict(expected.named_parameters())
    for name, value in memascend.parameters_of(model):
        torch.testing.assert_close(value, others[name].detach(), rtol=1e-2, atol=1e-5, msg=name)


def test_ordinary_optimizers_and_parameters_are_pytorchs() -> None:
    model, other = tiny_models.build("plain"), tiny_models.build("plain")
    for trained, scaler in ((model, memascend.GradScaler(**OPTIONS)), (other, torch.amp.GradScaler("cpu", **OPTIONS))):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        scaler.scale(trained(**tiny_models.batch("plain", 0)).loss).backward()
        scaler.step(optimizer)
        scaler.update()
    tiny_models.assert_same_weights(dict(model.named_parameters()), dict(other.named_parameters()))
    scaler = memascend.GradScaler(enabled=False)
    assert not scaler.is_enabled()
    scaler = memascend.GradScaler(**OPTIONS)
    optimizer = memascend.AdamW(model.parameters())
    scaler.scale(model(**tiny_models.batch("plain", 0)).loss).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
