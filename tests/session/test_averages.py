"""Averages of weights: a copy from before `memascend.offload` follows the model with the bits of memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import small_net
import torch
from bit_equality import differing
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@pytest.mark.parametrize(
    "options",
    [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}],
    ids=["mean", "ema", "ema of lists"],
)
def test_an_average_made_before(
    pair: Callable[..., tuple[nn.Module, nn.Module]], options: dict[str, Callable[..., Any]]
) -> None:
    torch.manual_seed(0)
    begun = small_net.Net()
    found = []
    for model in pair(copy.deepcopy(begun)):
        average, optimizer = AveragedModel(begun, **options), memascend.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            small_net.step(model, optimizer, seed)
            average.update_parameters(model)
        found.append(average.state_dict())
    assert not differing(*found)
    assert differing(found[0], AveragedModel(begun).state_dict())


def test_a_copy_of_an_offloaded_model_says_how(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    _, model = pair()
    for make in (copy.deepcopy, AveragedModel):
        with pytest.raises(memascend.MemascendError, match=r"before memascend\.offload: average\.update"):
            make(model)
