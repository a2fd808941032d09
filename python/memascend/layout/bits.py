"""The bytes of weights that are quantised as a model is opened, in the forms of bitsandbytes."""

from __future__ import annotations

from typing import Final

#: The bits that a weight may be quantised to.
BITS = (4, 8)
#: Given in place of bits, for weights that stay as they are published.
PUBLISHED: Final = "published"
#: The dtype that such weights are computed with in.
COMPUTED_IN = "bfloat16"
#: Elements that share a scale, by bits; and scales of four bits that share a factor.
BLOCK = {4: 64, 8: 4096}
NESTED_BLOCK = 256
#: Elements that are quantised or dequantised at once, whole blocks: each takes at most 20 bytes of temporary tensors.
PIECE_ELEMENTS = 1 << 19
_SCALE_BYTES = 4  # float32


def quantised_nbytes(numel: int, bits: int) -> int:
    """Return the bytes that a weight of `numel` elements takes with its scales."""
    return sum(parts_of(numel, bits))


def parts_of(numel: int, bits: int) -> tuple[int, int, int]:
    """Return the bytes of a weight's numbers, of its scales, and of the factors of those."""
    blocks = -(-numel // BLOCK[bits])
    if bits == 8:
        return numel, blocks * _SCALE_BYTES, 0
    return numel // 2, blocks, -(-blocks // NESTED_BLOCK) * _SCALE_BYTES
