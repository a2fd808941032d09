"""Residency in host memory: which units are there, and which are on their way, by the rule of `order`."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memascend._memascend import return_holes_to_system
from memascend.common.graphs import in_backward
from memascend.common.interrupts import uninterrupted
from memascend.common.sizes import format_size
from memascend.common.timeline import span
from memascend.common.turns import Turns
from memascend.errors import MemascendError
from memascend.residency.order import PREFETCH_UNITS, UseOrder, farthest, smallest_holding
from memascend.residency.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend._memascend import LeaseBuffer, Runtime, Ticket
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Place, StoreTensor, Unit
    from memascend.plan.host import Plan
    from memascend.residency.updates import Update

_log = logging.getLogger("memascend")


class NoBufferError(MemascendError):
    """No buffer is free for a unit that is needed."""


class PassError(MemascendError):
    """The memory cannot change now: a pass is under way."""


@dataclass(slots=True, eq=False)
class Residency:
    """Where one unit's weights are in host memory, and what its next fetch has to do."""

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
    updates: Sequence[Update] = ()
    #: Whether the program has written to `storage` since it was read or written back.
    dirty: bool = False
    #: Whether a module that uses the unit writes to its weights, as `Embedding(max_norm=...)` does.
    writes_itself: bool = False
    #: How often a module has written to the unit's weights.
    module_writes: int = 0
    #: Whether the weights stay in `lease` when a step is about to change them.
    stays: bool = False
    #: Updates under way in `lease` that the backward pass has started.
    early: list[Ticket] = field(default_factory=list)


def early_use(name: str) -> str:
    """Say that weights are used between the backward pass that has updated them and the optimizer's step."""
    return (
        f"the backward pass has already updated {name} (update='backward'): call optimizer.step() before its weights, "
        "its states or another pass are asked for. A backward pass that failed cannot be taken back: memascend.resume "
        "goes on from the last durable step"
    )


