"""Blocks of a table on their way: from the store, read ahead, and from host memory to a device, in order."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memascend._memascend import PAGE_BYTES
from memascend.errors import MemascendError
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend._memascend import CudaEvent, LeaseBuffer, Ticket
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.streaming.table_reads import TableReads

#: Blocks that are read ahead of the one that is asked for.
READ_AHEAD = 2


class _Read(NamedTuple):
    """A read of a block under way: `rows` rows from `first` on."""

    first: int
    rows: int
    lease: LeaseBuffer
    ticket: Ticket


class BlockReader:
    """One read of a table, block by block. An update of the table that is under way is followed block by block."""

    def __init__(self, reads: TableReads, place: ParameterEntry) -> None:
        """Begin to read the table of `place` with the first `take`."""
        self._reads, self._place = reads, place
        self._height = place.blocks.height
        self.row_bytes = place.blocks.width * place.dtype.itemsize
        self._update = reads.use_table(place.tensor.unit)
        self._unread = deque(place.blocks)
        self._coming: deque[_Read] = deque()
        #: A buffer for the next read. No local variable refers to it: the traceback of an error would hold it.
        self._free: list[LeaseBuffer] = []

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the reads under way: after an error, too, the next one to read finds their buffers free."""
        self._free.clear()
        while self._coming:
            with suppress(MemascendError):
                self._coming.pop().ticket.wait()

    @property
    def left(self) -> int:
        """Blocks that were not taken yet."""
        return len(self._unread) + len(self._coming)

    def is_ready(self) -> bool:
        """Start the reads for which there are buffers, and return whether `take` returns a block at once."""
        self._read_ahead()
        return bool(self._coming) and self._coming[0].ticket.is_ready()

    def take(self) -> tuple[int, int, LeaseBuffer]:
        """Return the next block, once it is there: its first row, how many it has, and its buffer.

        The buffer is free again when the caller has dropped it. Raises NoBufferError if no buffer is free.
        """
        self._read_ahead()
        if not self._coming:
            self._wait_updated()
            self._free.append(self._reads.lease_block())
            self._read()
            self._read_ahead()
        with self._reads.timeline.waiting("ssd_read"):
            self._coming[0].ticket.wait()
        first, count, lease, _ = self._coming.popleft()
        return first, count, lease

    def _read_ahead(self) -> None:
        while self._unread and len(self._coming) < READ_AHEAD:
            if self._update is not None and not self._update.is_group_ready(self._group):
                return
            self._free += self._reads.spare_blocks()
            if not self._free:
                return
            self._read()

    @property
    def _group(self) -> int:
        """The part of the update that has to be done before the next read."""
        return self._unread[0][0] // self._height

    def _wait_updated(self) -> None:
        if self._update is not None and not self._update.is_group_ready(self._group):
            with self._reads.timeline.waiting("cpu_update"):
                self._update.wait_group(self._group)

    def _read(self) -> None:
        first, count = self._unread.popleft()
        unit, row_bytes = self._place.tensor.unit, self.row_bytes
        (tensor_id, _, nbytes) = unit.weights[0]
        length = min(round_up(count * row_bytes, PAGE_BYTES), nbytes - first * row_bytes)
        part = unit.index, tensor_id, first * row_bytes, length
        ticket = self._reads.runtime.units.read_part(*part, self._free[0], self._update is not None)
        self._coming.append(_Read(first, count, self._free.pop(), ticket))


class BlockSource(Protocol):
    """The blocks of a table in host memory, which are copied to a device in order."""

    @property
    def left(self) -> int:
        """Blocks that were not copied yet."""

    def is_ready(self) -> bool:
        """Return whether the next block can be copied without a wait for the store."""

    def upload(self, target: int, after: Sequence[CudaEvent]) -> tuple[int, int, CudaEvent]:
        """Have the device copy the next block to address `target`, after some events.

        Returns its first row, how many it has, and the event of its arrival.
        """

    def close(self) -> None:
        """Cancel the reads under way."""


class HostedBlocks:
    """Blocks of a table that is whole in host memory."""

    def __init__(
        self, place: ParameterEntry, upload: Callable[[Unit, int, int, int, Sequence[CudaEvent]], CudaEvent]
    ) -> None:
        """Take the blocks of the table of `place`. `upload` has so many bytes of the unit, from a first on, copied."""
        self._place, self._upload = place, upload
        self._uncopied = deque(place.blocks)

    @property
    def left(self) -> int:
        """Blocks that were not copied yet."""
        return len(self._uncopied)

    def is_ready(self) -> bool:
        """Return whether the next block can be copied."""
        return True

    def upload(self, target: int, after: Sequence[CudaEvent]) -> tuple[int, int, CudaEvent]:
        """Have the device copy the next block."""
        first, count = self._uncopied.popleft()
        row_bytes = self._place.shape[1] * self._place.dtype.itemsize
        begin = self._place.offset + first * row_bytes
        return first, count, self._upload(self._place.tensor.unit, begin, count * row_bytes, target, after)

    def close(self) -> None:
        """Do nothing: the table stays where it is."""


class ReadBlocks:
    """Blocks of a table that come from the store."""

    def __init__(
        self, reader: BlockReader, upload: Callable[[LeaseBuffer, int, int, Sequence[CudaEvent]], CudaEvent]
    ) -> None:
        """Take the blocks of `reader`. `upload` has so many bytes of a buffer copied, which is free afterwards."""
        self._reader, self._upload = reader, upload

    @property
    def left(self) -> int:
        """Blocks that were not copied yet."""
        return self._reader.left

    def is_ready(self) -> bool:
        """Return whether the next block was read."""
        return self._reader.is_ready()

    def upload(self, target: int, after: Sequence[CudaEvent]) -> tuple[int, int, CudaEvent]:
        """Have the device copy the next block, once it was read."""
        first, count, lease = self._reader.take()
        return first, count, self._upload(lease, count * self._reader.row_bytes, target, after)

    def close(self) -> None:
        """Wait for the reads under way."""
        self._reader.close()
