"""Steps that the backward pass takes ahead of `optimizer.step()`: which it may take, and that `step` confirms them.

Whatever can be known to need a gradient before `step` makes its parameter wait: a first step, states that are to be
made, a policy for gradients that are not finite, and a gradient that the program has used before
(`GradientState.must_wait_for_step`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.autograd.proxies import applied_gradient
from memascend.errors import MemascendError
from memascend.optim.offloaded_state import OffloadedState
from memascend.optim.state_allocation import missing_planes
from memascend.streaming.updates import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memascend._memascend import StepScalars
    from memascend.optim.rules import Algorithm
    from memascend.optim.state_backend import StateBackend
    from memascend.optim.state_backends import StateBackends
    from memascend.session.session import Session


class BackwardSteps:
    """The parameters of one optimizer that the backward pass has updated since the last `step`."""

    def __init__(self, backends: StateBackends) -> None:
        """Begin without any."""
        self._backends = backends
        #: The constants of each update, which `step` must come to as well.
        self._scalars: dict[nn.Parameter, tuple[StepScalars, Any]] = {}
        #: Groups by their parameters, and whether `step` has been called since they were looked up.
        self._groups: dict[nn.Parameter, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        """Return whether any parameter is ahead of `step`."""
        return bool(self._scalars)

    def look_up(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note the groups of a step: the updates of the next backward pass are made with their options."""
        self._groups = {parameter: group for group in groups for parameter in group["params"]}

    def forget(self) -> None:
        """Begin anew: states were loaded, or groups have changed. The next step is not ahead."""
        self._groups.clear()

    def segment(
        self, algorithm: Algorithm, parameter: nn.Parameter, addresses: tuple[int, int] | None
    ) -> Segment | None:
        """Return the next update of a parameter, of weights and a gradient at `addresses`; None: they come in pieces.

        None where the update has to wait for `step`: in the parameter's first step, which makes room for its states,
        and in the program's first step, which shows how the program uses gradients.
        """
        group = self._groups.get(parameter)
        backend = self._backends.of(parameter)
        if group is None or not isinstance(backend, OffloadedState) or not (backend.is_owner and backend.has_stepped):
            return None
        rule = algorithm.rule(group, parameter)
        if backend.was_reset(rule):
            return None
        fresh = backend.fresh_planes(rule)
        if backend.last_rule != rule or any(fresh) or missing_planes(backend.place.tensor, rule):
            return None
        scalars = self._constants(algorithm, group, backend, backend.next_step)
        return Segment(backend.place.start, backend.place.numel, rule, scalars, fresh, addresses)

    def prepare(self, algorithm: Algorithm, parameter: nn.Parameter, segment: Segment) -> None:
        """Give an update that is about to be started its factors, which depend on the whole gradient."""
        algorithm.find_factors(self._groups[parameter], self._backends.of(parameter), segment, 1.0)

    def take(self, algorithm: Algorithm, parameter: nn.Parameter, segment: Segment) -> None:
        """Note that an update was started."""
        options = algorithm.factor_options(self._groups[parameter])
        self._scalars[parameter] = segment.scalars, options
        backend = self._backends.of(parameter)
        # The native side finds the factors of a gradient that arrives in pieces, and writes the moments then.
        moments = backend.place.states.moments if segment.host is None and isinstance(backend, OffloadedState) else None
        if moments is not None:
            moments.written = True
        backend.count(segment.rule)

    def confirm(
        self, algorithm: Algorithm, group: dict[str, Any], backend: StateBackend, nonfinite: str
    ) -> OffloadedState | None:
        """Return the backend of a parameter that is ahead of the step that is being taken.

        Raises MemascendError where its update is another one than the step's.
        """
        taken = self._scalars.get(backend.parameter)
        if taken is None:
            return None
        assert isinstance(backend, OffloadedState), "only offloaded parameters are updated in the backward pass"
        if backend.parameter.grad is not backend.place.gradient.marker:
            raise MemascendError(applied_gradient(backend.name))
        rule = algorithm.rule(group, backend.parameter)
        constants = self._constants(algorithm, group, backend, backend.next_step - 1)
        same = rule == backend.last_rule and (constants, algorithm.factor_options(group)) == taken
        if not same or nonfinite != "propagate":
            raise MemascendError(
                f"options of the optimizer have changed since backward(), which has updated {backend.name} with those "
                "of then (update='backward'): change them after step() and before the next backward(), or offload with "
                "update='forward'. memascend.resume goes on from the last durable step"
            )
        in_backward = backend.session.gradients.in_backward
        assert in_backward is not None, "the session has updated the parameter in the backward pass"
        norm = in_backward.finish(backend.place)
        if norm is not None:
            self._backends.optimizer.state[backend.parameter]["norm"] = norm
        return backend

    def confirmed(self, backends: list[OffloadedState]) -> list[Session]:
        """Note that the step was taken, with the parameters of `backends` ahead of it; returns their models."""
        self._scalars.clear()
        sessions = list(dict.fromkeys(backend.session for backend in backends))
        for session in sessions:
            assert session.gradients.in_backward is not None, "the session has updated parameters in the backward pass"
            session.gradients.in_backward.confirm([backend.place for backend in backends if backend.session is session])
        return sessions

    def check_complete(self, backends: list[OffloadedState]) -> None:
        """Raise MemascendError where a parameter is ahead of a step that leaves it out: its gradient was discarded."""
        left = self._scalars.keys() - {backend.parameter for backend in backends}
        if left:
            raise MemascendError(applied_gradient(self._backends.of(next(iter(left))).name))

    def _constants(self, algorithm: Algorithm, group: dict[str, Any], backend: StateBackend, step: int) -> StepScalars:
        return algorithm.scalars(group, step, False, 1.0, self._backends.seed(group, backend.parameter))
