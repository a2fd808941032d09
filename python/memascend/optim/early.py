"""Steps that the backward pass takes ahead of `optimizer.step()`: which it may take, and that `step` confirms them.

Whatever can be known to need a gradient before `step` makes its parameter wait: a first step, states that are to be
made, a policy for gradients that are not finite, and a gradient that the program has used before
(`GradientState.awaits_step`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import MemascendError
from memascend.offloading.stand_ins import early_gradient
from memascend.optim.on_model import OnModel
from memascend.optim.room import missing_planes
from memascend.residency.updates import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memascend._memascend import StepScalars
    from memascend.offloading.session import Session
    from memascend.optim.home import Home
    from memascend.optim.homes import Homes
    from memascend.optim.rules import Algorithm


class EarlySteps:
    """The parameters of one optimizer that the backward pass has updated since the last `step`."""

    def __init__(self, homes: Homes) -> None:
        """Begin without any."""
        self._homes = homes
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
        home = self._homes.of(parameter)
        if group is None or not isinstance(home, OnModel) or not (home.is_owner and home.has_stepped):
            return None
        rule = algorithm.rule(group, parameter)
        if home.was_reset(rule):
            return None
        fresh = home.fresh_planes(rule)
        if home.last_rule != rule or any(fresh) or missing_planes(home.place.tensor, rule):
            return None
        scalars = self._constants(algorithm, group, home, home.next_step)
        return Segment(home.place.start, home.place.numel, rule, scalars, fresh, addresses)

    def prepare(self, algorithm: Algorithm, parameter: nn.Parameter, segment: Segment) -> None:
        """Give an update that is about to be started its factors, which depend on the whole gradient."""
        algorithm.find_factors(self._groups[parameter], self._homes.of(parameter), segment, 1.0)

    def take(self, algorithm: Algorithm, parameter: nn.Parameter, segment: Segment) -> None:
        """Note that an update was started."""
        options = algorithm.factor_options(self._groups[parameter])
        self._scalars[parameter] = segment.scalars, options
        home = self._homes.of(parameter)
        # The native side finds the factors of a gradient that arrives in pieces, and writes the moments then.
        moments = home.place.states.moments if segment.host is None and isinstance(home, OnModel) else None
        if moments is not None:
            moments.written = True
        home.count(segment.rule)

    def confirm(self, algorithm: Algorithm, group: dict[str, Any], home: Home, nonfinite: str) -> OnModel | None:
        """Return the home of a parameter that is ahead of the step that is being taken.

        Raises MemascendError where its update is another one than the step's.
        """
        taken = self._scalars.get(home.parameter)
        if taken is None:
            return None
        assert isinstance(home, OnModel), "only parameters of offloaded models are updated early"
        if home.parameter.grad is not home.place.gradient.marker:
            raise MemascendError(early_gradient(home.name))
        rule = algorithm.rule(group, home.parameter)
        constants = self._constants(algorithm, group, home, home.next_step - 1)
        same = rule == home.last_rule and (constants, algorithm.factor_options(group)) == taken
        if not same or nonfinite != "propagate":
            raise MemascendError(
                f"options of the optimizer have changed since backward(), which has updated {home.name} with those of "
                "then (update='backward'): change them after step() and before the next backward(), or offload with "
                "update='forward'. memascend.resume goes on from the last durable step"
            )
        early = home.session.gradients.early
        assert early is not None, "the session has updated the parameter early"
        norm = early.finish(home.place)
        if norm is not None:
            self._homes.optimizer.state[home.parameter]["norm"] = norm
        return home

    def confirmed(self, homes: list[OnModel]) -> list[Session]:
        """Note that the step was taken, with the parameters of `homes` ahead of it; returns their models."""
        self._scalars.clear()
        sessions = list(dict.fromkeys(home.session for home in homes))
        for session in sessions:
            assert session.gradients.early is not None, "the session has updated parameters early"
            session.gradients.early.confirm([home.place for home in homes if home.session is session])
        return sessions

    def check_complete(self, homes: list[OnModel]) -> None:
        """Raise MemascendError where a parameter is ahead of a step that leaves it out: its gradient was discarded."""
        left = self._scalars.keys() - {home.parameter for home in homes}
        if left:
            raise MemascendError(early_gradient(self._homes.of(next(iter(left))).name))

    def _constants(self, algorithm: Algorithm, group: dict[str, Any], home: Home, step: int) -> StepScalars:
        return algorithm.scalars(group, step, False, 1.0, self._homes.seed(group, home.parameter))
