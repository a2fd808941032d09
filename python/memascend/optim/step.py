"""One optimizer step: every gradient is checked, the step may be left out, room is made, and updates are scheduled.

A step is taken as a whole or not at all. It checks, captures gradients that were put there by hand, makes room and
computes every constant first: whatever can be refused is refused there. Then it is carried out, with Ctrl-C put off to
its end.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import raw_tensor_access
from memascend.optim.schedule import Schedule
from memascend.optim.state_allocation import StateAllocation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memascend._memascend import Rule, StepScalars
    from memascend.optim.gradient_scaling import GradientFactors
    from memascend.optim.in_backward import BackwardSteps
    from memascend.optim.offloaded_state import OffloadedState
    from memascend.optim.rules import Algorithm
    from memascend.optim.state_backend import StateBackend
    from memascend.optim.state_backends import StateBackends
    from memascend.session.session import Session
    from memascend.streaming.updates import Segment

#: Gradients that are in work together where factors depend on the whole gradient: one is read or written while
#: another is computed.
FACTORS_AT_ONCE = 2
#: The values of `nonfinite`, the policy for a step whose gradients are not all finite.
NONFINITE = ("propagate", "skip", "raise")


@dataclass(slots=True)
class SteppedParameter:
    """One parameter in a step."""

    group: dict[str, Any]
    backend: StateBackend
    rule: Rule


class OptimizerStep:
    """One step of an optimizer on every parameter with a gradient.

    The phases run in order: `left_out`, `plan`, `carry_out`. Only the last one changes weights and states, and nothing
    is refused there.
    """

    def __init__(
        self,
        backends: StateBackends,
        factors: GradientFactors,
        algorithm: Algorithm,
        with_gradient: Iterable[tuple[dict[str, Any], nn.Parameter]],
        in_backward: BackwardSteps,
        nonfinite: str,
    ) -> None:
        """Check every parameter and complete its gradient. `nonfinite` is one of `NONFINITE`."""
        self._backends = backends
        self._factors = factors
        self._algorithm = algorithm
        self._in_backward = in_backward
        self._nonfinite = nonfinite
        self._parts: list[SteppedParameter] = []
        #: The arguments of `Algorithm.find_joined_factors`.
        self._joined: list[tuple[dict[str, Any], StateBackend, Segment, float]] = []
        #: Parameters whose states the program has discarded since their last step, and the rules that they begin with.
        self._reset: list[tuple[StateBackend, Rule]] = []
        #: Parameters that the backward pass has updated.
        self._ahead: list[OffloadedState] = []
        for group, parameter in with_gradient:
            backend = backends.of(parameter)
            if (ahead := in_backward.confirm(algorithm, group, backend, nonfinite)) is not None:
                self._ahead.append(ahead)
                continue
            backend.take_gradient()
            rule = algorithm.rule(group, parameter)
            if backend.was_reset(rule):
                self._reset.append((backend, rule))
            backend.check_rule(rule)
            self._parts.append(SteppedParameter(group, backend, rule))
        in_backward.check_complete(self._ahead)

    @property
    def takes_any(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._parts or self._ahead)

    def left_out(self) -> bool:
        """Return whether the policy leaves the step out. Raises MemascendError if the policy is to raise."""
        if self._nonfinite == "propagate":
            return False
        backends = [part.backend for part in self._parts]
        stats = self._backends.gradient_stats(backends)
        backend = next((backend for backend, (_, non_finite) in zip(backends, stats, strict=True) if non_finite), None)
        if backend is None:
            return False
        if self._nonfinite == "raise":
            raise MemascendError(
                f"the gradient of {backend.name} is not finite, and the optimizer's policy is nonfinite='raise': "
                "nothing has changed; zero_grad() discards the gradients"
            )
        return True

    def plan(self) -> Schedule:
        """Make the room that the step takes and return its updates."""
        schedule = Schedule()
        for session in {part.backend.session for part in self._parts} | set(self._beside):
            if session is not None:
                session.commit_log.wait_committed(self._backends.optimizer)
        for backend, rule in self._reset:
            backend.restart(rule)
            self._backends.rules.pop(backend.parameter, None)
        room = StateAllocation()
        for part in self._parts:
            part.backend.prepare_step(part.rule, room)
            self._algorithm.request(part.group, part.backend, room)
        self._backends.make(room)
        for part in self._parts:
            part.backend.take_in(part.rule)
        whole = self._algorithm.factor_options
        self._backends.bring((part.backend, whole(part.group) is not None) for part in self._parts)
        for part in self._parts:
            self._add_work(part, schedule)
        schedule.release()
        return schedule

    def _add_work(self, part: SteppedParameter, schedule: Schedule) -> None:
        group, backend = part.group, part.backend
        seed = self._backends.seed(group, backend.parameter)
        factor = self._factors.of(backend)

        def scalars(step: int, begins: bool) -> StepScalars:
            return self._algorithm.scalars(group, step, begins, factor, seed)

        segment = backend.work(part.rule, scalars, schedule)

        def find_factors() -> None:
            with raw_tensor_access():
                self._algorithm.find_factors(group, backend, segment, factor)

        if self._algorithm.factor_options(group) is None:
            return
        if backend.session is not None and backend.session.membership.divides:
            self._joined.append((group, backend, segment, factor))
        else:
            schedule.first.append(find_factors)

    def carry_out(self, schedule: Schedule) -> None:
        """Take the step: defer updates of offloaded models, and run updates of ordinary parameters."""
        if schedule.first:
            with (
                span("find factors"),
                ThreadPoolExecutor(FACTORS_AT_ONCE, thread_name_prefix="memascend-factors") as pool,
            ):
                for done in [pool.submit(find_factors) for find_factors in schedule.first]:
                    done.result()
        if self._joined:
            with span("find factors"), raw_tensor_access():
                self._algorithm.find_joined_factors(self._joined)
        schedule.defer()
        for part in self._parts:
            part.backend.count(part.rule)
        self._factors.clear()
        schedule.run(self._backends.copies)
        sessions = [*self._in_backward.confirmed(self._ahead), *schedule.sessions, *self._beside]
        for session in dict.fromkeys(sessions):
            session.stepped(self._backends.optimizer)

    @property
    def _beside(self) -> list[Session]:
        """The models whose generations have states in memory, if the step changes any parameter."""
        return [session for session in self._backends.beside if not session.closed] if self.takes_any else []
