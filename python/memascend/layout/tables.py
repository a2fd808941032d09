"""The layout of tables: parameters with a row for each token of the vocabulary, which are read by blocks of rows."""

from __future__ import annotations

from math import gcd

MIB = 1024 * 1024
#: The least size of a parameter that is read by blocks and by rows. A smaller one is read whole.
TABLE_BYTES_MIN = 16 * MIB
#: The size that blocks come near to, and the most that whole MiB may make of it.
BLOCK_BYTES = 8 * MIB
BLOCK_BYTES_MAX = 12 * MIB
#: Transfers begin and end at multiples of this.
PAGE_BYTES = 4096


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
