"""Residency on a device: which units are in its buffers, and which are on their way through host memory.

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
from memascend.plan.host import updates_early
from memascend.residency.blocks import BlockReader, HostedBlocks, ReadBlocks
from memascend.residency.cuda import DevicePool
from memascend.residency.host import NoBufferError, Streamer
from memascend.residency.order import DEVICE_AHEAD, NEVER, PREFETCH_UNITS, farthest, smallest_holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend._memascend import Applying, CudaEvent, LeaseBuffer, Runtime
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Place, StoreTensor, Unit
    from memascend.machine.cuda import ComputeDevice
    from memascend.plan.device import DevicePlan
    from memascend.plan.host import Plan
    from memascend.residency.blocks import BlockSource
    from memascend.residency.cuda import Buffer
    from memascend.residency.host import Residency
    from memascend.residency.updates import Measured, Update

#: Bytes that are brought back from the device at a time, to be compared.
_COMPARED_BYTES = 16 << 20


class DeviceStreamer(Streamer):
    """Brings units to the device before they are used. A buffer keeps its unit until another unit needs the buffer."""

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        plan: Plan,
        timeline: Timeline,
        device: ComputeDevice,
        device_plan: DevicePlan,
        *,
        forget_recomputed: Callable[[], None],
    ) -> None:
        """Stream `units` through the host buffers of `plan` and the device buffers of `device_plan`."""
        super().__init__(runtime, units, plan, timeline, forget_recomputed=forget_recomputed)
        self.device = device
        self._begin_pool(device_plan)
        #: The buffer of each unit that is on the device, or on its way there.
        self._on_device: dict[Unit, Buffer] = {}
        #: Whether units are wanted in host memory only.
        self._to_host = False
        #: Units with weights that the backward pass may update, in host memory.
        self._changing = {unit for unit in units if any(map(updates_early, unit.tensors))}

    def _begin_pool(self, plan: DevicePlan) -> None:
        """Go by the buffers of a plan, which are yet to be reserved."""
        self.pool = DevicePool(self.device, plan)
        self.pool.on_freed = lambda address: self.by_address.pop(address, None)
        #: Tables without a buffer there: blocks and rows of them are copied as they are used.
        self._by_blocks = self._tables - set(plan.whole_tables)
        self._device_size = {
            unit: smallest_holding(round_up(unit.nbytes, PAGE_BYTES), self.pool.buffers)
            for unit in self.residencies
            if unit not in self._by_blocks
        }

    # ---- another plan -----------------------------------------------------------------------------------

    def finish_uses(self) -> None:
        """Wait until no copy and no computation uses a device buffer.

        Raises PassError in a pass, and MemascendError where a tensor of the program refers to a buffer.
        """
        self.check_between_passes("device")
        if self.pool.in_use:
            # As in `_buffer`: an abandoned backward pass, and unreachable reference cycles.
            self._forget_recomputed()
            gc.collect()
        used = (self.by_address.get(buffer.address) for buffer in self.pool.in_use)
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
                with self.timeline.waiting("h2d"):
                    buffer.arrived.wait()

    def change_device_plan(self, plan: DevicePlan) -> None:
        """Give the device's buffers back and reserve those of another plan; call `finish_uses` before.

        Units stay in host memory as they are. Raises DeviceError, with no buffer reserved, if the device has less
        memory than the plan takes.
        """
        for buffer in self.pool.all:
            self._forget(buffer)
            # The address may be that of any tensor next.
            self.by_address.pop(buffer.address, None)
        self.pool.free()
        self.device.empty_cache()
        self.device.hold(plan)
        self._begin_pool(plan)
        self.pool.reserve()

    # ---- use --------------------------------------------------------------------------------------------

    def read(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8) in host memory, and prefetch what comes next into host memory."""
        with self._host_only():
            storage = self.storage(unit)
        self.free_whole(unit)
        return storage

    def apply_updates(self) -> None:
        """Apply every deferred update now and wait until it is on the store's drives."""
        with self._host_only():
            super().apply_updates()

    @contextmanager
    def _host_only(self) -> Iterator[None]:
        before, self._to_host = self._to_host, True
        try:
            yield
        finally:
            self._to_host = before

    def _bring(self, unit: Unit) -> torch.Tensor:
        if self._to_host:
            return super()._bring(unit)
        if not in_backward():  # which goes on to use what the device has
            self._refuse_early_use(unit)
        if unit not in self._on_device:
            if unit in self._streamed and self.residencies[unit].storage is None:
                self._upload_by_blocks(unit, self._buffer(unit))
            else:
                self._hosted(unit)
                self._upload(unit, self._buffer(unit))
        return self._use(unit)

    def _hosted(self, unit: Unit) -> torch.Tensor:
        # Neither a read from the store nor a copy to the device may meet what the backward pass has begun to write.
        self._settle_early(self.residencies[unit])
        return super()._hosted(unit)

    def _use(self, unit: Unit) -> torch.Tensor:
        """Begin a use of a unit that is on the device, or on its way there, and return its bytes."""
        buffer = self._on_device[unit]
        assert buffer.arrived is not None
        self.device.wait(buffer.arrived)
        return self.pool.use(buffer)

    def _take_back(self, unit: Unit) -> None:
        buffer = self._on_device.get(unit)
        if buffer is not None:
            hosted = self._hosted(unit)
            self._uploads.wait(unit)
            hosted[: unit.nbytes].copy_(self.pool.use(buffer)[: unit.nbytes])

    def _differs(self, unit: Unit) -> bool:
        buffer = self._on_device.get(unit)
        if buffer is None:
            return super()._differs(unit)
        if self.residencies[unit].dirty or unit.outside:
            return True
        # What was written to is on the device, and what was copied there is in host memory still, or on the store.
        hosted, there = self._hosted(unit), self.pool.use(buffer)
        firsts = range(0, unit.nbytes, _COMPARED_BYTES)
        parts = (slice(first, min(first + _COMPARED_BYTES, unit.nbytes)) for first in firsts)
        return not all(torch.equal(there[part].to(hosted.device), hosted[part]) for part in parts)

    # ---- device buffers ---------------------------------------------------------------------------------

    def _upload(self, unit: Unit, buffer: Buffer) -> None:
        """Have the device copy a unit, which is in host memory, into a buffer without users."""
        lease = self.residencies[unit].lease
        assert lease is not None and self.device.link is not None
        self._forget(buffer)
        after = list(buffer.last_uses.values())
        with span(f"upload {unit.name}"):
            buffer.arrived = self.device.link.upload(lease, 0, unit.nbytes, buffer.address, after)
        self._uploads.note(unit, after, buffer.arrived)
        self._note_there(unit, buffer)

    def _note_there(self, unit: Unit, buffer: Buffer) -> None:
        buffer.unit = unit
        self._on_device[unit] = buffer
        self.by_address[buffer.address] = unit

    def _upload_by_blocks(self, unit: Unit, buffer: Buffer) -> None:
        """Have the device copy a table, which has no buffer in host memory, into a buffer without users."""
        (place,) = unit.places
        self._forget(buffer)
        row_bytes, after = place.shape[1] * place.dtype.itemsize, list(buffer.last_uses.values())
        source = self.blocks_of(place)
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
            del self._on_device[buffer.unit]
            buffer.unit = None
            self.pool.give_back(buffer)

    def _buffer(self, unit: Unit) -> Buffer:
        """Return a device buffer for a unit that is needed now, if need be by evicting another."""
        # Where another process took the memory in the midst of a change of plans, it may be free again.
        self.pool.reserve()
        if unit in self._by_blocks:
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
                self._forget_recomputed()
                gc.collect()
        size = self._device_size
        in_use = [r.unit.name for r in self.residencies.values() if r.users and size[r.unit] == size[unit]]
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

    def _prefetch(self) -> None:
        if self._to_host:
            super()._prefetch()
            return
        hosted, in_order = 0, True
        for distance, (number, unit) in enumerate(self._order.upcoming(DEVICE_AHEAD + PREFETCH_UNITS)):
            if unit in self._on_device:
                continue
            if unit in self._streamed or unit in self._by_blocks or (unit in self._tables and number == 0):
                # It is copied as it is used; of what a pass begins with, an embedding, rows are used. Ahead of that it
                # is updated, or read.
                if not self._is_hosted(unit) and not self._fetch_ahead(unit, number):
                    return
                continue
            if in_order and distance < DEVICE_AHEAD and self._upload_ahead(unit, number):
                continue
            # Later units are copied later: buffers are for what is used first.
            in_order = False
            if hosted == PREFETCH_UNITS:
                return
            if not self._is_hosted(unit) and not self._fetch_ahead(unit, number):
                return
            hosted += 1

    def _upload_ahead(self, unit: Unit, number: int) -> bool:
        """Copy a unit to the device for use number `number`, if it is in host memory and a buffer can be spared."""
        residency = self.residencies[unit]
        if residency.storage is None:
            return False
        if residency.ticket is not None:
            if not residency.ticket.is_ready():
                return False
            self._settle(residency)
        if residency.early:
            if unit in self.early_units or not all(ticket.is_ready() for ticket in residency.early):
                return False
            self._settle_early(residency)
        buffer = self._spare_buffer(unit, number)
        if buffer is None:
            return False
        self._upload(unit, buffer)
        return True

    # ---- host buffers -----------------------------------------------------------------------------------

    def _busy(self, residency: Residency) -> bool:
        # Once a unit was copied, computation uses the copy on the device.
        return super()._busy(residency) and (self._to_host or residency.unit not in self._on_device)

    def _next_fetch(self, unit: Unit) -> int:
        use = self._order.next_use(unit)
        if unit not in self._on_device:
            return use
        if self._updates_early and unit in self._changing and self._order.kind is True:
            # The backward pass updates it here, once its gradients have come: unless it lies here then, it is read.
            return 0 if use == NEVER and unit is self._order.latest else use
        # A unit on the device is needed in host memory only after the device has evicted the unit.
        return use + NEVER

    # ---- updates in the backward pass -------------------------------------------------------------------

    def can_update_early(self, tensor: StoreTensor) -> bool:
        """Whether `update_from_device` can update a tensor: host memory has its weights as the store has, or not."""
        residency = self.residencies[tensor.unit]
        if residency.lease is None:
            return not residency.users
        return super().can_update_early(tensor)

    def update_from_device(
        self, update: Update, gradient: int, ready: CudaEvent, measured: Measured | None
    ) -> Applying:
        """Start an update with a gradient that is at an address of the device from `ready` on.

        Weights change in host memory if they are there, and on the store otherwise. `measured` is what the factors of
        channels are found from, for an update that takes any. The device goes on computing with the weights that it
        has; `confirm_early` has to follow before the unit is used in another pass.
        """
        tensor, unit = update.tensor, update.tensor.unit
        residency = self.residencies[unit]
        assert tensor.id is not None, "as can_update_early says"
        if residency.ticket is not None:
            self._settle(residency)
        uploaded = None if residency.lease is None else self._uploads.latest(unit)
        ticket, applying = self.runtime.update_from_device(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            residency.lease,
            update,
            gradient,
            tensor.numel * tensor.dtype.itemsize,
            ready,
            uploaded,
            measured,
            write_through=unit not in self._staying,
            # The first update waits for what the last step has left to be written.
            beside=unit in self.early_units,
        )
        update.started()
        residency.early.append(ticket)
        self.early_units.add(unit)
        return applying

    def confirm_early(self) -> None:
        """Note that `optimizer.step()` has followed updates: the device's copies of their units are out of date."""
        ahead = set(self.early_units)
        super().confirm_early()
        for unit in ahead - self.early_units:
            self._forget_copy(unit)

    # ---- tables -----------------------------------------------------------------------------------------

    def has_buffer(self, unit: Unit) -> bool:
        """Whether there is a buffer on the device for a unit as a whole."""
        return unit not in self._by_blocks

    def is_there(self, unit: Unit) -> bool:
        """Whether a unit is on the device as a whole, or on its way there."""
        return unit in self._on_device and self.has_buffer(unit)

    def host_table(self, unit: Unit) -> torch.Tensor:
        """Return the bytes (uint8) of a table that has a buffer in host memory, and prefetch what comes next."""
        self._order.record(unit)
        storage = self._hosted(unit)
        self._prefetch()
        return storage

    def blocks_of(self, place: Place) -> BlockSource:
        """Return the blocks of a table from where it is: host memory or the store."""
        if self.is_streamed(place.tensor.unit):
            return ReadBlocks(BlockReader(self, place), self.upload_block)
        self.host_table(place.tensor.unit)
        return HostedBlocks(place, self.upload_part)

    def table_buffer(self) -> Buffer:
        """Return a buffer on the device for a block of a table.

        Raises NoBufferError if tensors refer to the blocks in all of them.
        """
        self.pool.reserve()
        buffers = self.pool.free_blocks()
        if not buffers:
            raise NoBufferError("no device buffer for a block of a table is free: blocks of other tables are in use")
        return buffers[0]

    def upload_part(self, unit: Unit, begin: int, nbytes: int, target: int, after: Sequence[CudaEvent]) -> CudaEvent:
        """Have the device copy bytes of a unit in host memory, from byte `begin` on; returns the event of the end."""
        lease = self.residencies[unit].lease
        assert lease is not None and self.device.link is not None
        arrived = self.device.link.upload(lease, begin, nbytes, target, list(after))
        self._uploads.note(unit, after, arrived)
        return arrived

    def upload_block(self, lease: LeaseBuffer, nbytes: int, target: int, after: Sequence[CudaEvent]) -> CudaEvent:
        """Have the device copy what is in a buffer for a block of a table; returns the event of the end.

        The buffer is free again after that, once the caller has dropped it.
        """
        assert self.device.link is not None
        arrived = self.device.link.upload(lease, 0, nbytes, target, list(after))
        self._uploads.note_returning(self._block_bytes, after, arrived)
        return arrived

    def free_whole(self, unit: Unit) -> None:
        """Give back the memory beyond the budgets of a table that was in use as a whole, once views of it are gone."""
        super().free_whole(unit)
        if unit in self._by_blocks and self.residencies[unit].users == 0:
            self._forget_copy(unit)

    def _is_beyond(self, unit: Unit) -> bool:
        return super()._is_beyond(unit) or (unit in self._by_blocks and not self._to_host)

    # ---- host buffers that change -------------------------------------------------------------------------

    def let_go(self, unit: Unit) -> None:
        """Drop a unit that is about to change, from the device too."""
        super().let_go(unit)
        self._forget_copy(unit)

    def discard(self, unit: Unit) -> None:
        """Give up a unit's bytes and its buffers."""
        super().discard(unit)
        self._forget_copy(unit)

    def _forget_copy(self, unit: Unit) -> None:
        buffer = self._on_device.get(unit)
        if buffer is not None:
            self._forget(buffer)

    def release_all(self) -> None:
        """Release every host buffer without users, and stop recording events, before the runtime is closed."""
        super().release_all()
        self.pool.closed = True

    def attach(self) -> None:
        """Reserve the buffers of the plan in the device's memory."""
        self.pool.reserve()

    def free(self) -> None:
        """Give the device's memory back; all copies have ended."""
        super().free()
        self._on_device.clear()
        self.pool.free()
