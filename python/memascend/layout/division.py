"""The layout of a model whose store is divided over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.layout.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memascend.layout.units import StoreTensor, Unit


def divide(units: Iterable[Unit], rank: int, ranks: int) -> None:
    """Have every tensor of `units` be the share of one rank, and every unit hold the shares of all, side by side."""
    for unit in units:
        unit.nbytes = 0
        for tensor in unit.tensors:
            shard = tensor.shard = Shard.of(tensor.numel, tensor.packed, rank, ranks)
            tensor.numel = shard.elements
            begin, share_bytes = unit.nbytes, shard.elements * tensor.dtype.itemsize
            tensor.offset = begin + rank * share_bytes
            unit.nbytes += ranks * share_bytes
            for place in tensor.places:
                place.offset = begin + place.start * tensor.dtype.itemsize


def whole_range(tensor: StoreTensor) -> tuple[int, int]:
    """Return the first byte of a divided tensor in its unit, and the bytes of all shares together."""
    shard = tensor.shard
    assert shard is not None, "the tensors of a group are divided"
    share_bytes = shard.elements * tensor.dtype.itemsize
    return tensor.offset - shard.rank * share_bytes, shard.ranks * share_bytes
