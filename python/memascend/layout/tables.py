"""The layout of tables: parameters with a row for each token of a vocabulary, which are read by blocks of rows.

A table is never whole in memory where the budget has no room for it. Its blocks depend on its shape and dtype alone, so
a result that is computed block by block has the same bits with every budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from torch import nn

from memascend._memascend import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

MIB = 1024 * 1024
#: The least size of a parameter that is read by blocks and by rows. A smaller one is read whole.
TABLE_BYTES_MIN = 16 * MIB
#: The size that blocks are closest to, and the most that rounding to whole MiB may make of it.
BLOCK_BYTES = 8 * MIB
BLOCK_BYTES_MAX = 12 * MIB


def block_rows(width: int, itemsize: int) -> int:
    """Return the rows of a block of a table: about 8 MiB.

    A block is whole MiB, in which the store's checksums are kept, where that takes at most 12 MiB, else whole pages.
    """
    row_bytes = width * itemsize
    rows = MIB // gcd(row_bytes, MIB)
    if rows * row_bytes > BLOCK_BYTES_MAX:
        rows = PAGE_BYTES // gcd(row_bytes, PAGE_BYTES)
    step_bytes = rows * row_bytes
    return rows * max(1, (2 * BLOCK_BYTES + step_bytes) // (2 * step_bytes))


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of rows of a table (rows, width)."""

    rows: int
    width: int
    itemsize: int

    @property
    def height(self) -> int:
        """Rows of a block; the last block may have fewer."""
        return block_rows(self.width, self.itemsize)

    @property
    def elements(self) -> int:
        """Elements of a block; the last block may have fewer."""
        return self.height * self.width

    @property
    def nbytes(self) -> int:
        """Bytes of the largest block."""
        return min(self.height, self.rows) * self.width * self.itemsize

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the first row and the number of rows of each block."""
        for first in range(0, self.rows, height := self.height):
            yield first, min(height, self.rows - first)


def find_tables(model: nn.Module, fused_loss: bool | str) -> set[torch.Tensor]:
    """Return the tables of a model: embeddings, those within its layers too, and heads outside of them.

    Args:
        model: of transformers, whose `get_output_embeddings` returns the head or a module around it, or any other.
        fused_loss: False leaves heads, and embeddings tied to them, whole. True, in a model that is not of
            transformers, also takes as heads all linear layers with at least four times as many outputs as inputs.
            "auto" does neither.
    """
    embeddings = {weight for module, weight in _weights(model, nn.Embedding) if _looks_up_rows(module)}
    heads = find_heads(model, fused_loss)
    outside = embeddings - heads if fused_loss is False else embeddings | heads
    return outside | find_tables_in_layers(model)


def find_tables_in_layers(model: nn.Module) -> set[torch.Tensor]:
    """Return the tables within layers (of n-grams, for example): weights that embeddings alone hold."""
    in_layers = first_in_layers(model)
    found: dict[torch.Tensor, bool] = {}
    for module in model.modules():
        looked_up = isinstance(module, nn.Embedding) and _looks_up_rows(module)
        for weight in module._parameters.values():
            if weight is not None and weight in in_layers:
                found[weight] = found.get(weight, True) and looked_up
    return {weight for weight, looked_up in found.items() if looked_up and is_large(weight)}


def _looks_up_rows(module: nn.Embedding) -> bool:
    """Return whether an embedding reads the rows of its ids and changes none."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def find_heads(model: nn.Module, fused_loss: bool | str) -> set[torch.Tensor]:
    """Return the heads among a model's tables, and embeddings tied to them; `fused_loss` is as in `find_tables`."""
    linear = _weights(model, nn.Linear)
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is not None:
        head = get_head()
        inside = set() if head is None else set(head.modules())
        weights = {weight for module, weight in linear if module in inside}
        # Around the head there may be an adapter, with smaller weights of its own.
        most = max((weight.numel() for weight in weights), default=0)
        return {weight for weight in weights if weight.numel() == most}
    if fused_loss is True:
        return {weight for module, weight in linear if module.out_features >= 4 * module.in_features}
    embeddings = {weight for _, weight in _weights(model, nn.Embedding)}
    return {weight for _, weight in linear} & embeddings


def _weights(model: nn.Module, kind: type[nn.Module]) -> list[tuple[Any, torch.Tensor]]:
    """Return the modules of a kind that are large enough to be read by blocks, and their weights."""
    of_layers = first_in_layers(model)
    # A parametrized module computes `weight` when it is asked for, and may change its buffers then.
    weights = ((module, module._parameters.get("weight")) for module in model.modules() if isinstance(module, kind))
    return [
        (module, weight)
        for module, weight in weights
        if weight is not None and is_large(weight) and weight not in of_layers
    ]


def repeats(module: nn.Module) -> bool:
    """Return whether the children of a module are layers, each with a unit of its own."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def first_in_layers(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters that are registered in a layer first: they move with it, unless they are read in parts."""
    seen: dict[torch.Tensor, bool] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, in_layer: bool) -> None:
        if module in visited:
            return
        visited.add(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                seen.setdefault(parameter, in_layer)
        for child in module.children():
            visit(child, in_layer or repeats(module))

    visit(model, False)
    return {parameter for parameter, in_layer in seen.items() if in_layer}


def is_large(table: torch.Tensor) -> bool:
    """Return whether a parameter is large enough to be read by blocks."""
    return table.ndim == 2 and table.nbytes >= TABLE_BYTES_MIN
