"""The weights and states that an optimizer may have; a short training, and its states by the names of parameters."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from torch import nn

LR = 3e-3
#: Cases for an optimizer: the dtype of the weights, and whether they have masters.
WEIGHTS = {
    "fp32": (torch.float32, True),
    "bf16": (torch.bfloat16, True),
    "bf16-no-master": (torch.bfloat16, False),
    "fp16": (torch.float16, True),
}
#: The formats of an optimizer's states.
STATES = ("float32", "bfloat16", "8bit")


def train(model: nn.Module, architecture: str, optimizer: torch.optim.Optimizer, first: int, steps: int = 1) -> None:
    for number in range(first, first + steps):
        model(**tiny_models.batch(architecture, number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own; frozen parameters too."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def states_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[parameters[key]]: value for key, value in optimizer.state_dict()["state"].items()}


def assert_same_states(actual: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    assert actual.keys() == expected.keys() and actual
    for name, states in expected.items():
        assert actual[name].keys() == states.keys(), name
        for kind, value in states.items():
            assert torch.equal(torch.as_tensor(actual[name][kind]), torch.as_tensor(value)), (name, kind)
