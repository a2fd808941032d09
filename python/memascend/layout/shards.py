"""The share of a tensor that one rank of a group has: equal shares, of whole gradient blocks; and those of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend._memascend import GRADIENT_BLOCK, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Elements of a page, of the dtype with the fewest bytes: shares of small tensors are multiples of this.
PAGE_ELEMENTS = PAGE_BYTES // 2


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of a tensor's elements one rank's store has: `elements` from `rank * elements` on, padding included."""

    rank: int
    ranks: int
    elements: int

    @staticmethod
    def of(elements: int, packed: bool, rank: int, ranks: int) -> Shard:
        """Divide a tensor of `elements` elements.

        The sum of squares of a gradient is taken by blocks, so that a block is never divided: a pack and a tensor of
        one block are the first rank's, and the shares of others are padding.
        """
        whole = packed or elements <= GRADIENT_BLOCK
        wanted, multiple = (elements, PAGE_ELEMENTS) if whole else (-(-elements // ranks), GRADIENT_BLOCK)
        return Shard(rank, ranks, -(-wanted // multiple) * multiple)

    def part(self, start: int, numel: int, rank: int | None = None) -> tuple[int, int, int]:
        """Return what a rank, or this one, has of the elements `start .. start + numel` of the tensor.

        That is the first of them, counted from `start`; the same counted in the rank's share; and how many.
        """
        first = (self.rank if rank is None else rank) * self.elements
        begin, end = max(start, first), min(start + numel, first + self.elements)
        return (begin - start, begin - first, end - begin) if begin < end else (0, 0, 0)


def channels_of(shape: Sequence[int], start: int, shard: Shard | None, rank: int | None = None) -> tuple[int, int]:
    """Return the first channel of which a rank, or that of `shard`, keeps the moments, and of how many it keeps them.

    The matrix begins at element `start` of a tensor. Where its channels are rows, a rank has those whose last element
    is in its share; where they are columns, which all shares cut, the ranks have as many each. Without a shard, all.
    """
    rows, columns = shape
    if shard is None:
        return 0, max(rows, columns)
    rank = shard.rank if rank is None else rank
    if rows < columns:
        each = -(-columns // shard.ranks)
        first = min(rank * each, columns)
        return first, min(each, columns - first)
    begin, _, count = shard.part(start, rows * columns, rank)
    return begin // columns, (begin + count) // columns - begin // columns
