"""A rank's share of a tensor, in whole gradient blocks and equal for all ranks, and of a matrix's channels."""

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
    """One rank's share of a tensor: `elements` elements from `rank * elements` on, padding included."""

    rank: int
    ranks: int
    elements: int

    @staticmethod
    def of(elements: int, packed: bool, rank: int, ranks: int) -> Shard:
        """Divide a tensor of `elements` elements.

        The sum of squares of a gradient is taken by blocks, so a block is never divided: the first rank has a pack or
        a tensor of one block as a whole, and the other ranks' shares are padding.
        """
        whole = packed or elements <= GRADIENT_BLOCK
        wanted, multiple = (elements, PAGE_ELEMENTS) if whole else (-(-elements // ranks), GRADIENT_BLOCK)
        return Shard(rank, ranks, -(-wanted // multiple) * multiple)

    def part(self, start: int, numel: int, rank: int | None = None) -> tuple[int, int, int]:
        """Return the part of elements `start .. start + numel` that is in the share of a rank, by default this one.

        The part is its first element counted from `start`, the same element counted in the share, and its length.
        """
        first = (self.rank if rank is None else rank) * self.elements
        begin, end = max(start, first), min(start + numel, first + self.elements)
        return (begin - start, begin - first, end - begin) if begin < end else (0, 0, 0)


def channels_of(shape: Sequence[int], start: int, shard: Shard | None, rank: int | None = None) -> tuple[int, int]:
    """Return the first channel whose moments a rank keeps, and the number of such channels.

    The matrix begins at element `start` of a tensor; by default the rank is the one of `shard`. Where channels are
    rows, a rank keeps the channels whose last element is in its share. Where they are columns, which all shares cut,
    the ranks keep equal numbers. Without a shard, one process keeps all.
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
