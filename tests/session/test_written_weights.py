"""Weights that programs and modules write to: the same bits as in memory, also after a resume."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from small_net import TOKENS, WIDTH, WRITING, Net, assert_same, loss_of, step
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("name", WRITING)
def test_what_a_program_writes_is_durable(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    expected = Net()
    model = memascend.offload(
        copy.deepcopy(expected), store=tmp_path / "store", host_memory="14.9MiB", durability="step", keep_store=True
    )
    for run in (expected, model):
        optimizer = memascend.AdamW(run.parameters(), lr=1e-2)
        step(run, optimizer, 1)
        WRITING[name](run, optimizer)
        step(run, optimizer, 2)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=Net())
    assert resumed.steps == 2
    assert_same(expected, resumed.model)
    memascend.close(resumed.model)


class Normalised(nn.Module):
    """A layer that normalises its weight in its forward, from a given call on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first, self.calls = first, 0
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.first:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight))
        return states @ self.weight


class Writing(Net):
    """A model whose first layer outside of the blocks writes to its own weight."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.normalised = Normalised(first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.normalised(self.embed(tokens))[..., :TOKENS]


@pytest.mark.parametrize("kind", ["max_norm", "from the first call", "from the third call"])
@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_module_that_writes_to_its_weight(tmp_path: Path, kind: str, durability: str) -> None:
    makers = {
        "max_norm": lambda: Net(max_norm=0.5),
        "from the first call": Writing,
        "from the third call": lambda: Writing(2),
    }
    torch.manual_seed(0)
    expected = makers[kind]()
    model = memascend.offload(
        copy.deepcopy(expected), store=tmp_path / "store", host_memory="16MiB", durability=durability, keep_store=True
    )
    for run in (expected, model):
        optimizer = memascend.AdamW(run.parameters(), lr=1e-2)
        for number in range(5):
            step(run, optimizer, number)
        with torch.no_grad():
            loss_of(run, 9)
    assert_same(expected, model)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=makers[kind]())
    assert resumed.steps == 5
    assert_same(expected, resumed.model)
    memascend.close(resumed.model)


def test_each_durable_step_is_that_of_memory(tmp_path: Path) -> None:
    """A generation is the state after its step, without writes of the next forward."""
    torch.manual_seed(0)
    expected = Writing()
    model = memascend.offload(copy.deepcopy(expected), store=tmp_path / "store", host_memory="16MiB", durability="step")
    optimizers = [memascend.AdamW(run.parameters(), lr=1e-2) for run in (expected, model)]
    for number in range(3):
        for run, optimizer in zip((expected, model), optimizers, strict=True):
            step(run, optimizer, number)
    after_step = copy.deepcopy(expected)
    loss_of(model, 9)  # writes to the weight, and commits the third step
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        finally:
            memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=Writing())
    assert resumed.steps == 3
    assert_same(after_step, resumed.model)
    memascend.close(resumed.model)


def test_a_recomputed_layer_that_writes_to_its_weight_is_refused(pair: Callable[..., Any]) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Normalised() for _ in range(2))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                states = layer(states)
            return states

    _, model = pair(Blocks())
    with pytest.raises(memascend.MemascendError, match="recompute=False"):
        model(torch.ones(2, WIDTH))
