"""Models of many architectures on a device, with each place for their activations: the bits of the resident model."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import tiny
from rehearsed_runs import Result, assert_same, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = pytest.mark.rehearsal

ARCHITECTURES = ("llama", "qwen3", "gpt2", "t5_dropout", "mixtral", "gemma", "plain")


@cache
def resident(architecture: str) -> Result:
    """Return the results of the model that stays on the device."""
    return train(tiny.build(architecture).cuda(), architecture, accumulate=2)


@pytest.mark.parametrize("activations", ["recompute", "host", "ssd"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training(on_device: Callable[..., nn.Module], architecture: str, activations: str) -> None:
    expected = resident(architecture)
    model = on_device(tiny.build(architecture), activations=activations)
    assert_same(train(model, architecture, accumulate=2), expected)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_training_without_recomputation(on_device: Callable[..., nn.Module], architecture: str) -> None:
    model = on_device(tiny.build(architecture), recompute=False)
    assert_same(train(model, architecture, accumulate=2), resident(architecture))
