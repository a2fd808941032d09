"""A table on the store, as a use of it sees it: read by blocks with read-ahead, or row by row."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend._memascend import PAGE_BYTES
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import as_held, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend._memascend import LeaseBuffer, Ticket
    from memascend.layout.units import Place
    from memascend.residency.host import Streamer


@dataclass(slots=True)
class _Read:
    """A read of a block under way: `count` rows from `first` on."""

    first: int
    count: int
    lease: LeaseBuffer
    ticket: Ticket


class OffloadedTable:
    """The weights of a table on the store: (rows, width). It implements `memascend.vocabulary.tables.Table`."""

    def __init__(self, streamer: Streamer, place: Place) -> None:
        """Read the table at `place` through `streamer`."""
        self.rows, self.width = place.shape
        self.dtype = place.dtype
        self.device = place.absent.device
        self.block_rows = place.blocks.height
        self._streamer, self._place = streamer, place

    @property
    def version(self) -> int:
        """A number that grows with every step and every write."""
        with as_held():
            return self._place.version + self._place.parameter._version

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, (n, width) values), in order. Values are valid until the next block is asked for."""
        streamer, place = self._streamer, self._place
        if streamer.is_streamed(place.tensor.unit):
            yield from self._read_blocks()
            return
        values = place.view(streamer.storage(place.tensor.unit))
        for first, count in place.blocks:
            yield first, values[first : first + count]

    def _read_blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        streamer = self._streamer
        # An update under way is followed block by block.
        update = streamer.use_table(self._place.tensor.unit)
        # The buffer of a block is read into again when the next block is asked for.
        free = streamer.lease_blocks()
        left = deque(self._place.blocks)
        coming: deque[_Read] = deque()
        try:
            while left or coming:
                while left and free:
                    group = left[0][0] // self.block_rows
                    if update is not None and not update.is_group_ready(group):
                        if coming:
                            break
                        with streamer.timeline.waiting("cpu_update"):
                            update.wait_group(group)
                    coming.append(self._read(*left.popleft(), free.pop(), update is not None))
                with streamer.timeline.waiting("ssd_read"):
                    coming[0].ticket.wait()
                block = self._view(coming[0])
                try:
                    yield coming[0].first, block
                finally:
                    block.set_()  # type: ignore[call-overload]  # The traceback of an error may go on holding the tensor.
                free.append(coming.popleft().lease)
        finally:
            # After an error, too, the next one to read finds all buffers free.
            free.clear()
            while coming:
                with suppress(MemascendError):
                    coming.pop().ticket.wait()

    def _read(self, first: int, count: int, lease: LeaseBuffer, written: bool) -> _Read:
        unit = self._place.tensor.unit
        (tensor_id, _, nbytes) = unit.weights[0]
        row_bytes = self.width * self.dtype.itemsize
        length = min(round_up(count * row_bytes, PAGE_BYTES), nbytes - first * row_bytes)
        ticket = self._streamer.runtime.read_part(unit.index, tensor_id, first * row_bytes, length, lease, written)
        return _Read(first, count, lease, ticket)

    def _view(self, read: _Read) -> torch.Tensor:
        with torch.inference_mode(False):
            stored = torch.frombuffer(read.lease, dtype=self.dtype, count=read.count * self.width)
            # No view, which would hold `stored`.
            shape, stride = (read.count, self.width), (self.width, 1)
            return torch.empty(0, dtype=self.dtype).set_(stored.untyped_storage(), 0, shape, stride)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of sorted, unique indices, (n,) of int64, as a new tensor: (n, width)."""
        streamer, place = self._streamer, self._place
        unit = place.tensor.unit
        if not streamer.is_streamed(unit):
            return place.view(streamer.storage(unit)).index_select(0, indices)
        streamer.use_table(unit)
        streamer.finish_update(unit)
        rows = torch.empty(len(indices), self.width, dtype=self.dtype)
        (tensor_id, _, _) = unit.weights[0]
        with span(f"rows of {place.name}"), streamer.timeline.waiting("ssd_read"):
            streamer.runtime.read_rows(
                tensor_id, self.width * self.dtype.itemsize, indices.data_ptr(), len(indices), rows.data_ptr()
            )
        return rows
