"""A table: the weight of an embedding or a head, read by blocks of rows and looked up by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from memascend.layout.tables import block_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Rows(Protocol):
    """A weight that is read, and whose gradient is made, by blocks of rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight and of its gradient, rows first."""

    @property
    def rows(self) -> int:
        """The first dimension."""

    @property
    def block_rows(self) -> int:
        """Rows of a block; the last block may have fewer."""

    @property
    def dtype(self) -> torch.dtype:
        """The weight's dtype."""

    @property
    def device(self) -> torch.device:
        """Where values and gradients are."""

    @property
    def version(self) -> int:
        """A number that changes whenever the values do."""

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, values of n rows) in order. Each is valid until the next is asked for."""


class Table(Rows, Protocol):
    """A weight of shape (rows, width): a row for each token of the vocabulary."""

    width: int
    #: Whether rows come from host memory, so that `look_up` has to know their indices there.
    rows_from_host: bool

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, width) of `indices` (n,), int64, sorted and unique: a new tensor on `device`."""


class MemoryTable:
    """A table over a weight in memory."""

    rows_from_host = False

    def __init__(self, weight: torch.Tensor, rows_of_block: int | None = None) -> None:
        """Take a weight (rows, width), and the rows of a block unless they are a store's."""
        self._weight = weight.detach()
        self.rows, self.width = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.block_rows = rows_of_block or block_rows(self.width, weight.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape."""
        return self.rows, self.width

    @property
    def version(self) -> int:
        """The weight's own version counter; 0 for a weight made in inference mode, which has none."""
        return 0 if self._weight.is_inference() else self._weight._version

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield views of the weight."""
        for first in range(0, self.rows, self.block_rows):
            yield first, self._weight[first : first + self.block_rows]

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows."""
        return self._weight.index_select(0, indices)


_finders: list[Callable[[torch.Tensor], Table | None]] = []


def find_tables_by(finder: Callable[[torch.Tensor], Table | None]) -> None:
    """Have `table_of` ask `finder(weight)` first, which returns None for a weight that it does not know."""
    _finders.append(finder)


def table_of(weight: torch.Tensor) -> Table:
    """Return the table of a weight: the store's that holds it, or else one over the weight in memory."""
    for finder in _finders:
        table = finder(weight)
        if table is not None:
            return table
    return MemoryTable(weight)
