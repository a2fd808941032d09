"""Slices and tiles together, beside what the tests of each leave out: APOLLO, scaled losses, tables, 8-bit states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from test_slices import assert_same, build, padded, train

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    from test_slices import Offload
    from torch import nn

CUT: dict[str, Any] = {"micro_batch_size": 2, "tile_tokens": 24}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "APOLLO": lambda model: memascend.Apollo(memascend.apollo_groups(model, 8), lr=1e-2, update_proj_gap=2),
    "8-bit states": lambda model: memascend.AdamW(model.parameters(), lr=3e-3, states="8bit"),
    "Lion": lambda model: memascend.Lion(model.parameters(), lr=1e-3),
}


def cut_in_memory(model: nn.Module) -> nn.Module:
    return memascend.run_in_slices(memascend.run_in_tiles(model, CUT["tile_tokens"]), CUT["micro_batch_size"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(offloaded: Offload, name: str) -> None:
    results = []
    for model in (cut_in_memory(build("qwen2")), offloaded(build("qwen2"), **CUT)):
        results.append(train(model, "qwen2", steps=3, optimizer=OPTIMIZERS[name](model)))
    assert_same(results[1], results[0])


def test_scaled_losses(offloaded: Offload) -> None:
    """The second step is skipped, whose gradients overflow in one slice."""

    def run(model: nn.Module) -> tuple[list[torch.Tensor], list[float], dict[str, torch.Tensor]]:
        optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
        scaler, losses, scales = memascend.GradScaler(init_scale=2.0**12), [], []
        for step in range(3):
            loss = model(**padded("qwen2", step)).loss
            losses.append(loss.detach().clone())
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return losses, scales, dict(memascend.parameters_of(model))

    expected = run(cut_in_memory(build("qwen2", torch.float32)))
    actual = run(offloaded(build("qwen2", torch.float32), **CUT))
    assert actual[1] == expected[1] == [2.0**12, 2.0**11, 2.0**11]
    assert_same((actual[0], {}, actual[2]), (expected[0], {}, expected[2]))


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_tables_and_the_loss_in_pieces(offloaded: Offload, architecture: str) -> None:
    """Of their own, and tied ones."""
    in_memory = memascend.fuse_loss(cut_in_memory(build(architecture)))
    model = offloaded(build(architecture), host_memory=tiny_models.smallest_budget(build(architecture)), **CUT)
    assert any(unit.is_table for unit in memascend.offload_of(model).units)
    assert_same(train(model, architecture), train(in_memory, architecture))
