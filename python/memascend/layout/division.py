"""The layout of a model whose store is divided over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.layout.shards import Shard
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memascend.layout.units import ParameterEntry, StoreTensor, Unit

#: Pieces of gradients begin at multiples of this many bytes, so that the kernels can read each where it arrives.
ALIGN_BYTES = 8


def divide(units: Iterable[Unit], rank: int, ranks: int) -> None:
    """Have every tensor of `units` be the share of one rank, and every unit hold the shares of all, side by side."""
    for unit in units:
        unit.nbytes = 0
        for tensor in unit.tensors:
            shard = tensor.shard = Shard.of(tensor.numel, tensor.packed, rank, ranks)
            tensor.numel = shard.elements
            share_bytes = shard.elements * tensor.dtype.itemsize
            tensor.offset = unit.nbytes + rank * share_bytes
            unit.nbytes += ranks * share_bytes


def whole_range(tensor: StoreTensor) -> tuple[int, int]:
    """Return the first byte of a divided tensor in its unit, and the bytes of all shares together."""
    shard = tensor.shard
    assert shard is not None, "the tensors of a group are divided"
    return tensor.begin, shard.ranks * shard.elements * tensor.dtype.itemsize


def part_of(place: ParameterEntry, rank: int) -> tuple[int, int, int]:
    """Return a rank's part of a parameter, as `Shard.part` does."""
    shard = place.tensor.shard
    assert shard is not None, "the tensors of a group are divided"
    return shard.part(place.start, place.numel, rank)


def ranks_of(place: ParameterEntry) -> range:
    """Return the ranks that have a part of a parameter."""
    shard = place.tensor.shard
    assert shard is not None, "the tensors of a group are divided"
    share = max(1, shard.elements)
    return range(place.start // share, (place.start + place.numel - 1) // share + 1)


def sent_bytes(place: ParameterEntry, rank: int) -> int:
    """Return the bytes of a gradient that are sent to a rank."""
    return round_up(part_of(place, rank)[2] * place.dtype.itemsize, ALIGN_BYTES)
