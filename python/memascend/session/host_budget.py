"""The host memory that one session holds: the plan, and its change between passes, on request or with the machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from memascend._memascend import PAGE_BYTES, STAGING_RESERVE
from memascend.autograd.kept import KeptActivations
from memascend.common.graphs import in_backward
from memascend.common.interrupts import uninterrupted
from memascend.common.notices import warn_of
from memascend.common.sizes import format_size
from memascend.errors import HostMemoryError, MemascendError
from memascend.hardware import memory_limits
from memascend.layout.units import round_up
from memascend.memory_plan.auto_budget import resident_bytes
from memascend.memory_plan.host import check_available, lend, replan
from memascend.memory_plan.lines import Plan
from memascend.memory_plan.monitor import MemoryMonitor, growth_lock
from memascend.session.runtime import configure_malloc
from memascend.session.spare_memory import Division, Steps
from memascend.streaming.resident_states import share_room
from memascend.streaming.streamer import PassError, Streamer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Unit
    from memascend.memory_plan.auto_budget import BudgetChange
    from memascend.options import SpareFor
    from memascend.ranks.membership import Membership, OneProcess

_log = logging.getLogger("memascend")


class CopiesToHost(Protocol):
    """Copies from a device into staging chunks of host memory."""

    def wait_copied(self) -> None:
        """Wait until no copy from the device is under way."""


class HostBudget:
    """The plan of a session's host memory, and the machine that it may follow."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        runtime: Runtime,
        streamer: Streamer,
        copies: Sequence[CopiesToHost],
        timeline: Timeline,
        membership: Membership | OneProcess,
        steps: Steps,
        spare_memory: SpareFor = "auto",
    ) -> None:
        """Begin with `plan`, which `runtime` and `streamer` were made from. A change waits for `copies`.

        `spare_memory` is as in `memascend.options`.
        """
        #: The activations that are kept in what a plan leaves.
        self.kept = KeptActivations(self._room_for_activations, timeline.computing_ns)
        self._division: Division | None = None
        if plan.lends:
            self._division = Division(spare_memory, self.kept, timeline, steps)
        self.plan = plan
        #: The ceiling in bytes.
        self.nbytes = plan.budget
        self._units = units
        self._runtime = runtime
        self._streamer = streamer
        self._copies = copies
        self._timeline = timeline
        self._membership = membership
        #: Samples the machine, where the budget follows it.
        self._watch: MemoryMonitor | None = None
        self._said_lacking = False
        #: The bytes that activations were to have when the budget was last divided; None for a new budget.
        self._asked: int | None = None

    def set(self, nbytes: int) -> None:
        """Change the ceiling, and keep it; see `memascend.set_host_memory`."""
        self._check_elastic()
        plan = replan(self.plan, self._units, nbytes)
        if plan.total > self.plan.total:
            check_available(plan, self.plan.total)
        with self._streamer.turns.take("set_host_memory"):
            self._change_plan(plan)
        if self._division is not None:
            self._division.begin_step()
            self._asked = None
        self.stop_following()

    def _room_for_activations(self, held: int) -> int:
        """Return the bytes that activations may take in a pass; `held` bytes are taken.

        None over ranks: they would gather units in different orders, where one keeps a layer and another computes it
        again. Half of the free memory is left to the rest of the step, where the budget is more than the machine has.
        """
        room = self.plan.activations_bytes
        if not room or self._membership.divides:
            return 0
        return min(room, held + max(0, memory_limits.memory_left()) // 2)

    # ---- following the machine ------------------------------------------------------------------------------

    def follow_machine(self) -> None:
        """Have the ceiling follow the free memory of the machine, from pass to pass."""
        self._check_elastic()
        if self._watch is None:
            self._watch = MemoryMonitor()

    @property
    def follows_machine(self) -> bool:
        """Whether the ceiling follows the free memory of the machine."""
        return self._watch is not None

    def stop_following(self) -> None:
        """Leave the ceiling as it is from now on."""
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def fit(self, grad: bool) -> None:
        """Before a pass of the whole model with or without gradients, change the plan as machine and steps demand."""
        if grad and not self._streamer.depth and not in_backward():
            self._divide()
        watch = self._watch
        # A pass within another, or within a backward pass.
        if watch is None or self._streamer.depth or in_backward() or not watch.is_due(grad):
            return
        with growth_lock() as alone:
            change = watch.look(self.plan, grad, self._runtime.memory.leaving_bytes, alone)
            if change is not None:
                self._follow(watch, change)
        if watch.shortfall_bytes and not self._said_lacking:
            self._said_lacking = True
            warn_of(
                f"host memory is at the least that works, {format_size(self.plan.total)}, and the machine lacks "
                f"{format_size(watch.shortfall_bytes)} for it and for a step: stop other programs, raise the limit, or "
                "lower the batch size, or the kernel may end the run"
            )
        watch.begin(grad)

    def _follow(self, watch: MemoryMonitor, change: BudgetChange) -> None:
        before, plan = self.plan, replan(self.plan, self._units, change.budget)
        if change.budget >= before.total and resident_bytes(plan) <= resident_bytes(before):
            return  # No whole buffer more.
        try:
            # An interrupt amid the change would leave the streamer with one plan and the pools with another.
            with uninterrupted():
                self._change_plan(plan)
        except PassError as error:
            _log.debug("the host memory stays at %s: %s", format_size(before.total), error)
        except HostMemoryError as error:
            watch.refused()
            _log.info("host memory stays at %s: %s", format_size(before.total), error)
        else:
            if self.plan.total != before.total:
                sizes = (format_size(before.total), format_size(self.plan.total))
                _log.info("host memory %s -> %s (%s)", *sizes, change.reason)

    def _check_elastic(self) -> None:
        self._membership.refuse("another budget of host memory", "give host_memory when it is offloaded or resumed")
        if self.plan.budget_max is None:
            raise MemascendError(
                "the model was opened with a fixed budget: give host_memory_max beside host_memory, the most that it "
                "may become, or host_memory='auto'"
            )

    # ---- activations ----------------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Before a pass with gradients, divide the room beyond the least between activations and all that is cached."""
        if self._division is None:
            return
        wanted = self._division.bytes_to_lend(self.plan)
        plan = self.plan if wanted == self._asked else lend(self.plan, self._units, wanted)
        if plan.lent_bytes != self.plan.lent_bytes:
            try:
                with uninterrupted():
                    self._change_plan(plan)
            except PassError as error:
                _log.debug("the division of host memory stays: %s", error)
                return
            except HostMemoryError as error:
                _log.info("the division of host memory stays: %s", error)
                self._division.stop()
            else:
                sizes = format_size(plan.total), format_size(plan.lent_bytes)
                _log.info("host memory: %s are planned, %s are lent to activations", *sizes)
        self._asked = wanted
        if self._division.ended:
            self._division = None

    # ---- changing the plan ----------------------------------------------------------------------------------

    def _change_plan(self, plan: Plan) -> None:
        before = self.plan
        # A copy under way takes memory on the device, and chunks of staging here.
        for copies in self._copies:
            copies.wait_copied()
        try:
            self._make_way(plan)
        except PassError:
            self._streamer.follow(before)
            raise
        try:
            self._resize(plan)
        except Exception:
            # The system refuses more memory: go on with the plan of before.
            self._make_way(before)
            self._resize(before)
            raise
        if plan.budget != before.budget:
            self.nbytes = plan.budget
        configure_malloc(plan)

    def _make_way(self, plan: Plan) -> None:
        """Evict weights, gradients and states that `plan` has no room for, and drop activations."""
        self.kept.limit(plan.activations_bytes)
        self._streamer.change_plan(plan)
        chunks = plan.staging.count + plan.staging_cache.count - STAGING_RESERVE
        with self._timeline.waiting("ssd_write"):
            self._runtime.gradients.spill_gradients(chunks)
        if self._runtime.memory.chunks_in_use > chunks:
            raise PassError(
                "inputs of layers wait in memory for a backward pass: call backward(), or let go of the loss, before "
                "the host memory becomes less"
            )
        self.plan = plan
        tensors = [tensor for unit in self._units for tensor in unit.tensors]
        share_room(plan, tensors)
        tickets = []
        for tensor in tensors:
            # Lent memory goes back to the system in one piece, and so in whole huge pages.
            kept = 0 if plan.lends else tensor.kept_elements
            planes = [(plane.id, plane.plane.bytes(kept)) for plane in tensor.planes.values()]
            if planes:
                tickets.append(self._runtime.units.release_states(tensor.unit.index, planes))
        with self._timeline.waiting("ssd_write"):
            for ticket in tickets:
                ticket.wait()

    def _resize(self, plan: Plan) -> None:
        """Commit and release memory of the arena as `plan` has it. Raises HostMemoryError where the system refuses."""
        assert plan.most is not None
        # Buffers of one size, in whole pages, are one kind.
        counts = {round_up(line.nbytes, PAGE_BYTES): 0 for line in plan.most.buffers}
        for line in plan.buffers:
            counts[round_up(line.nbytes, PAGE_BYTES)] += line.count
        states = plan.states.count if plan.most.states.nbytes else None  # A frozen model has none.
        self._runtime.memory.resize(list(counts.items()), plan.staging.count + plan.staging_cache.count, states)
