"""A table on the store, as a use of it sees it: read by blocks with read-ahead, or row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.common.timeline import span
from memascend.layout.units import CPU, raw_tensor_access
from memascend.streaming.blocks import BlockReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend._memascend import LeaseBuffer
    from memascend.layout.units import ParameterEntry
    from memascend.streaming.streamer import Streamer


class OffloadedTable:
    """The weights of a table on the store: (rows, width). It implements `memascend.vocabulary.tables.Table`."""

    rows_from_host = False

    def __init__(self, streamer: Streamer, place: ParameterEntry) -> None:
        """Read the table of `place` through `streamer`."""
        blocks = place.blocks
        self.rows, self.width = blocks.rows, blocks.width
        self.dtype = place.dtype
        self.device = CPU
        self.block_rows = blocks.height
        self._streamer, self._reads, self._place = streamer, streamer.tables, place

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and width."""
        return self.rows, self.width

    @property
    def version(self) -> int:
        """A number that grows with every step and every write."""
        with raw_tensor_access():
            return self._place.binding.version + self._place.parameter._version

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, (n, width) values), in order. Values are valid until the next block is asked for."""
        place = self._place
        if self._reads.is_streamed(place.tensor.unit):
            yield from self._read_blocks()
            return
        values = place.view(self._streamer.read(place.tensor.unit)).view(self.rows, self.width)
        for first, count in place.blocks:
            yield first, values[first : first + count]

    def _read_blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        with BlockReader(self._reads, self._place) as reader:
            while reader.left:
                first, count, lease = reader.take()
                block = self._view(lease, count)
                # The buffer of a block is read into again when the next block is asked for.
                del lease
                try:
                    yield first, block
                finally:
                    block.set_()  # type: ignore[call-overload]  # The traceback of an error may go on holding the tensor.

    def _view(self, lease: LeaseBuffer, count: int) -> torch.Tensor:
        with torch.inference_mode(False):
            stored = torch.frombuffer(lease, dtype=self.dtype, count=count * self.width)
            # No view, which would hold `stored`.
            shape, stride = (count, self.width), (self.width, 1)
            return torch.empty(0, dtype=self.dtype).set_(stored.untyped_storage(), 0, shape, stride)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of sorted, unique indices, (n,) of int64, as a new tensor: (n, width)."""
        reads, place = self._reads, self._place
        if not reads.is_streamed(place.tensor.unit):
            return place.view(self._streamer.read(place.tensor.unit)).index_select(0, indices)
        reads.use_table(place.tensor.unit)
        reads.finish_update(place.tensor.unit)
        rows = torch.empty(len(indices), self.width, dtype=self.dtype)
        self._read_rows(indices, rows.data_ptr())
        return rows

    def _read_rows(self, indices: torch.Tensor, target: int) -> None:
        """Read rows from the store, one behind another, to address `target` of host memory."""
        reads, place = self._reads, self._place
        (tensor_id, _, _) = place.tensor.unit.weights[0]
        # The update of a table that is trained reads all of it, and compares it before the step is committed.
        with raw_tensor_access():
            trained = place.parameter.requires_grad and place.states.owner is not None
        row_bytes = self.width * self.dtype.itemsize
        with span(f"rows of {place.name}"), reads.timeline.waiting("ssd_read"):
            reads.runtime.store.read_rows(tensor_id, row_bytes, indices.data_ptr(), len(indices), target, not trained)
