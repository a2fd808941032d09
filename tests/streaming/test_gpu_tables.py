"""Tables on a real device: the bits of the same model there as a whole, and the copies for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tiny_models
import torch

import memascend
from memascend.memory_plan import device as plan_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_tables")]


def train(model: nn.Module, architecture: str, here: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Take two steps of two batches that are on the CPU (`here`) or the device; return losses and weights."""
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(4):
        batch = tiny_models.batch(architecture, number)
        loss = model(**(batch if here else {name: value.cuda() for name, value in batch.items()})).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        if number % 2:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach().cpu() for name, value in memascend.parameters_of(model)}


@pytest.mark.parametrize("here", [True, False], ids=["ids on the CPU", "ids on the device"])
@pytest.mark.parametrize("by_blocks", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma", "t5"])
def test_training_has_the_bits_of_a_resident_model(
    offloaded: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    by_blocks: bool,
    here: bool,
) -> None:
    if by_blocks:
        monkeypatch.setattr(plan_device, "_with_whole_tables", lambda plan, *_: plan)
    expected = train(memascend.fuse_loss(tiny_models.build(architecture)).cuda(), architecture, here=False)
    model = offloaded(
        tiny_models.build(architecture),
        device="cuda",
        device_memory="1GiB",
        host_memory="64MiB" if by_blocks else "256MiB",
        allocator="auto",
    )
    assert [unit for unit in memascend.offload_of(model).units if unit.is_table]
    losses, weights = train(model, architecture, here)
    assert all(map(torch.equal, losses, expected[0]))
    tiny_models.assert_same_weights(weights, expected[1])
