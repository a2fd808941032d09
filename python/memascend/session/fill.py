"""Writing the first contents of a store, unit by unit, from values that the caller reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend._memascend import PAGE_BYTES
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend._memascend import LeaseBuffer, Runtime
    from memascend.layout.units import Unit
    from memascend.streaming.streamer import Streamer


class Filling:
    """Writes every unit of a new store, in the buffers that later hold the units."""

    def __init__(self, runtime: Runtime, streamer: Streamer, units: Sequence[Unit]) -> None:
        """Write to the tensors of `runtime`, which have no contents yet."""
        self._runtime = runtime
        self._streamer = streamer
        self._units = units

    def fill(self, read: Callable[..., object], progress: Callable[[int, int], None] | None) -> None:
        """Write every unit, and wait until all are on the drives; see `Session.fill`."""
        stored = [unit for unit in self._units if unit.weights]
        total, done = sum(unit.nbytes for unit in stored), 0
        for unit in stored:
            if self._streamer.is_streamed(unit):
                self._write_table(unit, read)
            else:
                self._write_unit(unit, read)
            done += unit.nbytes
            if progress is not None:
                progress(done, total)
        for unit in stored:
            self._runtime.units.wait_unit(unit.index)

    def _write_unit(self, unit: Unit, read: Callable[..., object]) -> None:
        """Begin to write a unit. On return the write alone holds the buffer, for which the next unit may wait."""
        lease = self._free_lease(unit)
        storage = torch.frombuffer(lease, dtype=torch.uint8)
        storage[: unit.nbytes].zero_()
        for place in unit.places:
            read(place, place.view(storage))
        self._runtime.units.write_unit(unit.index, unit.weights, lease)

    def _write_table(self, unit: Unit, read: Callable[..., object]) -> None:
        """Write a table block by block."""
        (place,), ((tensor_id, _, _),) = unit.places, unit.weights
        lease = self._streamer.lease_block()
        row_bytes = place.blocks.width * place.dtype.itemsize
        for first, count in place.blocks:
            storage = torch.frombuffer(lease, dtype=torch.uint8)
            nbytes = round_up(count * row_bytes, PAGE_BYTES)
            storage[count * row_bytes : nbytes].zero_()
            read(place, storage[: count * row_bytes].view(place.dtype).view(count, -1), first)
            self._runtime.units.write_part(unit.index, tensor_id, first * row_bytes, nbytes, lease)
            self._runtime.units.wait_unit(unit.index)

    def _free_lease(self, unit: Unit) -> LeaseBuffer:
        """Lease a buffer for `unit`, waiting for writes under way where all buffers of its size are being written."""
        for written in self._units:
            lease = self._runtime.memory.lease_unit(unit.nbytes)
            if lease is not None:
                return lease
            self._runtime.units.wait_unit(written.index)
        lease = self._runtime.memory.lease_unit(unit.nbytes)
        assert lease is not None, "the plan holds a buffer for every unit"
        return lease
