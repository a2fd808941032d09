"""Models of many architectures on a device, with each place for their activations: the bits of the resident model."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import tiny_models
from rehearsed_runs import Result, assert_same, train

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = pytest.mark.rehearsal

ARCHITECTURES = ("llama", "qwen3", "gpt2", "t5_dropout", "mixtral", "gemma", "plain")


@cache
def resident(architecture: str) -> Result:
    """Return the results of the model that stays on the device."""
    return train(tiny_models.build(architecture).cuda(), architecture, accumulate=2)


@pytest.mark.parametrize("activations", ["recompute", "host", "ssd"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training(on_device: Callable[..., nn.Module], architecture: str, activations: str) -> None:
    expected = resident(architecture)
    model = on_device(tiny_models.build(architecture), activations=activations)
    assert_same(train(model, architecture, accumulate=2), expected)


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_training_without_recomputation(on_device: Callable[..., nn.Module], architecture: str) -> None:
    model = on_device(tiny_models.build(architecture), recompute=False)
    assert_same(train(model, architecture, accumulate=2), resident(architecture))


@pytest.mark.parametrize(
    ("cut", "activations"),
    [
        ({"tile_tokens": 12}, "ssd"),
        ({"micro_batch_size": 1}, "host"),
        ({"tile_tokens": 12, "micro_batch_size": 1}, "recompute"),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "t5_dropout"])
def test_on_tiles_and_slices(
    on_device: Callable[..., nn.Module], architecture: str, cut: dict[str, int], activations: str
) -> None:
    in_memory = tiny_models.build(architecture).cuda()
    if "tile_tokens" in cut:
        memascend.run_in_tiles(in_memory, cut["tile_tokens"])
    if "micro_batch_size" in cut:
        memascend.run_in_slices(in_memory, cut["micro_batch_size"])
    expected = train(in_memory, architecture, accumulate=2)
    model = on_device(tiny_models.build(architecture), activations=activations, batch_tokens=(2, 16), **cut)
    assert_same(train(model, architecture, accumulate=2), expected)
    assert not [notice for notice in memascend.stats(model)["notices"] if "tile_tokens" in notice], "whole after all"
