"""The lookup of an embedding: the rows that a batch uses, and a gradient of those rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from memascend.vocabulary.gradient import FoundRowsSource, RowsSource, gradient_of
from memascend.vocabulary.known import on_host

if TYPE_CHECKING:
    from memascend.vocabulary.gradient import GradientSource
    from memascend.vocabulary.tables import Table


class _Lookup(torch.autograd.Function):
    """Rows of a table by ids."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, table: Table, padding_idx: int | None
    ) -> torch.Tensor:
        """Read each row once: (..., width)."""
        # Where rows come from the host and only the device knows the ids, the host waits for them here.
        known = on_host(ids) if table.rows_from_host else None
        rows, inverse = torch.unique((ids if known is None else known).reshape(-1), sorted=True, return_inverse=True)
        if table.rows_from_host:
            rows, inverse = rows.cpu(), inverse.to(ids.device, non_blocking=True)
        if rows.numel() and not (rows[0] >= 0 and rows[-1] < table.rows):
            raise IndexError("index out of range in self")  # PyTorch's own words
        inverse = inverse.view(ids.shape)
        ctx.table, ctx.padding_idx, ctx.rows = table, padding_idx, rows.long() if table.rows_from_host else None
        ctx.save_for_backward(inverse if table.rows_from_host else ids)
        # No view: models add positions to the result in place.
        return torch.embedding(table.look_up(rows.long()), inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Keep ids and gradient; rows are added up when their block is asked for."""
        (ids,) = ctx.saved_tensors
        source: GradientSource = (
            RowsSource(ids, grad_output, ctx.padding_idx)
            if ctx.rows is None
            else FoundRowsSource(ctx.rows, ids, grad_output, ctx.padding_idx)
        )
        return None, gradient_of(ctx.table, source), None, None


def embedding(ids: torch.Tensor, weight: torch.Tensor, table: Table, padding_idx: int | None = None) -> torch.Tensor:
    """Look up `ids` (...) in a table, with the bits of `torch.nn.functional.embedding`, forward and backward.

    `weight` is the parameter that gets the gradient; its values are read from `table`.
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.rows
    return _Lookup.apply(ids, weight, table, padding_idx)
