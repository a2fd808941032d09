"""The cache of weights in host memory: which units are in its buffers, and which are on their way.

A unit is fetched from the store into a buffer, with the updates that its next fetch is to apply. A unit that finds no
free buffer evicts the one that is used last (`memascend.streaming.order`).
"""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memascend.common.graphs import in_backward
from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import format_size
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.streaming.order import farthest, smallest_holding
from memascend.streaming.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend._memascend import LeaseBuffer, Runtime, Ticket
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Plan
    from memascend.streaming.demand import Demand
    from memascend.streaming.updates import TensorUpdate


class NoBufferError(MemascendError):
    """No buffer is free for a unit that is needed."""


@dataclass(slots=True, eq=False)
class CachedUnit:
    """Where one unit's weights are in host memory, and which updates its next fetch applies."""

    unit: Unit
    #: The buffer and its bytes (uint8); views of the bytes may outlive this reference.
    lease: LeaseBuffer | None = None
    storage: torch.Tensor | None = None
    #: The fetch that fills `storage`, until its end was waited for, and whether the fetch carries
    #: updates.
    ticket: Ticket | None = None
    updating: bool = False
    #: Modules that are using the unit now.
    users: int = 0
    #: Updates that the next fetch applies.
    updates: Sequence[TensorUpdate] = ()
    #: Whether the program has written to `storage` since it was read or written back.
    dirty: bool = False
    #: Whether a module that uses the unit writes to its weights, as `Embedding(max_norm=...)` does.
    writes_itself: bool = False
    #: How often a module has written to the unit's weights.
    module_writes: int = 0
    #: Whether the weights stay in `lease` when a step is about to change them.
    is_resident: bool = False
    #: Updates under way in `lease` that the backward pass has started.
    backward_tickets: list[Ticket] = field(default_factory=list)


def use_before_step(name: str) -> str:
    """Say that weights are used between the backward pass that has updated them and the optimizer's step."""
    return (
        f"the backward pass has already updated {name} (update='backward'): call optimizer.step() before its weights, "
        "its states or another pass are asked for. A backward pass that failed cannot be taken back: memascend.resume "
        "goes on from the last durable step"
    )


