"""The host memory that one session holds: the plan, and its change between passes, on request or with the machine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
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
from memascend.memory_plan.host import check_available, replan
from memascend.memory_plan.lines import ACTIVATIONS_BYTES_MIN, Plan
from memascend.memory_plan.monitor import MemoryMonitor, growth_lock
from memascend.memory_plan.transfers import lend
from memascend.session.runtime import configure_malloc
from memascend.session.spare_memory import SpareMemory, StepCost
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


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a run has spent so far: steps, and seconds."""

    steps: int
    seconds: float
    waits: float
    recomputed: float
    elements: int

    def since(self, before: _Spent) -> StepCost:
        """Return the cost of one step of those since `before`."""
        steps = self.steps - before.steps
        return StepCost(
            (self.seconds - before.seconds) / steps,
            (self.waits - before.waits) / steps,
            (self.recomputed - before.recomputed) / steps,
            (self.elements - before.elements) // steps,
        )


class CopiesToHost(Protocol):
    """Copies from a device into staging chunks of host memory."""

    def wait_copied(self) -> None:
        """Wait until no copy from the device is under way."""


class Steps(Protocol):
    """The steps of a run."""

    #: How many were taken.
    steps: int
    #: Of how many one is durable: 0 if none is, None before that is settled.
    period: int | None


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
        #: Decides what is lent to them; None where nothing is.
        self._spare = SpareMemory() if plan.lends else None
        self._spare_for = spare_memory
        self._steps = steps
        #: What had been spent when the present step began.
        self._began: _Spent | None = None
        self.kept.measures = plan.lends
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

    def set(self, nbytes: int) -> None:
        """Change the ceiling, and keep it; see `memascend.set_host_memory`."""
        self._check_elastic()
        plan = replan(self.plan, self._units, nbytes)
        if plan.total > self.plan.total:
            check_available(plan, self.plan.total)
        with self._streamer.turns.take("set_host_memory"):
            self._change_plan(plan)
        self._began = None
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
        if grad:
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
        if self.plan.most is None:
            raise MemascendError(
                "the model was opened with a fixed budget: give host_memory_max beside host_memory, the most that it "
                "may become, or host_memory='auto'"
            )

    # ---- states and activations -----------------------------------------------------------------------------

    @property
    def lent_bytes(self) -> int:
        """Bytes of the plan's room for states that activations have."""
        return replace(self.plan.states, count=self.plan.lent).total

    def _divide(self) -> None:
        """Before a pass with gradients, divide what the plan has for states between states and activations."""
        spare = self._spare
        if spare is None or self._streamer.depth or in_backward():
            return
        spent, began = self._spent(), self._began
        if began is None or spent.steps == began.steps:
            self._began = began or spent
            if self._spare_for == "auto":
                return
        else:
            self._began = spent
        if self._spare_for == "activations":
            spare.share = 1.0
        elif self._steps.period != 1:
            # States that stay are not written where not every step is durable: drives wear, whatever time it spares.
            spare.end(0.0)
        elif began is not None:
            spare.after(spent.since(began))
        lent = lend(self.plan, int(spare.share * self._wanted_bytes()))
        if lent.lent != self.plan.lent:
            self._lend(lent)
        if spare.found and not spare.share:
            self._stop_dividing()

    def _wanted_bytes(self) -> int:
        """Return the bytes that the activations of a pass would take of the memory for states."""
        wanted = self.kept.wanted_bytes
        return 0 if wanted < ACTIVATIONS_BYTES_MIN else max(0, wanted - (self.plan.left_bytes - self.lent_bytes))

    def _spent(self) -> _Spent:
        seconds = self._timeline.seconds()
        return _Spent(
            self._steps.steps,
            time.perf_counter(),
            seconds["ssd_read"] + seconds["ssd_write"],
            self.kept.recomputed_ns / 1e9,
            self.kept.elements,
        )

    def _lend(self, plan: Plan) -> None:
        try:
            with uninterrupted():
                self._change_plan(plan)
        except PassError as error:
            _log.debug("what is lent to activations stays: %s", error)
        except HostMemoryError as error:
            self._stop_dividing()
            _log.info("what is lent to activations stays: %s", error)
        else:
            sizes = format_size(plan.states.total), format_size(self.lent_bytes)
            _log.info("host memory beyond the weights: %s hold states, %s are lent to activations", *sizes)

    def _stop_dividing(self) -> None:
        self._spare, self.kept.measures = None, False

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
        except MemascendError:
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
            # What is lent goes back to the system in one piece, and so in whole huge pages.
            kept = 0 if plan.lends else tensor.kept_elements
            planes = [(plane.id, plane.plane.bytes(kept)) for plane in tensor.planes.values()]
            if planes:
                tickets.append(self._runtime.units.release_states(tensor.unit.index, planes))
        with self._timeline.waiting("ssd_write"):
            for ticket in tickets:
                ticket.wait()

    def _resize(self, plan: Plan) -> None:
        """Commit and release memory of the arena as `plan` has it. Raises HostMemoryError where the system refuses."""
        if plan.most is None:
            self._runtime.memory.resize(states_count=plan.states.count)
            return
        # Buffers of one size, in whole pages, are one kind.
        counts = {round_up(line.nbytes, PAGE_BYTES): 0 for line in plan.most.buffers}
        for line in plan.buffers:
            counts[round_up(line.nbytes, PAGE_BYTES)] += line.count
        states = plan.states.count if plan.most.states.nbytes else None  # A frozen model has none.
        self._runtime.memory.resize(list(counts.items()), plan.staging.count + plan.staging_cache.count, states)
