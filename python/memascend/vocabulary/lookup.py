"""The lookup of an embedding: the rows that a batch uses, and a gradient of those rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from memascend.vocabulary.gradient import RowsSource, gradient_of

if TYPE_CHECKING:
    from memascend.vocabulary.tables import Table


class _Lookup(torch.autograd.Function):
    """Rows of a table by ids."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, table: Table, padding_idx: int | None
    ) -> torch.Tensor:
        """Read each row once: (..., width)."""
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding_idx = table, padding_idx
        rows, inverse = torch.unique(ids.reshape(-1), sorted=True, return_inverse=True)
        if rows.numel() and not (rows[0] >= 0 and rows[-1] < table.rows):
            raise IndexError("index out of range in self")  # PyTorch's own words
        # No view: models add positions to the result in place.
        return torch.embedding(table.look_up(rows.long()), inverse.view(ids.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Keep ids and gradient; rows are added up when their block is asked for."""
        (ids,) = ctx.saved_tensors
        gradient = gradient_of(ctx.table, RowsSource(ids, grad_output, ctx.padding_idx))
        return None, gradient, None, None


def embedding(ids: torch.Tensor, weight: torch.Tensor, table: Table, padding_idx: int | None = None) -> torch.Tensor:
    """Look up `ids` (...) in a table: what `torch.nn.functional.embedding` does, and its bits, forward and backward.

    `weight` is the parameter that gets the gradient; its values are read from `table`.
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.rows
    return _Lookup.apply(ids, weight, table, padding_idx)
