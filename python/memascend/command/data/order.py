"""Orders that a key picks, computed and not stored."""

from __future__ import annotations

import hashlib


def shuffled(index: int, count: int, key: str) -> int:
    """Where `index` goes in the permutation of range(count) that `key` picks, by a Feistel network."""
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
