"""The order of documents, which a key picks, and which of them are held out of the training to evaluate on.

Orders are computed and not stored.
"""

from __future__ import annotations

import hashlib

from memascend.errors import DataError


def shuffled(index: int, count: int, key: str) -> int:
    """Return the place of `index` in the permutation of range(count) that `key` picks, by a Feistel network."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:  # walk the cycle until it is back inside the range; at most 4 tries on average
        left, right = index >> half_bits, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < count:
            return index


def split(documents: int, fraction: float) -> tuple[range, range]:
    """Return the positions of `documents`, in their seeded order, to train on and to hold out.

    Raises DataError where there are too few documents for one on each side.
    """
    held_out = max(1, round(fraction * documents))
    if held_out >= documents:
        raise DataError(
            f"of {documents} documents, a fraction of {fraction:g} leaves none to train on: give another, or a path"
        )
    return range(documents - held_out), range(documents - held_out, documents)
