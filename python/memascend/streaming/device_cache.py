"""The cache of weights on a device: which units are in its buffers, and which are on their way through host memory.

A unit moves SSD -> host buffer -> device buffer, and the rule of `order` decides both moves. The host does not wait for
the device here: the device orders a copy into a buffer after the last use of the buffer's contents, and computation
after the copy. The host does wait for the SSD and for host buffers that are still being copied from, so it runs ahead
of the device by no more units than there are buffers.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from memascend._memascend import PAGE_BYTES
from memascend.common.graphs import in_backward
from memascend.common.sizes import format_size
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import round_up
from memascend.streaming.cache import NoBufferError
from memascend.streaming.demand import DeviceDemand
from memascend.streaming.device_buffers import DevicePool
from memascend.streaming.order import farthest, smallest_holding
from memascend.streaming.prefetch import DevicePrefetcher, HostPrefetcher
from memascend.streaming.table_copies import TableCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.ranks.group import Ranks
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.compute import MakeCache, MakeTables
    from memascend.streaming.device_buffers import Buffer
    from memascend.streaming.order import UseOrder

#: Bytes that are brought back from the device at a time, to be compared.
_COMPARED_BYTES = 16 << 20


class DeviceCache:
    """Brings units to the device before they are used. A buffer keeps its unit until another unit needs the buffer."""

    uses_copies = True

    def __init__(
        self,
        order: UseOrder[Unit],
        make_cache: MakeCache,
        make_tables: MakeTables,
        *,
        device: ComputeDevice,
        plan: DevicePlan,
        changing: Set[Unit],
        copies_ahead: bool,
    ) -> None:
        """Use the buffers of `plan`, through the host buffers of the cache that `make_cache` makes.

        `changing` are the units that the backward pass may update in host memory. `copies_ahead` says whether units in
        host memory are whole, so that they can be copied before their use.
        """
        self.device = device
        self._order = order
        self._copies_ahead = copies_ahead
        #: The buffer of each unit that is on the device, or on its way there.
        self.on_device: dict[Unit, Buffer] = {}
        self.whole: set[Unit] = set()
        self._demand = DeviceDemand(order, self.on_device, changing)
        self.cache: WeightCache = make_cache(self._demand)
        self._host = HostPrefetcher(order, self.cache)
        self._ahead = DevicePrefetcher(order, self.cache, self)
        self.tables = make_tables(self.cache, self.prefetch)
        self.copies = TableCopies(device, self.cache, self.tables, order)
        self._begin_pool(plan)

    def _begin_pool(self, plan: DevicePlan) -> None:
        """Go by the buffers of a plan, which are yet to be reserved."""
        cache = self.cache
        self.pool = DevicePool(self.device, plan, on_freed=lambda address: cache.by_address.pop(address, None))
        #: Tables without a buffer there: blocks and rows of them are copied as they are used.
        self.by_blocks = cache.tables - set(plan.whole_tables)
        self._device_size = {
            unit: smallest_holding(round_up(unit.nbytes, PAGE_BYTES), self.pool.buffers)
            for unit in cache.cached_units
            if unit not in self.by_blocks
        }

    # ---- another plan -----------------------------------------------------------------------------------

    def finish_uses(self) -> None:
        """Wait until no copy and no computation uses a device buffer.

        Raises MemascendError where a tensor of the program refers to a buffer.
        """
        if self.pool.in_use:
            # As in `_buffer`: an abandoned backward pass, and unreachable reference cycles.
            self.cache.forget_recomputed()
            gc.collect()
        used = (self.cache.by_address.get(buffer.address) for buffer in self.pool.in_use)
        names = dict.fromkeys("a table" if unit is None else unit.name for unit in used)
        if names:
            raise MemascendError(
                f"the device memory cannot change while tensors of the program refer to weights there, of "
                f"{', '.join(names)}: drop them, or keep copies (tensor.clone())"
            )
        for buffer in self.pool.all:
            # PyTorch orders the memory's next use after its own stream only.
            for event in buffer.last_uses.values():
                event.wait()
            if buffer.arrived is not None:
                with self.cache.timeline.waiting("h2d"):
                    buffer.arrived.wait()

    def change_plan(self, plan: DevicePlan) -> None:
        """Replace the device's buffers by the buffers of another plan; call `finish_uses` before.

        Units stay in host memory as they are. Raises DeviceError, with no buffer reserved, if the device has less
        memory than the plan takes.
        """
        for buffer in self.pool.all:
            self._forget(buffer)
            # Any tensor may have the address next.
            self.cache.by_address.pop(buffer.address, None)
        self.pool.free()
        self.device.empty_cache()
        self.device.hold(plan)
        self._begin_pool(plan)
        self.pool.reserve()

    # ---- use --------------------------------------------------------------------------------------------

    @property
    def to_host(self) -> bool:
        """Whether units are wanted in host memory only."""
        return self._demand.to_host

    @contextmanager
    def only_host(self) -> Iterator[None]:
        """Enclose reads for which units are wanted in host memory only."""
        before, self._demand.to_host = self._demand.to_host, True
        try:
            yield
        finally:
            self._demand.to_host = before

    def bring(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8) on the device; within `only_host`, in host memory."""
        if self._demand.to_host:
            return self.hosted(unit)
        cache = self.cache
        if not in_backward():  # which goes on with the device's copies
            cache.refuse_use_before_step(unit)
        if unit not in self.on_device:
            if unit in cache.streamed and cache.cached_units[unit].storage is None:
                self._upload_by_blocks(unit, self._buffer(unit))
            else:
                self.hosted(unit)
                self._upload(unit, self._buffer(unit))
        return self.use(unit)

    def hosted(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8) in host memory, fetched if need be."""
        # Neither a read from the store nor a copy to the device may meet a write that the backward pass has begun.
        self.cache.settle_backward_updates(self.cache.cached_units[unit])
        return self.cache.hosted(unit)

    def complete(self, unit: Unit, ranks: Ranks, gather: Callable[[], None]) -> None:
        """Copy the shares of all ranks to the device, unless every rank has the unit there."""
        has = torch.tensor([unit in self.on_device], dtype=torch.uint8)
        if ranks.all_gather(f"use {unit.name}", has).all():
            return
        gather()
        # This device's copy may be older than the gathered shares.
        buffer = self.on_device.get(unit)
        if buffer is not None and buffer.users:
            self._forget(buffer)
            buffer = None
        self._upload(unit, buffer or self._buffer(unit))

    def use(self, unit: Unit) -> torch.Tensor:
        """Begin a use of a unit that is on the device, or on its way there, and return its bytes."""
        buffer = self.on_device[unit]
        assert buffer.arrived is not None
        self.device.wait(buffer.arrived)
        return self.pool.use(buffer)

    def take_back(self, unit: Unit) -> None:
        """Copy the unit's bytes on the device, if it is there, into its buffer in host memory."""
        buffer = self.on_device.get(unit)
        if buffer is not None:
            hosted = self.hosted(unit)
            self.cache.uploads.wait(unit)
            hosted[: unit.nbytes].copy_(self.pool.use(buffer)[: unit.nbytes])

    def differs(self, unit: Unit) -> bool:
        """Return whether the bytes that the model uses may differ from the store's."""
        buffer, cached = self.on_device.get(unit), self.cache.cached_units[unit]
        if buffer is None:
            return self.cache.differs(cached)
        if cached.dirty or unit.outside:
            return True
        # The copy on the device was written to. Its source is in host memory still, or on the store.
        hosted, there = self.hosted(unit), self.pool.use(buffer)
        firsts = range(0, unit.nbytes, _COMPARED_BYTES)
        parts = (slice(first, min(first + _COMPARED_BYTES, unit.nbytes)) for first in firsts)
        return not all(torch.equal(there[part].to(hosted.device), hosted[part]) for part in parts)

    # ---- device buffers ---------------------------------------------------------------------------------

    def _upload(self, unit: Unit, buffer: Buffer) -> None:
        """Have the device copy a unit, which is in host memory, into a buffer without users."""
        lease = self.cache.cached_units[unit].lease
        assert lease is not None and self.device.link is not None
        self._forget(buffer)
        after = list(buffer.last_uses.values())
        with span(f"upload {unit.name}"):
            buffer.arrived = self.device.link.upload(lease, 0, unit.nbytes, buffer.address, after)
        self.cache.uploads.note(unit, after, buffer.arrived)
        self._note_there(unit, buffer)

    def _note_there(self, unit: Unit, buffer: Buffer) -> None:
        buffer.unit = unit
        self.on_device[unit] = buffer
        self.cache.by_address[buffer.address] = unit

    def _upload_by_blocks(self, unit: Unit, buffer: Buffer) -> None:
        """Have the device copy a table, which has no buffer in host memory, into a buffer without users."""
        (place,) = unit.places
        self._forget(buffer)
        row_bytes, after = place.shape[1] * place.dtype.itemsize, list(buffer.last_uses.values())
        source = self.copies.blocks_of(place)
        try:
            for first, _ in place.blocks:
                _, _, buffer.arrived = source.upload(buffer.address + place.offset + first * row_bytes, after)
                after = [buffer.arrived]
        finally:
            source.close()
        self._note_there(unit, buffer)

    def _forget(self, buffer: Buffer) -> None:
        """Declare a buffer's contents invalid."""
        if buffer.unit is not None:
            del self.on_device[buffer.unit]
            buffer.unit = None
            self.pool.give_back(buffer)

    def _buffer(self, unit: Unit) -> Buffer:
        """Return a device buffer for a unit that is needed now, if need be by evicting another."""
        # Where another process took the memory in the midst of a change of plans, it may be free again.
        self.pool.reserve()
        if unit in self.by_blocks:
            buffer = self._buffer_beyond(unit)
            if buffer is not None:
                return buffer
            raise NoBufferError(
                f"{unit.name} is used as a whole, but device_memory leaves less than its {format_size(unit.nbytes)}: "
                "use rows of it (torch.nn.functional.embedding), read it on the CPU (memascend.parameters_of), raise "
                "device_memory, or offload the model with fused_loss=False, which plans memory for a head"
            )
        for attempt in range(2):
            buffer = self._spare_buffer(unit, -1)
            if buffer is not None:
                return buffer
            if attempt == 0:
                # Unreachable reference cycles and an abandoned backward pass hold views of buffers.
                self.cache.forget_recomputed()
                gc.collect()
        size = self._device_size
        in_use = [r.unit.name for r in self.cache.cached_units.values() if r.users and size[r.unit] == size[unit]]
        raise NoBufferError(
            f"no device buffer of {format_size(unit.nbytes)} is free for {unit.name}: all are held by tensors still "
            f"alive (in use: {', '.join(in_use) or 'none'}); drop references to weights and to losses of earlier "
            "steps, or raise device_memory"
        )

    def _buffer_beyond(self, unit: Unit) -> Buffer | None:
        """Return a buffer beyond the plan, or None if the device has no room for it."""
        with suppress(torch.OutOfMemoryError):
            return self.pool.outside(unit.nbytes)
        return None

    def _spare_buffer(self, unit: Unit, sooner_than: int) -> Buffer | None:
        """Return an empty buffer without users, or the one whose unit is used farthest away, beyond `sooner_than`."""
        idle = [buffer for buffer in self.pool.buffers[self._device_size[unit]] if not buffer.users]
        empty = next((buffer for buffer in idle if buffer.unit is None), None)
        return empty or farthest(idle, self._next_use_of_contents, beyond=sooner_than)

    def _next_use_of_contents(self, buffer: Buffer) -> int:
        assert buffer.unit is not None
        return self._order.next_use(buffer.unit)

    def prefetch(self) -> None:
        """Start bringing the units that are used next."""
        (self._host if self._demand.to_host else self._ahead).prefetch()

    def upload_ahead(self, unit: Unit, number: int) -> bool:
        """Copy a unit to the device for use number `number`, if it is in host memory and a buffer can be spared."""
        cache, cached = self.cache, self.cache.cached_units[unit]
        if not self._copies_ahead or cached.storage is None:
            return False
        if cached.ticket is not None:
            if not cached.ticket.is_ready():
                return False
            cache.settle(cached)
        if cached.backward_tickets:
            if unit in cache.backward_units or not all(ticket.is_ready() for ticket in cached.backward_tickets):
                return False
            cache.settle_backward_updates(cached)
        buffer = self._spare_buffer(unit, number)
        if buffer is None:
            return False
        self._upload(unit, buffer)
        return True

    # ---- tables -----------------------------------------------------------------------------------------

    def has_buffer(self, unit: Unit) -> bool:
        """Return whether there is a buffer on the device for a unit as a whole."""
        return unit not in self.by_blocks

    def is_there(self, unit: Unit) -> bool:
        """Return whether a unit is on the device as a whole, or on its way there."""
        return unit in self.on_device and self.has_buffer(unit)

    def table_buffer(self) -> Buffer:
        """Return a buffer on the device for a block of a table.

        Raises NoBufferError if tensors refer to the blocks in all of them.
        """
        self.pool.reserve()
        buffers = self.pool.free_blocks()
        if not buffers:
            raise NoBufferError(
                "no device buffer for a block of a table is free: blocks of other tables are in use; drop references "
                "to rows of embeddings and heads"
            )
        return buffers[0]

    def is_beyond(self, unit: Unit) -> bool:
        """Return whether a unit that is wanted on the device has no buffer there."""
        return unit in self.by_blocks and not self._demand.to_host

    def free_whole(self, unit: Unit) -> None:
        """Give back the memory beyond the plan of an idle table, once views of it are gone."""
        if unit in self.by_blocks:
            self.forget_copy(unit)

    # ---- copies that are out of date --------------------------------------------------------------------

    def forget(self, unit: Unit) -> None:
        """Declare the unit's copy, with the shares of other ranks, out of date."""
        self.whole.discard(unit)
        self.forget_copy(unit)

    def forget_copy(self, unit: Unit) -> None:
        """Declare the unit's copy out of date."""
        buffer = self.on_device.get(unit)
        if buffer is not None:
            self._forget(buffer)

    def attach(self) -> None:
        """Reserve the buffers of the plan in the device's memory."""
        self.pool.reserve()

    def close(self) -> None:
        """Stop recording events, before the runtime is closed."""
        self.pool.closed = True

    def free(self) -> None:
        """Give the device's memory back; all copies have ended."""
        self.cache.clear()
        self.on_device.clear()
        self.pool.free()
