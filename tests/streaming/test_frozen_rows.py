"""Rows of a table that nothing updates are compared with checksums: by their MiB at first, then by their blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import faults
import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_tables")
ROWS, WIDTH, MIB = 16_384, 256, 1 << 20
#: One row in every second MiB: 2,048 rows are one.
TOKENS = torch.arange(4) * 2 * 2_048 + 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def build(frozen: bool = True) -> Model:
    torch.manual_seed(0)
    model = Model()
    model.embed.requires_grad_(not frozen)
    return model


class Run:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        self.losses: list[torch.Tensor] = []

    def step(self, tokens: torch.Tensor = TOKENS) -> None:
        loss = self.model(tokens)
        self.losses.append(loss.detach().clone())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def flip(file: Path, row: torch.Tensor) -> None:
    """Flip a high bit of the exponent of a row's first element, wherever the store has the row."""
    wanted = row.view(torch.uint8).numpy().tobytes()
    stored, at = file.read_bytes(), -1
    flipped = 0
    with open(file, "r+b") as handle:
        while (at := stored.find(wanted, at + 1)) >= 0:
            handle.seek(at + 1)
            handle.write(bytes([stored[at + 1] ^ 0x40]))
            flipped += 1
        os.fsync(handle.fileno())
    assert flipped


@pytest.mark.core
@pytest.mark.parametrize("touched", [True, False], ids=["read before", "not read before"])
def test_a_flipped_bit_is_not_trained_on(offloaded: Callable[..., nn.Module], store: Path, touched: bool) -> None:
    expected = Run(build())
    for _ in range(2):
        expected.step()
    model = offloaded(build(), host_memory=tiny_models.smallest_budget(build()), durability="step")
    table = next(unit for unit in model._memascend.units if unit.is_table)  # type: ignore[union-attr]
    assert model._memascend.streamer.is_streamed(table)  # type: ignore[union-attr]
    run = Run(model)
    for _ in range(2):
        run.step()
    assert all(torch.equal(one, other) for one, other in zip(run.losses, expected.losses, strict=True))
    memascend.flush(model)
    generation = model._memascend.runtime.store.generation  # type: ignore[union-attr]
    row = int(TOKENS[1]) if touched else int(TOKENS[1]) + 2_048
    flip(store / faults.VOLUME, build().embed.weight[row].detach())
    with pytest.raises(
        memascend.StoreError, match=r"embed\.weight: \d+ bytes at offset .* not those that were written"
    ):
        run.step(torch.tensor([3, row]))
    assert model._memascend.runtime.store.generation == generation  # type: ignore[union-attr]


def read_by_lookup(model: nn.Module, tokens: torch.Tensor) -> int:
    """Return the bytes that are read for the rows of some tokens."""
    model.embed(torch.tensor([ROWS - 1]))  # type: ignore[operator]  # reads ahead the units after the table
    memascend.flush(model)  # waits for that
    before = memascend.stats(model)["ssd_bytes_read"]
    rows = model.embed(tokens)  # type: ignore[operator]
    assert rows.shape == (len(tokens), WIDTH)
    return memascend.stats(model)["ssd_bytes_read"] - before


def test_a_mib_is_read_once_and_then_rows_alone(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(build(), host_memory=tiny_models.smallest_budget(build()), durability="step")
    assert read_by_lookup(model, TOKENS) == len(TOKENS) * MIB
    # A row of 512 bytes lies in a page.
    assert read_by_lookup(model, TOKENS) == read_by_lookup(model, TOKENS + 100) == len(TOKENS) * 4_096
    # Steps of the layers leave the table as it was.
    Run(model).step()
    memascend.flush(model)
    assert read_by_lookup(model, TOKENS) == len(TOKENS) * 4_096


def test_rows_of_a_trained_table_are_read_alone_and_compared_by_its_update(
    offloaded: Callable[..., nn.Module], store: Path
) -> None:
    model = offloaded(
        build(frozen=False), host_memory=tiny_models.smallest_budget(build(frozen=False)), durability="step"
    )
    # No optimizer has the table yet, so that it might as well be one that is never updated.
    assert read_by_lookup(model, TOKENS) == len(TOKENS) * MIB
    run = Run(model)
    for _ in range(2):
        run.step()
        memascend.flush(model)
        assert read_by_lookup(model, TOKENS) == len(TOKENS) * 4_096
    flip(store / faults.VOLUME, dict(memascend.parameters_of(model))["embed.weight"][int(TOKENS[1])].clone())
    with pytest.raises(memascend.StoreError, match=r"embed\.weight"):
        run.step()
        memascend.flush(model)
