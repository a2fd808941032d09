"""Arguments of layers that run on slices of a batch and that are no tensors: cut by rows, or the whole batch.

The first batch of each test has equal rows, with which a trial finds no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_slices import calls_of
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, TOKENS, WIDTH = 5, 16, 192


class Attending(nn.Module):
    """Attends within a block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        heads = x[:, None]  # (rows, 1 head, tokens, width)
        return x + self.linear(flex_attention(heads, heads, heads, block_mask=mask)[:, 0])


class Masking(nn.Module):
    """Cuts each row's tokens behind a length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        seen = torch.tensor(getattr(lengths, "of_rows", lengths)[: len(x)])
        return x + self.linear(x * (torch.arange(TOKENS) < seen[:, None])[..., None])


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: torch.Tensor, argument: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, argument)
        return x


@dataclass
class Lengths:
    of_rows: list[int]


def block_mask(lengths: list[int]) -> Any:
    of_rows = torch.tensor(lengths)
    return create_block_mask(
        lambda row, head, query, key: (key <= query) & (key < of_rows[row]), ROWS, None, TOKENS, TOKENS, "cpu"
    )


EQUAL, UNEQUAL = [TOKENS] * ROWS, [TOKENS, TOKENS, 9, 4, 11]


def compare(model: nn.Module, layer: Callable[[], nn.Module], argument: Callable[[list[int]], Any]) -> list[int]:
    """Compare a model on slices with the whole, for equal and then for unequal rows; return the rows of calls then."""
    whole = Model(layer)
    rows = calls_of(model.get_submodule("layers.1.linear"))
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():  # flex attention has no backward pass on the CPU
        for lengths in (EQUAL, UNEQUAL):
            rows.clear()
            torch.testing.assert_close(model(x, argument(lengths)), whole(x, argument(lengths)))
    return rows


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("size", [1, 2])
def test_block_masks_are_cut(offloaded: Callable[..., nn.Module], size: int) -> None:
    model = offloaded(Model(Attending), micro_batch_size=size)
    assert compare(model, Attending, block_mask)[-1] == size
    assert not memascend.stats(model)["notices"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_block_mask_for_all_rows(offloaded: Callable[..., nn.Module]) -> None:
    def causal(_: list[int]) -> Any:
        return create_block_mask(lambda row, head, query, key: key <= query, None, None, TOKENS, TOKENS, "cpu")

    assert set(compare(offloaded(Model(Attending), micro_batch_size=2), Attending, causal)) == {1, 2}


@pytest.mark.parametrize("kind", [list, tuple, Lengths])
def test_values_of_rows_that_cannot_be_cut(offloaded: Callable[..., nn.Module], kind: Callable[..., Any]) -> None:
    model = offloaded(Model(Masking), micro_batch_size=2)
    assert set(compare(model, Masking, kind)) == {ROWS}
    (notice,) = memascend.stats(model)["notices"]
    assert "may be one for each row" in notice or "Lengths, which may have a value for each row" in notice


def test_values_that_are_of_no_row(offloaded: Callable[..., nn.Module]) -> None:
    """Other numbers, such as those of a shape, are for all rows."""

    class Shaped(Masking):
        def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
            height, width, *_ = lengths
            return x + self.linear(x.view(len(x), height, width, -1).transpose(1, 2).flatten(1, 2))

    model = offloaded(Model(Shaped), micro_batch_size=2)
    assert set(compare(model, Shaped, lambda _: torch.Size([2, 8]))) == {1, 2}