class Streamer:
    """Brings units into host memory before they are used, and gives up their buffers for others afterwards."""

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        plan: Plan,
        timeline: Timeline,
        *,
        forget_recomputed: Callable[[], None],
    ) -> None:
        """Stream `units` through the buffers of `runtime`, which are those of `plan`.

        `forget_recomputed` drops recomputed tensors that hold views of buffers; it is called when no buffer is free.
        """
        self.runtime = runtime
        self.timeline = timeline
        #: The threads that use the model.
        self.turns = Turns()
        self._forget_recomputed = forget_recomputed
        #: Copies out of the buffers to a device.
        self._uploads = Uploads(timeline)
        self._tables = {unit for unit in units if unit.is_table}
        self._block_bytes = plan.blocks.nbytes
        self.follow(plan)
        sizes = {line.nbytes for line in (plan.most or plan).units}
        self._remedy = f" to {format_size(plan.overlap_bytes)}, where layers have their own" if plan.by_turns else ""
        #: Bytes of the buffer that serves each unit: the pool's smallest that holds it.
        never_whole = self._tables - set((plan.most or plan).whole_tables)
        self._buffer_size = {unit: smallest_holding(unit.nbytes, sizes) for unit in units if unit not in never_whole}
        self.residencies = {unit: Residency(unit) for unit in units}
        #: Units by the address of their storage, for tensors that autograd saves.
        self.by_address: dict[int, Unit] = {}
        self.waits = 0
        self.depth = 0
        #: Called before the program's writes become part of the store's next generation.
        self.before_write: Callable[[], None] = lambda: None
        #: Called with a unit that a module has written to, though nothing had told of it before.
        self.on_surprise: Callable[[Unit], None] = lambda unit: None
        #: Whether updates write what stays in memory, because their step is to be durable.
        self.write_through: Callable[[], bool] = lambda: True
        #: Units that the backward pass has begun to update, ahead of `optimizer.step()`.
        self.early_units: set[Unit] = set()
        #: Units used outside their module's forward; each is released at the end of the scope.
        self._loose: list[Unit] = []
        #: Tables that a warning has named.
        self._named: set[Unit] = set()
        #: Passes with a backward pass (True) and without (False).
        self._order = UseOrder({True: [*units, *reversed(units)], False: list(units)})
        self._order.begin(True)

    def follow(self, plan: Plan) -> None:
        """Go by a plan, whose buffers are there, in what is to stay in memory."""
        #: Tables without a buffer: read by blocks and by rows, and whole only beyond the budget.
        self._streamed = self._tables - set(plan.whole_tables)
        #: Units with a buffer of their own, in which their weights stay from one step to the next.
        self._staying = set(plan.staying)
        #: Whether weights stay as long as nothing else needs their buffer, for the backward pass to update them there.
        self._updates_early = plan.update == "backward"
        #: Whether holes that a pass leaves in the heap are given back.
        self._gives_back = not plan.keeps_blocks

    def check_between_passes(self, memory: str) -> None:
        """Raise PassError in a pass, and while a unit is in use; `memory` ("host", "device") is what is to change."""
        used = next((r.unit.name for r in self.residencies.values() if r.users), None)
        if self.depth or used is not None or self.early_units or in_backward():
            raise PassError(f"the {memory} memory can change between passes only, but {used or 'the model'} is in use")

    def change_plan(self, plan: Plan) -> None:
        """Give up every buffer, to go on with those of another plan.

        Raises PassError in a pass, and while a unit is in use.
        """
        self.check_between_passes("host")
        for residency in self.residencies.values():
            if residency.lease is not None or residency.ticket is not None or residency.early:
                self.discard(residency.unit)
        self.follow(plan)

    # ---- passes -----------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, grad: bool) -> Iterator[None]:
        """Enclose one call of the whole model; with `grad`, its backward pass belongs to the same pass."""
        if self.depth == 0:
            self._order.begin(grad)
            if self._gives_back:
                return_holes_to_system(True)
        with self.scope():
            yield

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enclose computation in which parameters used outside their modules are fetched too."""
        self.depth += 1
        loose, self._loose = self._loose, []
        try:
            yield
        finally:
            self.depth -= 1
            for unit in self._loose:
                self.exit(unit)
            self._loose = loose

    # ---- use --------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """Bind the unit's parameters to their values; every call needs an `exit`.

        A table is brought into memory, but stays a stand-in: what reads it by blocks and rows goes on doing so.
        """
        residency = self.residencies[unit]
        self._refuse_early_use(unit)
        if residency.users == 0:
            self._name_whole(unit)
            if residency.writes_itself:
                # The durable step must be whole before a module changes the unit's bytes.
                self.before_write()
                self._wait_written(unit)
            storage = self.storage(unit)
            for place in unit.places if not unit.is_table else ():
                place.show(storage)
        residency.users += 1

    def exit(self, unit: Unit) -> None:
        """End a use. Parameters without users are hidden; their bytes live as long as a tensor refers to them."""
        residency = self.residencies[unit]
        shown = [place for place in unit.places if not unit.is_table]
        try:
            if residency.users == 1 and (written := [place for place in shown if place.written]):
                self._written_by_module(unit, written)
        finally:
            residency.users -= 1
            if residency.users == 0:
                for place in shown:
                    place.hide()
                self.free_whole(unit)

    def _written_by_module(self, unit: Unit, written: list[Place]) -> None:
        """Write a unit back whose module has changed its weights in its forward.

        The version counter says that a function has written to them, and not that it has changed a value.
        """
        if not self._differs(unit) and not any(place.version for place in unit.places):
            return
        self.check_writable(written)
        residency = self.residencies[unit]
        residency.module_writes += 1
        if not residency.writes_itself:
            residency.writes_itself = True
            self._wait_written(unit)
            self.on_surprise(unit)
        self.mark_written(unit)
        self.clean()

    def _differs(self, unit: Unit) -> bool:
        """Whether a unit's bytes may differ from those on the store: not where all their checksums are the same."""
        residency = self.residencies[unit]
        if residency.dirty or unit.outside or residency.lease is None:
            return True
        return not self.runtime.is_stored(unit.weights, residency.lease)

    def uses(self, unit: Unit) -> bool:
        """Whether the unit's parameters show their values."""
        return self.residencies[unit].users > 0

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Give the unit's bytes (uint8), where the model computes, to a program that may write to them.

        Outside of passes this is no use that predicts others. The program says `mark_written` where it has written.
        """
        with self.turns.take("the use of a weight"):
            residency = self.residencies[unit]
            self._refuse_early_use(unit)
            if in_backward():
                for place in unit.places:
                    place.awaits_step = True
            self._name_whole(unit)
            residency.users += 1
            try:
                storage = self._bring(unit)
                # What the program writes must not reach a write under way.
                self._wait_written(unit)
                yield storage
            finally:
                residency.users -= 1
                self.free_whole(unit)

    def check_writable(self, places: Sequence[Place]) -> None:
        """Raise MemascendError for a weight that is read in place from a file of the model, and have it read anew."""
        for place in places:
            if place.sources:
                self.discard(place.tensor.unit)
                raise MemascendError(
                    f"{place.name} was written to, but it is read from the model's own file (frozen='files'), which "
                    "stays as it is: use frozen='store'"
                )

    def mark_written(self, unit: Unit) -> None:
        """Note that the program has written to the unit's bytes, which `storage` or `lend` gave."""
        residency = self.residencies[unit]
        if not residency.dirty:
            self.before_write()
            residency.dirty = True
        self._take_back(unit)

    def _take_back(self, unit: Unit) -> None:
        """Bring what was written to the unit into its bytes in host memory, where it is not there already."""

    def clean(self) -> None:
        """Write to the store what the program has written to units in memory."""
        for residency in self.residencies.values():
            self._write_back(residency)

    def _write_back(self, residency: Residency) -> None:
        if residency.dirty:
            assert residency.lease is not None, "a unit that was written to stays in memory"
            unit = residency.unit
            self.runtime.write_unit(unit.index, unit.weights, residency.lease)
            residency.dirty = False
            self._wait_written(unit)

    def enter_loose(self, unit: Unit) -> None:
        """Bind the parameters of a unit that is used outside its module, until the current scope ends."""
        if self.depth and self.residencies[unit].users == 0:
            self.enter(unit)
            self._loose.append(unit)

    def storage(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8, one-dimensional) where the model computes, and prefetch what comes next."""
        with self.turns.take("the use of a weight"):
            return self._bring_and_prefetch(unit)

    def _bring_and_prefetch(self, unit: Unit) -> torch.Tensor:
        self._order.record(unit)
        # What earlier units have left between long-lived blocks would add up over a pass.
        if self._gives_back:
            return_holes_to_system(False)
        storage = self._bring(unit)
        # The prefetch may evict any idle unit. This one is about to be used, so it must not look
        # idle.
        residency = self.residencies[unit]
        residency.users += 1
        try:
            self._prefetch()
        finally:
            residency.users -= 1
        return storage

    def read(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8) in host memory, and prefetch what comes next."""
        storage = self.storage(unit)
        self.free_whole(unit)
        return storage

    def _bring(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes, fetched if need be."""
        return self._hosted(unit)

    def _hosted(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes in host memory, fetched if need be."""
        residency = self.residencies[unit]
        if not in_backward():  # which goes on to use tensors that it has not updated yet
            self._refuse_early_use(unit)
        if unit not in self.early_units:
            self._settle_early(residency)
        if residency.storage is None:
            self._fetch(unit, self._lease(unit))
        if residency.ticket is not None:
            self._settle(residency)
        assert residency.storage is not None
        return residency.storage

    def _refuse_early_use(self, unit: Unit) -> None:
        """Raise MemascendError for a unit that the backward pass has begun to update."""
        if unit in self.early_units:
            raise MemascendError(early_use(unit.name))

    def _settle_early(self, residency: Residency) -> None:
        """Wait until the updates that the backward pass has started are in the unit's buffer."""
        tickets, residency.early = residency.early, []
        if tickets:
            with self.timeline.waiting("cpu_update"):
                for ticket in tickets:
                    ticket.wait()

    def _settle(self, residency: Residency) -> None:
        ticket, residency.ticket = residency.ticket, None
        assert ticket is not None
        self.waits += not ticket.is_ready()
        try:
            self._wait(residency, ticket)
        except BaseException:
            self._drop(residency)
            raise

    def _wait(self, residency: Residency, ticket: Ticket) -> None:
        with self.timeline.waiting("cpu_update" if residency.updating else "ssd_read"):
            ticket.wait()

    def _wait_written(self, unit: Unit) -> None:
        with self.timeline.waiting("ssd_write"):
            self.runtime.wait_unit(unit.index)

    # ---- tables -----------------------------------------------------------------------------------------

    def is_streamed(self, unit: Unit) -> bool:
        """Whether a unit is a table for which there is no buffer: it is read by blocks and by rows."""
        return unit in self._streamed

    def use_table(self, unit: Unit) -> Ticket | None:
        """Begin the deferred update of a table that is about to be read by blocks, and prefetch other units.

        Returns the update under way, whose groups are the table's blocks; None if the table is up to date.
        """
        with self.turns.take("the use of a table"):
            return self._begin_table(unit)

    def _begin_table(self, unit: Unit) -> Ticket | None:
        self._order.record(unit)
        residency = self.residencies[unit]
        self._write_back(residency)
        if residency.updates:
            self._fetch(unit, None)
        self._prefetch()
        ticket = residency.ticket
        if ticket is not None and not ticket.groups:
            self._settle(residency)
            ticket = None
        if ticket is None:
            self._wait_written(unit)
        return ticket

    def finish_update(self, unit: Unit) -> None:
        """Wait for the end of a table's update that is under way."""
        if self.residencies[unit].ticket is not None:
            self._settle(self.residencies[unit])
        self._wait_written(unit)

    def spare_blocks(self) -> list[LeaseBuffer]:
        """Return a buffer for a block of a table, in a list, which is empty if none is free."""
        lease = self.runtime.lease_unit(self._block_bytes)
        return [] if lease is None else [lease]

    def lease_block(self) -> LeaseBuffer:
        """Return a buffer for a block of a table, if need be after the oldest copy out of one to a device.

        Raises NoBufferError if all are in use: other tables are being read.
        """
        while not (leases := self.spare_blocks()):
            if not self._uploads.wait_oldest(self._block_bytes):
                raise NoBufferError("no buffer for a block of a table is free: blocks of other tables are being read")
        return leases[0]

    def free_whole(self, unit: Unit) -> None:
        """Give back the memory beyond the budget of a table that was in use as a whole, once views of it are gone."""
        residency = self.residencies[unit]
        if unit in self._streamed and residency.users == 0:
            self._drop(residency)

    def _name_whole(self, unit: Unit) -> None:
        """Say the first time that a table without a buffer is in use as a whole, beyond the budget."""
        if unit in self._tables - self._named and self._is_beyond(unit):
            self._named.add(unit)
            _log.warning(
                "%s is used as a whole: this takes %s beyond the budget for as long as it is in use; lookups and the "
                "loss read it by blocks (fused_loss=False plans memory for the whole)",
                unit.name,
                format_size(unit.nbytes),
            )

    def _is_beyond(self, unit: Unit) -> bool:
        """Whether the plan holds no room for a unit as a whole."""
        return unit in self._streamed

    # ---- buffers ----------------------------------------------------------------------------------------

    def _fetch(self, unit: Unit, lease: LeaseBuffer | None) -> None:
        residency = self.residencies[unit]
        residency.updating = bool(residency.updates)
        # An exception of a signal's handler between the start of a fetch and its record would have the next use fetch
        # again, beside an update that is under way or by an update that was applied.
        with span(f"fetch {unit.name}"), uninterrupted():
            # The update of a table is followed block by block.
            group = next(unit.places).blocks.elements if lease is None and len(residency.updates) == 1 else 0
            write_through = bool(residency.updates) and self.write_through()
            for update in residency.updates:
                update.write_through = write_through
            staying = unit in self._staying
            residency.stays = lease is not None and (staying or self._updates_early)
            residency.ticket = self.runtime.fetch(
                unit.index, unit.weights, lease, residency.updates, group, residency.stays, not staying
            )
            for update in residency.updates:
                update.started()
            residency.updates = ()
            if lease is None:
                return
            # An ordinary tensor in inference mode too: the parameters that show its bytes count writes.
            with torch.inference_mode(False):
                residency.lease, residency.storage = lease, torch.frombuffer(lease, dtype=torch.uint8)
            self.by_address[lease.address] = unit

    def _lease(self, unit: Unit) -> LeaseBuffer:
        """Return a buffer for a unit that is needed now, if need be by evicting others."""
        kept = self.residencies[unit].lease
        if kept is not None:
            return kept
        if unit in self._streamed:
            return self.runtime.lease_outside(unit.nbytes)
        for attempt in range(2):
            while True:
                lease = self.runtime.lease_unit(unit.nbytes)
                if lease is not None:
                    return lease
                # The host is ahead of the device by all buffers, so it waits for the oldest copy.
                if self._uploads.wait_oldest(self._buffer_size[unit]):
                    continue
                victim = self._victim(unit, sooner_than=-1)
                if victim is None:
                    break
                self._drop(victim)
                # A write-back under way holds the buffer too.
                self._wait_written(victim.unit)
            if attempt == 0:
                # Units dropped earlier may still be written back, and unreachable reference cycles
                # hold views.
                for residency in self.residencies.values():
                    if residency.ticket is None:
                        self._wait_written(residency.unit)
                self._forget_recomputed()
                gc.collect()
        size = self._buffer_size
        in_use = [r.unit.name for r in self.residencies.values() if r.users and size.get(r.unit) == size[unit]]
        raise NoBufferError(
            f"no buffer of {format_size(unit.nbytes)} is free for {unit.name}: all are held by tensors still alive "
            f"(in use: {', '.join(in_use) or 'none'}); drop references to weights and to losses of earlier steps, or "
            f"raise host_memory{self._remedy}"
        )

    def _victim(self, unit: Unit, sooner_than: int) -> Residency | None:
        """Return the idle unit in a buffer of the same size whose next use is farthest away, beyond `sooner_than`."""
        size = self._buffer_size
        idle = (
            residency
            for residency in self.residencies.values()
            if residency.lease is not None and not self._busy(residency) and size.get(residency.unit) == size[unit]
        )
        return farthest(idle, lambda residency: self._next_fetch(residency.unit), beyond=sooner_than)

    def _busy(self, residency: Residency) -> bool:
        """Whether the unit's buffer in host memory must not be given up."""
        return residency.users > 0

    def _next_fetch(self, unit: Unit) -> int:
        """Return the number of the next use that needs the unit in host memory."""
        return self._order.next_use(unit)

    def _drop(self, residency: Residency) -> None:
        self._write_back(residency)
        try:
            if residency.ticket is not None:
                # The fetch may carry updates, which have to end before the unit can be fetched
                # again.
                ticket, residency.ticket = residency.ticket, None
                self._wait(residency, ticket)
            self._settle_early(residency)
        finally:
            # A view that outlives the buffer keeps its address in use, so its entry in `by_address`
            # stays correct.
            residency.lease = residency.storage = None
            if residency.stays:
                residency.stays = False
                self.runtime.let_go(residency.unit.index, residency.unit.weights)
        self._uploads.note_dropped(residency.unit, self._buffer_size.get(residency.unit))

    def discard(self, unit: Unit) -> None:
        """Give up a unit's bytes and its buffer; the next use fetches them."""
        self._drop(self.residencies[unit])
        self._wait_written(unit)

    def _prefetch(self) -> None:
        self._order.prefetch(PREFETCH_UNITS, self._is_hosted, self._fetch_ahead)

    def _is_hosted(self, unit: Unit) -> bool:
        """Whether the unit's bytes are in host memory, or on their way to it; of a table by blocks: up to date."""
        residency = self.residencies[unit]
        return residency.storage is not None or (unit in self._streamed and not residency.updates)

    def _fetch_ahead(self, unit: Unit, number: int) -> bool:
        """Start fetching a unit for use number `number`, unless that would evict a unit that is used sooner."""
        if unit in self._streamed:
            self._fetch(unit, None)  # its updates alone
            return True
        lease = self.residencies[unit].lease or self.runtime.lease_unit(unit.nbytes)
        if lease is None:
            if self._uploads.are_returning(self._buffer_size[unit]):
                return False  # A buffer will soon be free, so no other unit is evicted.
            victim = self._victim(unit, sooner_than=number)
            if victim is None or victim.ticket is not None or not all(ticket.is_ready() for ticket in victim.early):
                return False
            self._drop(victim)
            lease = self.runtime.lease_unit(unit.nbytes)
        if lease is None:
            return False
        self._fetch(unit, lease)
        return True

    # ---- updates ----------------------------------------------------------------------------------------

    def let_go(self, unit: Unit) -> None:
        """Drop a unit that is about to change, unless it is to change where it is.

        An error of its fetch under way is raised here.
        """
        residency = self.residencies[unit]
        if residency.users:
            raise MemascendError(f"optimizer.step() was called while {unit.name} is in use")
        if not residency.stays:
            # A copy under way from a buffer that is given up holds the buffer.
            self._drop(residency)
            return
        # No copy may read a buffer that is about to change.
        self._uploads.wait(unit)
        self._write_back(residency)
        if residency.ticket is not None:
            self._settle(residency)
        residency.storage = None

    def defer(self, unit: Unit, updates: Sequence[Update]) -> None:
        """Have the next fetch of `unit`, which `let_go` dropped, apply `updates`."""
        residency = self.residencies[unit]
        by_tensor = {update.tensor: update for update in residency.updates}
        for update in updates:
            earlier = by_tensor.setdefault(update.tensor, update)
            if earlier is not update:
                # Another optimizer's part of the same pack: one fetch updates a tensor once.
                earlier.segments = sorted(earlier.segments + update.segments, key=lambda segment: segment.start)
        residency.updates = list(by_tensor.values())

    def can_update_early(self, tensor: StoreTensor) -> bool:
        """Whether `update_early` can update a tensor: its weights are hidden in a buffer, as the store has them."""
        residency = self.residencies[tensor.unit]
        here = residency.lease is not None and residency.storage is not None
        return here and residency.stays and not (residency.dirty or residency.users)

    def weight_address(self, tensor: StoreTensor) -> int:
        """Return where the weights of a tensor lie whose unit is in a buffer."""
        lease = self.residencies[tensor.unit].lease
        assert lease is not None, "the unit is in a buffer"
        return lease.address + tensor.offset

    def update_early(self, update: Update) -> Ticket:
        """Start an update, whose gradient the segments name, of weights that the backward pass has done with.

        They change where they are. `confirm_early` has to follow before the unit is used again.
        """
        tensor, unit = update.tensor, update.tensor.unit
        residency = self.residencies[unit]
        assert residency.lease is not None and tensor.id is not None, "as can_update_early says"
        if residency.ticket is not None:
            self._settle(residency)
        # The first update waits for what the last step has left to be written.
        beside = unit in self.early_units
        ticket = self.runtime.update_in_place(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            residency.lease,
            update,
            write_through=unit not in self._staying,
            beside=beside,
        )
        update.started()
        residency.early.append(ticket)
        self.early_units.add(unit)
        return ticket

    def refuse_early(self) -> None:
        """Raise MemascendError if the backward pass has updated units and `optimizer.step()` has not followed."""
        if self.early_units:
            raise MemascendError(early_use("the model"))

    def confirm_early(self) -> None:
        """Note that `optimizer.step()` has followed updates of the backward pass: units without others can be used."""
        self.early_units = {unit for unit in self.early_units if any(place.early for place in unit.places)}

    def forget_last_use(self) -> None:
        """Keep nothing for the next use that other ranks may not have: what each does until then may differ."""

    def start_next_pass(self) -> None:
        """Start fetching what the next training pass uses first, with the updates that were just deferred."""
        if self.depth == 0:
            self._order.begin(True)
            self._prefetch()

    def apply_updates(self) -> None:
        """Apply every deferred update now and wait until it is on the store's drives.

        Raises MemascendError in the middle of a step: the backward pass has updated units, and `optimizer.step()` has
        not followed.
        """
        self.refuse_early()
        self.clean()
        waiting = [residency.unit for residency in self.residencies.values() if residency.updates]
        if waiting:
            # Expecting exactly these units makes the ordinary prefetch a pipeline over them.
            self._order.begin_known(waiting)
            for unit in waiting:
                if unit in self._streamed:
                    self.apply_update(unit)
                else:
                    self.read(unit)
        for residency in self.residencies.values():
            self._settle_early(residency)
            if residency.ticket is not None:
                self._settle(residency)
            self._wait_written(residency.unit)

    def deferred(self) -> bool:
        """Whether any update waits for the next fetch of its unit."""
        return any(residency.updates for residency in self.residencies.values())

    def tickets(self) -> list[Ticket]:
        """Return the fetches under way."""
        residencies = self.residencies.values()
        fetches = [residency.ticket for residency in residencies if residency.ticket is not None]
        return fetches + [ticket for residency in residencies for ticket in residency.early]

    def apply_update(self, unit: Unit) -> None:
        """Apply the deferred updates of one unit now, because its gradient is about to be replaced."""
        residency = self.residencies[unit]
        if residency.updates:
            self._fetch(unit, None if unit in self._streamed else self._lease(unit))
        if residency.ticket is not None:
            self._settle(residency)

    def attach(self) -> None:
        """Prepare for the first use; the model's weights are only in the store now."""

    def free(self) -> None:
        """Release what is held beside the runtime, which was closed."""
        self.by_address.clear()
        self._uploads.clear()

    def release_all(self) -> None:
        """Release every buffer without users before the runtime is closed."""
        for residency in self.residencies.values():
            if not residency.users:
                # The weights of a failed fetch are not needed any more. A store that is kept was
                # flushed before, and the flush raised the error. What stays needs no write for the same reason.
                residency.stays = False
                with suppress(MemascendError):
                    self._drop(residency)
