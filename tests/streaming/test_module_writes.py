"""Weights that a module writes to in its forward: changed weights are kept or refused, others are not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_cuda
import pytest
import tiny_models
import torch
from simulated_device import Accesses
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3


class Clamping(nn.Module):
    """A layer that clamps its weight in each forward, as some users' layers do, whether that changes any or not."""

    def __init__(self, width: int, most: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-self.most, self.most)
        return x + torch.tanh(self.linear(x))


class Clamped(nn.Module):
    def __init__(self, most: float) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)  # trained, so that the backward pass goes through the frozen layers
        self.layers = nn.ModuleList(Clamping(64, most) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def clamped(most: float) -> Clamped:
    torch.manual_seed(0)
    model = Clamped(most)
    model.layers.requires_grad_(False)
    return model


def steps_of(model: nn.Module) -> list[torch.Tensor]:
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("most", [10.0, 0.05], ids=["nothing", "something"])
def test_what_a_module_writes_is_judged_by_its_values(
    offloaded: Callable[..., nn.Module], most: float, recompute: bool, checksums: bool
) -> None:
    expected = clamped(most)
    losses = steps_of(expected)
    options = {"recompute": recompute, "checksums": checksums, "durability": "none"}
    model = offloaded(clamped(most), host_memory=tiny_models.smallest_budget(clamped(most)), **options)
    if recompute and (most < 1 or not checksums):
        # The layer cannot be computed again, or that cannot be known.
        with pytest.raises(memascend.MemascendError, match=r"has written to its own weights.*recompute=False"):
            steps_of(model)
        return
    assert all(torch.equal(one, other) for one, other in zip(steps_of(model), losses, strict=True))
    ours = dict(memascend.parameters_of(model))
    tiny_models.assert_same_weights(
        {name: value.clone() for name, value in ours.items()}, dict(expected.named_parameters())
    )


def written(model: nn.Module) -> int:
    return memascend.stats(model)["ssd_bytes_written"]


def test_a_frozen_layer_whose_write_changes_nothing_is_not_written(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(clamped(10.0), host_memory=tiny_models.smallest_budget(clamped(10.0)), durability="none")
    x = torch.ones(4, 64)
    before = written(model)
    model(x).backward()
    assert written(model) == before


@pytest.mark.parametrize("most", [10.0, 0.05], ids=["nothing", "something"])
def test_on_a_device(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, most: float) -> None:
    expected = clamped(most)
    losses = steps_of(expected)
    model = on_device(clamped(most), recompute=False, durability="none")
    before = written(model)
    with Accesses(fake):
        ours = steps_of(model)
    assert all(torch.equal(one, other) for one, other in zip(ours, losses, strict=True))
    assert (written(model) > before) == (most < 1)
    found = {name: value.clone() for name, value in memascend.parameters_of(model)}
    tiny_models.assert_same_weights(found, dict(expected.named_parameters()))


def test_other_memory_for_a_weight_in_memory_is_refused(offloaded: Callable[..., nn.Module]) -> None:
    class Swapping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.set_(self.weight * 2)
            return super().forward(x)

    model = offloaded(nn.Sequential(Swapping(64, 64), nn.Linear(64, 8)))
    with pytest.raises(memascend.MemascendError, match=r"0\.weight is on SSD: set_ would change its memory"):
        model(torch.ones(2, 64))
