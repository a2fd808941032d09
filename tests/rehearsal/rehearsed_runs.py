"""Training on a device: resident there as PyTorch does it, and offloaded; the results have to be the same bits."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from fake_cuda import Fake

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

#: Budgets that hold all models of `tiny_models` with room to read ahead.
BUDGETS: dict[str, Any] = {"host_memory": "96MiB", "device": "cuda", "device_memory": "512MiB"}


@dataclass
class Result:
    """The results of a run."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, model: nn.Module) -> Result:
        """Add the weights of `model`."""
        self.weights = {name: weight.detach().cpu() for name, weight in memascend.parameters_of(model)}
        return self


def batch(architecture: str, number: int) -> dict[str, torch.Tensor]:
    """Return batch `number` of `tiny_models`, on the device."""
    return {name: ids.cuda() for name, ids in tiny_models.batch(architecture, number).items()}


def train(
    model: nn.Module,
    architecture: str,
    *,
    steps: int = 3,
    accumulate: int = 1,
    first: int = 0,
    optimizer: Any = None,
    before: Callable[[int], None] = lambda step: None,
    context: Callable[[], Any] = nullcontext,
) -> Result:
    """Train with clipping, each forward pass in a `context`; `before` is called with the number of each step."""
    optimizer = optimizer or memascend.AdamW(trainable(model), lr=3e-3)
    result = Result()
    torch.manual_seed(5)
    for step in range(first, first + steps):
        before(step)
        for micro in range(accumulate):
            with context():
                loss = model(**batch(architecture, step * accumulate + micro)).loss / accumulate
            loss.backward()
            result.losses.append(loss.detach().cpu())
        result.norms.append(optimizer.clip_grad_norm_(1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
    return result.of(model)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_same(actual: Result, expected: Result) -> None:
    """Bit for bit, and finite, or else it proves nothing."""
    for kind in ("losses", "norms"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        assert len(ours) == len(theirs) > 0
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), f"{kind}[{number}]: {one.item()} is not {other.item()}"
            assert torch.isfinite(one).all(), f"{kind}[{number}] is not finite"
    tiny_models.assert_same_weights(actual.weights, expected.weights)


def runtime() -> Fake:
    """Return the stand-in's runtime of this process, whose settings make faults."""
    if "REHEARSAL" not in os.environ:
        pytest.skip("a real device leaves nothing out: this runs on the stand-in (make rehearse)")
    return Fake()
