"""The streamer of a model: brings units to where it computes before they are used, and ends their uses.

Its parts have one job each: the cache of host memory (`cache`), the memory in which the model computes (`compute`,
`device_cache`), values over ranks (`gather`), deferred updates (`deferred_updates`), updates of the backward pass
(`in_backward`), the reads of tables (`table_reads`) and writes of the program (`program_writes`).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from memascend._memascend import trim_heap
from memascend.common.graphs import in_backward
from memascend.common.turns import Turns
from memascend.errors import MemascendError
from memascend.memory_plan.lines import HEAP_BYTES
from memascend.streaming.cache import NoBufferError, WeightCache, use_before_step
from memascend.streaming.compute import InHostMemory, discard
from memascend.streaming.deferred_updates import DeferredUpdates
from memascend.streaming.gather import OwnStore, ShardGatherer
from memascend.streaming.in_backward import BackwardUpdates
from memascend.streaming.order import UseOrder
from memascend.streaming.program_writes import ProgramWrites
from memascend.streaming.table_reads import TableReads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from memascend._memascend import LeaseBuffer, Runtime, Ticket
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Plan
    from memascend.ranks.group import Ranks
    from memascend.streaming.compute import MakeMemory
    from memascend.streaming.gather import Values

__all__ = ["NoBufferError", "PassError", "Streamer", "use_before_step"]


class Pieces(Protocol):
    """The pieces in memory of units that are read by pieces; see `memascend.streaming.experts.ExpertPieces`."""

    def forget(self, unit: Unit, /) -> None:
        """Drop the pieces of a unit, which have changed."""

    def clear(self) -> None:
        """Evict every piece."""


class Commits(Protocol):
    """The commits of the store; see `memascend.durability.commits.CommitLog`."""

    def before_write(self) -> None:
        """Prepare for the program's writes, which become part of the store's next generation."""

    def note_surprise(self, unit: Unit, /) -> None:
        """Note that a module has written to a unit, though nothing had told of it before."""

    def writes_through(self) -> bool:
        """Return whether updates write units that stay in memory, because their step is to be durable."""


class PassError(MemascendError):
    """The memory cannot change now: a pass is under way."""


class Streamer:
    """Brings units into memory before they are used, and evicts them for others afterwards."""

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        plan: Plan,
        timeline: Timeline,
        *,
        commits: Commits,
        forget_recomputed: Callable[[], None],
        compute_in: MakeMemory = InHostMemory,
        ranks: Ranks | None = None,
    ) -> None:
        """Stream `units` through the buffers of `runtime`, which the plan describes.

        `commits` are told of writes, and say which updates are to be on the drives. `forget_recomputed` drops
        recomputed tensors that hold views of buffers; it is called when no buffer is free. `compute_in` makes the
        memory in which the model computes. With `ranks`, each rank's store has a share of every unit.
        """
        self.runtime = runtime
        self.timeline = timeline
        #: The threads that use the model.
        self.turns = Turns()
        self.depth = 0
        #: Units used outside their module's forward; each is released at the end of the scope.
        self._loose: list[Unit] = []
        #: The pieces in memory of units that are read by pieces.
        self.pieces: Pieces | None = None
        #: Passes with a backward pass (True) and without (False).
        self._order = UseOrder({True: [*units, *reversed(units)], False: list(units)})
        self._order.begin(True)
        make_cache = partial(
            WeightCache,
            runtime,
            units,
            plan,
            timeline,
            writes_through=commits.writes_through,
            forget_recomputed=forget_recomputed,
        )
        make_tables = partial(TableReads, order=self._order, turns=self.turns, block_bytes=plan.blocks.nbytes)
        self.memory = compute_in(self._order, make_cache, make_tables)
        self.cache, self.tables = self.memory.cache, self.memory.tables
        self.values: Values = OwnStore(self.memory) if ranks is None else ShardGatherer(ranks, self.memory)
        self.writes = ProgramWrites(
            self.memory,
            self.values,
            before_write=commits.before_write,
            on_surprise=commits.note_surprise,
            on_write=self._forget_pieces,
        )
        self.updates = DeferredUpdates(self.cache)
        self.backward_updates = BackwardUpdates(self.cache, without_buffer=self.memory.uses_copies)
        self.cached_units, self.by_address = self.cache.cached_units, self.cache.by_address
        self.backward_units = self.cache.backward_units
        self._follow_heap(plan)

    def _follow_heap(self, plan: Plan) -> None:
        #: Whether holes that a pass leaves in the heap are given back.
        self._gives_back = not plan.retain_heap

    def follow(self, plan: Plan) -> None:
        """Keep the units in memory that a plan keeps there; its buffers are there."""
        self.cache.follow(plan)
        self._follow_heap(plan)

    def check_between_passes(self, memory: str) -> None:
        """Raise PassError in a pass, and while a unit is in use; `memory` ("host", "device") is to change."""
        used = next((r.unit.name for r in self.cached_units.values() if r.users), None)
        if self.depth or used is not None or self.backward_units or in_backward():
            raise PassError(
                f"the {memory} memory can change between passes only, but {used or 'the model'} is in use: change it "
                "between a step and the next forward pass"
            )

    def change_plan(self, plan: Plan) -> None:
        """Evict every unit, to go on with the buffers of another plan.

        Raises PassError in a pass, and while a unit is in use.
        """
        self.check_between_passes("host")
        for cached in self.cached_units.values():
            if cached.lease is not None or cached.ticket is not None or cached.backward_tickets:
                self.discard(cached.unit)
        if self.pieces is not None:
            self.pieces.clear()
        self.follow(plan)

    # ---- passes -----------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(self, grad: bool) -> Iterator[None]:
        """Enclose one call of the whole model; with `grad`, its backward pass belongs to the same pass."""
        if self.depth == 0:
            self._order.begin(grad)
            trim_heap(True, None if self._gives_back else HEAP_BYTES)
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

        A table is brought into memory, but stays a proxy: lookups and the loss go on reading blocks and rows.
        """
        cached = self.cached_units[unit]
        self.cache.refuse_use_before_step(unit)
        if cached.users == 0:
            self._name_whole(unit)
            self.writes.expect(unit)
            storage = self.storage(unit)
            for place in unit.places if not unit.is_table else ():
                place.bind(storage)
        cached.users += 1

    def exit(self, unit: Unit) -> None:
        """End a use. Parameters without users are hidden; their bytes live as long as a tensor refers to them."""
        cached = self.cached_units[unit]
        shown = [place for place in unit.places if not unit.is_table]
        try:
            if cached.users == 1 and (written := [place for place in shown if place.binding.written]):
                self.writes.by_module(unit, written)
        finally:
            cached.users -= 1
            if cached.users == 0:
                for place in shown:
                    place.binding.unbind()
                self.free_whole(unit)

    def uses(self, unit: Unit) -> bool:
        """Return whether the unit's parameters show their values."""
        return self.cached_units[unit].users > 0

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Give the unit's bytes (uint8), where the model computes, to a program that may write to them.

        Outside of passes this is no use that predicts others. The program calls `writes.mark` where it has written.
        """
        with self.turns.take("the use of a weight"):
            cached = self.cached_units[unit]
            self.cache.refuse_use_before_step(unit)
            self._name_whole(unit)
            cached.users += 1
            try:
                storage = self.values.bring(unit)
                # The program's writes must not reach a write under way.
                self.cache.wait_written(unit)
                yield storage
            finally:
                cached.users -= 1
                self.free_whole(unit)

    def clean(self) -> None:
        """Write to the store the units in memory that the program has written to."""
        self.cache.clean()

    def enter_loose(self, unit: Unit) -> None:
        """Bind the parameters of a unit that is used outside its module, until the current scope ends."""
        if self.depth and self.cached_units[unit].users == 0:
            self.enter(unit)
            self._loose.append(unit)

    def storage(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8, one-dimensional) where the model computes, and prefetch the next units."""
        with self.turns.take("the use of a weight"):
            return self._bring_and_prefetch(unit)

    def _bring_and_prefetch(self, unit: Unit) -> torch.Tensor:
        self._order.record(unit)
        # Holes that earlier units have left between long-lived blocks would add up over a pass.
        if self._gives_back:
            trim_heap(False)
        storage = self.values.bring(unit)
        # The prefetch may evict any idle unit. This one is about to be used, so it must not look
        # idle.
        cached = self.cached_units[unit]
        cached.users += 1
        try:
            self.memory.prefetch()
        finally:
            cached.users -= 1
        return storage

    def read(self, unit: Unit) -> torch.Tensor:
        """Return the unit's bytes (uint8) in host memory, and prefetch the next units there."""
        with self.memory.only_host():
            storage = self.storage(unit)
        self.free_whole(unit)
        return storage

    def forget_last_use(self) -> None:
        """Keep nothing for the next use that other ranks may not have: until then ranks may do different things."""
        self.values.forget_last_use()

    # ---- tables -----------------------------------------------------------------------------------------

    def is_streamed(self, unit: Unit) -> bool:
        """Return whether a unit is a table for which there is no buffer: it is read by blocks and by rows."""
        return self.tables.is_streamed(unit)

    def lease_block(self) -> LeaseBuffer:
        """Return a buffer for a block of a table; see `TableReads.lease_block`."""
        return self.tables.lease_block()

    def free_whole(self, unit: Unit) -> None:
        """Give back the memory beyond the budgets of a table that was in use as a whole, once views of it are gone."""
        cached = self.cached_units[unit]
        if cached.users == 0:
            if unit in self.cache.streamed:
                self.cache.drop(cached)
            self.memory.free_whole(unit)

    def _name_whole(self, unit: Unit) -> None:
        if unit in self.cache.streamed or self.memory.is_beyond(unit):
            self.tables.name_whole(unit)

    # ---- updates ----------------------------------------------------------------------------------------

    def release(self, unit: Unit) -> None:
        """Drop a unit that is about to change, unless it is to change where it is; copies are out of date.

        An error of its fetch under way is raised here.
        """
        self.updates.release(unit)
        self.memory.forget(unit)
        self._forget_pieces(unit)

    def discard(self, unit: Unit) -> None:
        """Evict a unit without writing it back; the next use fetches it."""
        discard(self.memory, unit)
        self._forget_pieces(unit)

    def _forget_pieces(self, unit: Unit) -> None:
        if self.pieces is not None and unit.is_experts:
            self.pieces.forget(unit)

    def confirm_backward_updates(self) -> None:
        """Record that `optimizer.step()` has followed updates of the backward pass, which frees their units for use."""
        for unit in self.backward_updates.confirm():
            self.memory.forget(unit)

    def start_next_pass(self) -> None:
        """Start fetching the first units of the next training pass, with the updates that were just deferred."""
        if self.depth == 0:
            self._order.begin(True)
            self.memory.prefetch()

    def deferred(self) -> bool:
        """Return whether any update waits for the next fetch of its unit."""
        return self.updates.any()

    def apply_updates(self) -> None:
        """Apply every deferred update now and wait until it is on the store's drives.

        Raises MemascendError in the middle of a step: the backward pass has updated units, and `optimizer.step()` has
        not followed.
        """
        with self.values.own_shares(), self.memory.only_host():
            self.backward_updates.refuse()
            self.updates.apply_all(self._order, self.read)

    # ---- the end ----------------------------------------------------------------------------------------

    @property
    def waits(self) -> int:
        """How many fetches were waited for."""
        return self.cache.waits

    def tickets(self) -> list[Ticket]:
        """Return the fetches and the updates under way."""
        return self.cache.tickets()

    def attach(self) -> None:
        """Prepare for the first use; the model's weights are only in the store now."""
        self.memory.attach()

    def free(self) -> None:
        """Release all memory outside the runtime, which was closed."""
        self.memory.free()

    def release_all(self) -> None:
        """Release every buffer without users before the runtime is closed."""
        if self.pieces is not None:
            self.pieces.clear()
        self.cache.release_all()
        self.memory.close()
