"""A table whose model computes on a device: its blocks and rows are copied there as they are used.

A block is copied into one of two buffers while the block before is computed with, which the device orders by events:
the host waits for the store only. Rows are put side by side in a buffer for a block, and copied from there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from memascend.streaming.tables import OffloadedTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend._memascend import LeaseBuffer
    from memascend.layout.units import ParameterEntry
    from memascend.streaming.blocks import BlockSource
    from memascend.streaming.device_buffers import Buffer
    from memascend.streaming.device_cache import DeviceCache
    from memascend.streaming.streamer import Streamer


class _Arriving(NamedTuple):
    """A block on its way to the device, or there: `rows` rows from `first` on."""

    first: int
    rows: int
    buffer: Buffer


class DeviceTable(OffloadedTable):
    """The weights of a table, (rows, width), for computation on a device."""

    rows_from_host = True

    def __init__(self, streamer: Streamer, memory: DeviceCache, place: ParameterEntry) -> None:
        """Copy from the table of `place` through `streamer` to the device of `memory`."""
        super().__init__(streamer, place)
        self.device = place.binding.absent.device
        self._there = memory

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, (n, width) values), in order. Values are valid until the next block is asked for."""
        place = self._place
        if not self._there.has_buffer(place.tensor.unit):
            yield from self._copy_blocks()
            return
        values = place.view(self._streamer.storage(place.tensor.unit))
        for first, count in place.blocks:
            yield first, values[first : first + count]

    def _copy_blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        there, pool = self._there, self._there.pool
        source = there.copies.blocks_of(self._place)
        arriving: deque[_Arriving] = deque()
        try:
            while source.left or arriving:
                if not arriving:
                    arriving.append(self._copy(source, there.table_buffer()))
                first, count, buffer = arriving.popleft()
                block = self._values(buffer, count)
                # The next block is copied while this one is computed with.
                while source.left and (buffers := pool.free_blocks()) and source.is_ready():
                    arriving.append(self._copy(source, buffers[0]))
                try:
                    yield first, block
                finally:
                    block.set_()  # type: ignore[call-overload]  # The traceback of an error may go on holding the tensor.
        finally:
            for left in arriving:
                left.buffer.is_coming = False
            source.close()

    def _copy(self, source: BlockSource, buffer: Buffer) -> _Arriving:
        """Have the device copy the next block into a buffer, after the last use of its contents."""
        first, count, buffer.arrived = source.upload(buffer.address, list(buffer.last_uses.values()))
        buffer.is_coming = True
        return _Arriving(first, count, buffer)

    def _values(self, buffer: Buffer, count: int) -> torch.Tensor:
        """Begin to use a block: (count, width)."""
        assert buffer.arrived is not None
        self._there.device.wait(buffer.arrived)
        buffer.is_coming = False
        with torch.inference_mode(False):
            copied = self._there.pool.use(buffer)
            # No view, which would hold `copied`.
            shape, stride = (count, self.width), (self.width, 1)
            return torch.empty(0, dtype=self.dtype, device=self.device).set_(copied.untyped_storage(), 0, shape, stride)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of sorted, unique indices, (n,) of int64 on the host, as a new tensor: (n, width)."""
        there, reads, place = self._there, self._reads, self._place
        unit = place.tensor.unit
        if there.is_there(unit):
            return place.view(self._streamer.storage(unit)).index_select(0, indices.to(self.device))
        values = None
        if reads.is_streamed(unit):
            reads.use_table(unit)
            reads.finish_update(unit)
        else:
            values = place.view(there.copies.host_table(unit))
        rows = torch.empty(len(indices), self.width, dtype=self.dtype, device=self.device)
        # The memory may have been another tensor's.
        after = there.device.record()
        most = place.blocks.height
        for first in range(0, len(indices), most):
            part, target = indices[first : first + most], rows[first : first + most]
            lease = reads.lease_block()
            self._gather(values, part, lease)
            after = there.copies.upload_block(lease, target.nbytes, target.data_ptr(), [after])
            # Only the copy holds the buffer now: the next one may be waiting for it.
            del lease
        there.device.wait(after)
        return rows

    def _gather(self, values: torch.Tensor | None, indices: torch.Tensor, lease: LeaseBuffer) -> None:
        """Put rows, of the table's values in host memory or of the store, side by side into a buffer there."""
        if values is None:
            self._read_rows(indices, lease.address)
            return
        rows = torch.frombuffer(lease, dtype=self.dtype, count=len(indices) * self.width).view(-1, self.width)
        torch.index_select(values, 0, indices, out=rows)