class WeightCache:
    """Fetches units into the buffers of host memory, and evicts them."""

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        plan: Plan,
        timeline: Timeline,
        demand: Demand,
        *,
        writes_through: Callable[[], bool],
        forget_recomputed: Callable[[], None],
    ) -> None:
        """Use the buffers of `runtime`, which the plan describes.

        `demand` says how soon a buffer is needed. `writes_through` says whether updates write units that stay in
        memory, because their step is to be durable. `forget_recomputed` drops recomputed tensors that hold views of
        buffers; it is called when no buffer is free.
        """
        self.runtime = runtime
        self.timeline = timeline
        self._demand = demand
        self._writes_through = writes_through
        self.forget_recomputed = forget_recomputed
        #: Copies out of the buffers to a device.
        self.uploads = Uploads(timeline)
        self.tables = {unit for unit in units if unit.is_table}
        self.follow(plan)
        sizes = {line.nbytes for line in (plan.most or plan).units}
        self._remedy = f" to {format_size(plan.overlap_bytes)}, where layers have their own" if plan.by_turns else ""
        #: Bytes of the buffer that serves each unit: the pool's smallest that holds it.
        never_whole = self.tables - set((plan.most or plan).whole_tables)
        self._buffer_size = {unit: smallest_holding(unit.nbytes, sizes) for unit in units if unit not in never_whole}
        self.cached_units = {unit: CachedUnit(unit) for unit in units}
        #: Units by the address of their storage, for tensors that autograd saves.
        self.by_address: dict[int, Unit] = {}
        #: Units that the backward pass has begun to update, ahead of `optimizer.step()`.
        self.backward_units: set[Unit] = set()
        #: Fetches that were waited for.
        self.waits = 0

    def follow(self, plan: Plan) -> None:
        """Keep the units in memory that a plan keeps there; its buffers are there."""
        #: Tables without a buffer: read by blocks and by rows, and whole only beyond the budget.
        self.streamed = self.tables - set(plan.whole_tables)
        #: Units with a buffer of their own, in which their weights stay from one step to the next.
        self.resident_units = set(plan.resident_units)
        #: Whether weights stay as long as nothing else needs their buffer, for the backward pass to update them there.
        self._updates_in_backward = plan.update == "backward"

    # ---- fetches ----------------------------------------------------------------------------------------

    def hosted(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes in host memory, fetched if need be."""
        cached = self.cached_units[unit]
        if not in_backward():  # which goes on to use tensors that it has not updated yet
            self.refuse_use_before_step(unit)
        if unit not in self.backward_units:
            self.settle_backward_updates(cached)
        if cached.storage is None:
            self.fetch(unit, self.lease(unit))
        if cached.ticket is not None:
            self.settle(cached)
        assert cached.storage is not None
        return cached.storage

    def is_hosted(self, unit: Unit) -> bool:
        """Return whether the unit's bytes are in host memory or on their way; of a table by blocks: up to date."""
        cached = self.cached_units[unit]
        return cached.storage is not None or (unit in self.streamed and not cached.updates)

    def fetch(self, unit: Unit, lease: LeaseBuffer | None) -> None:
        """Start a fetch into a buffer, with the deferred updates; without a buffer, apply these alone."""
        cached = self.cached_units[unit]
        cached.updating = bool(cached.updates)
        # An exception of a signal's handler between the start of a fetch and its record would have the next use fetch
        # again, beside an update that is under way or by an update that was applied.
        with span(f"fetch {unit.name}"), uninterrupted():
            # The update of a table is followed block by block.
            group = next(unit.places).blocks.elements if lease is None and len(cached.updates) == 1 else 0
            write_through = bool(cached.updates) and self._writes_through()
            for update in cached.updates:
                update.write_through = write_through
            staying = unit in self.resident_units
            cached.is_resident = lease is not None and (staying or self._updates_in_backward)
            cached.ticket = self.runtime.units.fetch(
                unit.index, unit.weights, lease, cached.updates, group, cached.is_resident, not staying
            )
            for update in cached.updates:
                update.started()
            cached.updates = ()
            if lease is None:
                return
            # An ordinary tensor in inference mode too: the parameters that show its bytes count writes.
            with torch.inference_mode(False):
                cached.lease, cached.storage = lease, torch.frombuffer(lease, dtype=torch.uint8)
            self.by_address[lease.address] = unit

    def fetch_ahead(self, unit: Unit, number: int) -> bool:
        """Start fetching a unit for use number `number`, unless that would evict a unit that is used sooner."""
        if unit in self.streamed:
            self.fetch(unit, None)  # its updates alone
            return True
        lease = self.cached_units[unit].lease or self.runtime.memory.lease_unit(unit.nbytes)
        if lease is None:
            if self.uploads.are_returning(self._buffer_size[unit]):
                return False  # A buffer will soon be free, so no other unit is evicted.
            victim = self._victim(unit, sooner_than=number)
            if (
                victim is None
                or victim.ticket is not None
                or not all(ticket.is_ready() for ticket in victim.backward_tickets)
            ):
                return False
            self.drop(victim)
            lease = self.runtime.memory.lease_unit(unit.nbytes)
        if lease is None:
            return False
        self.fetch(unit, lease)
        return True

    # ---- waits ------------------------------------------------------------------------------------------

    def settle(self, cached: CachedUnit) -> None:
        """Wait for the end of a unit's fetch. One that has failed leaves the unit without a buffer."""
        ticket, cached.ticket = cached.ticket, None
        assert ticket is not None
        self.waits += not ticket.is_ready()
        try:
            self._wait(cached, ticket)
        except BaseException:
            self.drop(cached)
            raise

    def settle_backward_updates(self, cached: CachedUnit) -> None:
        """Wait until the updates that the backward pass has started are in the unit's buffer."""
        tickets, cached.backward_tickets = cached.backward_tickets, []
        if tickets:
            with self.timeline.waiting("cpu_update"):
                for ticket in tickets:
                    ticket.wait()

    def settle_all(self) -> None:
        """Wait until every fetch and every write has ended."""
        for cached in self.cached_units.values():
            self.settle_backward_updates(cached)
            if cached.ticket is not None:
                self.settle(cached)
            self.wait_written(cached.unit)

    def _wait(self, cached: CachedUnit, ticket: Ticket) -> None:
        with self.timeline.waiting("cpu_update" if cached.updating else "ssd_read"):
            ticket.wait()

    def wait_written(self, unit: Unit) -> None:
        """Wait until the store's drives have every write of the unit."""
        with self.timeline.waiting("ssd_write"):
            self.runtime.units.wait_unit(unit.index)

    def tickets(self) -> list[Ticket]:
        """Return the fetches and the updates under way."""
        cached_units = self.cached_units.values()
        fetches = [cached.ticket for cached in cached_units if cached.ticket is not None]
        return fetches + [ticket for cached in cached_units for ticket in cached.backward_tickets]

    def refuse_use_before_step(self, unit: Unit) -> None:
        """Raise MemascendError for a unit that the backward pass has begun to update."""
        if unit in self.backward_units:
            raise MemascendError(use_before_step(unit.name))

    # ---- writes of the program --------------------------------------------------------------------------

    def differs(self, cached: CachedUnit) -> bool:
        """Return whether a unit's bytes may differ from the store's: not where all checksums are the same."""
        unit = cached.unit
        if cached.dirty or unit.outside or cached.lease is None:
            return True
        return not self.runtime.units.is_stored(unit.weights, cached.lease)

    def clean(self) -> None:
        """Write to the store every unit in memory that the program has written to."""
        for cached in self.cached_units.values():
            self.write_back(cached)

    def write_back(self, cached: CachedUnit) -> None:
        """Write a unit to the store if the program has written to it, and wait for the write."""
        if cached.dirty:
            assert cached.lease is not None, "a unit that was written to stays in memory"
            unit = cached.unit
            self.runtime.units.write_unit(unit.index, unit.weights, cached.lease)
            cached.dirty = False
            self.wait_written(unit)

    # ---- buffers ----------------------------------------------------------------------------------------

    def lease(self, unit: Unit) -> LeaseBuffer:
        """Return a buffer for a unit that is needed now, if need be by evicting others.

        Raises NoBufferError if all are in use.
        """
        kept = self.cached_units[unit].lease
        if kept is not None:
            return kept
        if unit in self.streamed:
            return self.runtime.memory.lease_outside(unit.nbytes)
        lease = self._free_buffer(unit)
        if lease is None:
            # Units dropped earlier may still be written back, and unreachable reference cycles
            # hold views.
            for cached in self.cached_units.values():
                if cached.ticket is None:
                    self.wait_written(cached.unit)
            self.forget_recomputed()
            gc.collect()
            lease = self._free_buffer(unit)
        if lease is not None:
            return lease
        size = self._buffer_size
        in_use = [r.unit.name for r in self.cached_units.values() if r.users and size.get(r.unit) == size[unit]]
        raise NoBufferError(
            f"no buffer of {format_size(unit.nbytes)} is free for {unit.name}: all are held by tensors still alive "
            f"(in use: {', '.join(in_use) or 'none'}); drop references to weights and to losses of earlier steps, or "
            f"raise host_memory{self._remedy}"
        )

    def _free_buffer(self, unit: Unit) -> LeaseBuffer | None:
        """Return a buffer, of a copy that has ended or of an evicted unit if need be; None if all are in use."""
        while (lease := self.runtime.memory.lease_unit(unit.nbytes)) is None:
            # The host is ahead of the device by all buffers, so it waits for the oldest copy.
            if self.uploads.wait_oldest(self._buffer_size[unit]):
                continue
            victim = self._victim(unit, sooner_than=-1)
            if victim is None:
                return None
            self.drop(victim)
            # A write-back under way holds the buffer too.
            self.wait_written(victim.unit)
        return lease

    def _victim(self, unit: Unit, sooner_than: int) -> CachedUnit | None:
        """Return the idle unit in a buffer of the same size whose next use is farthest away, beyond `sooner_than`."""
        size = self._buffer_size
        idle = (
            cached
            for cached in self.cached_units.values()
            if cached.lease is not None and not self._demand.is_busy(cached) and size.get(cached.unit) == size[unit]
        )
        return farthest(idle, lambda cached: self._demand.next_fetch(cached.unit), beyond=sooner_than)

    def drop(self, cached: CachedUnit) -> None:
        """Evict a unit, once its fetch and its updates have ended and it was written back."""
        self._demand.note_dropped(cached.unit)
        self.write_back(cached)
        try:
            if cached.ticket is not None:
                # The fetch may carry updates, which have to end before the unit can be fetched
                # again.
                ticket, cached.ticket = cached.ticket, None
                self._wait(cached, ticket)
            self.settle_backward_updates(cached)
        finally:
            # A view that outlives the buffer keeps its address in use, so its entry in `by_address`
            # stays correct.
            cached.lease = cached.storage = None
            if cached.is_resident:
                cached.is_resident = False
                self.runtime.units.release(cached.unit.index, cached.unit.weights)
        self.uploads.note_dropped(cached.unit, self._buffer_size.get(cached.unit))

    def discard(self, unit: Unit) -> None:
        """Evict a unit without writing it back; the next use fetches it."""
        self.drop(self.cached_units[unit])
        self.wait_written(unit)

    def release_all(self) -> None:
        """Release every buffer without users before the runtime is closed."""
        for cached in self.cached_units.values():
            if not cached.users:
                # The weights of a failed fetch are not needed any more. A store that is kept was
                # flushed before, and the flush raised the error. So units that stay need no write.
                cached.is_resident = False
                with suppress(MemascendError):
                    self.drop(cached)

    def clear(self) -> None:
        """Forget addresses and copies; the runtime was closed."""
        self.by_address.clear()
        self.uploads.clear()
