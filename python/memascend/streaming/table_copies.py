"""Copies of blocks and rows of tables to a device, from a table's buffer in host memory or from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.streaming.blocks import BlockReader, HostedBlocks, ReadBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from memascend._memascend import CudaEvent, LeaseBuffer
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.streaming.blocks import BlockSource
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.order import UseOrder
    from memascend.streaming.table_reads import TableReads


class TableCopies:
    """Copies tables to a device piece by piece."""

    def __init__(self, device: ComputeDevice, cache: WeightCache, reads: TableReads, order: UseOrder[Unit]) -> None:
        """Copy to `device` from the buffers of `cache`, and from the store by `reads`."""
        self._device = device
        self._cache = cache
        self._reads = reads
        self._order = order

    def blocks_of(self, place: ParameterEntry) -> BlockSource:
        """Return the blocks of a table from where it is: host memory or the store."""
        if self._reads.is_streamed(place.tensor.unit):
            return ReadBlocks(BlockReader(self._reads, place), self.upload_block)
        self.host_table(place.tensor.unit)
        return HostedBlocks(place, self._upload_part)

    def host_table(self, unit: Unit) -> torch.Tensor:
        """Return the bytes (uint8) of a table that has a buffer in host memory, and prefetch the next units."""
        self._order.record(unit)
        storage = self._cache.hosted(unit)
        self._reads.prefetch()
        return storage

    def upload_block(self, lease: LeaseBuffer, nbytes: int, target: int, after: Sequence[CudaEvent]) -> CudaEvent:
        """Have the device copy from a buffer for a block of a table; returns the event of the end.

        The buffer is free again after that, once the caller has dropped it.
        """
        arrived = self._upload(lease, 0, nbytes, target, after)
        self._cache.uploads.note_returning(self._reads.block_bytes, after, arrived)
        return arrived

    def _upload_part(self, unit: Unit, begin: int, nbytes: int, target: int, after: Sequence[CudaEvent]) -> CudaEvent:
        """Have the device copy bytes of a unit in host memory, from byte `begin` on; returns the event of the end."""
        lease = self._cache.cached_units[unit].lease
        assert lease is not None
        arrived = self._upload(lease, begin, nbytes, target, after)
        self._cache.uploads.note(unit, after, arrived)
        return arrived

    def _upload(
        self, lease: LeaseBuffer, begin: int, nbytes: int, target: int, after: Sequence[CudaEvent]
    ) -> CudaEvent:
        assert self._device.link is not None
        return self._device.link.upload(lease, begin, nbytes, target, list(after))
