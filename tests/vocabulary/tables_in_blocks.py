"""Tables for tests: one whose gradient stays in sources, as for a weight on a store."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from memascend.vocabulary import tables
from memascend.vocabulary.tables import MemoryTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class StoredTable:
    """A table as a store would have it: not a MemoryTable, and each block is valid until the next is asked for."""

    rows_from_host = False

    def __init__(self, weight: torch.Tensor, rows_of_block: int) -> None:
        self.weight = weight.detach()
        self.rows, self.width = self.shape = weight.shape
        self.dtype, self.device, self.block_rows = weight.dtype, weight.device, rows_of_block
        self.reads = 0

    @property
    def version(self) -> int:
        return self.weight._version

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        self.reads += 1
        for first in range(0, self.rows, self.block_rows):
            block = self.weight[first : first + self.block_rows].clone()
            yield first, block
            block.fill_(float("nan"))

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        assert (indices.diff() > 0).all()
        return self.weight[indices]


@contextmanager
def blocks_of(rows: int, *, stored: bool = False) -> Iterator[list[StoredTable]]:
    """Have weights be tables of blocks of `rows` rows, in memory or as a store has them."""
    stores: list[StoredTable] = []

    def find(weight: torch.Tensor) -> MemoryTable | StoredTable:
        if not stored:
            return MemoryTable(weight, rows)
        for table in stores:
            if table.weight.data_ptr() == weight.data_ptr():
                return table
        stores.append(StoredTable(weight, rows))
        return stores[-1]

    tables._finders.insert(0, find)
    try:
        yield stores
    finally:
        tables._finders.remove(find)
