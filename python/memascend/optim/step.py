"""One optimizer step: every gradient is checked, the step may be left out, room is made, and updates are scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import MemascendError
from memascend.optim.room import Room
from memascend.optim.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from memascend._memascend import Rule, StepScalars
    from memascend.optim.factors import GradientFactors
    from memascend.optim.homes import Home, Homes

#: The values of `nonfinite`: what becomes of a step whose gradients are not all finite.
NONFINITE = ("propagate", "skip", "raise")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The arithmetic of an optimizer, which depends on the options of a parameter's group."""

    #: `rule(group, parameter)`: the kernels and states of an update.
    rule: Callable[[dict[str, Any], nn.Parameter], Rule]
    #: `scalars(group, step, begins, grad_scale, seed)`: the constants of step number `step`.
    scalars: Callable[[dict[str, Any], int, bool, float, int], StepScalars]


@dataclass(slots=True)
class Part:
    """One parameter in a step."""

    group: dict[str, Any]
    home: Home
    rule: Rule


class Step:
    """One step of an optimizer on every parameter with a gradient.

    The phases run in order: `left_out`, `plan`, `carry_out`. Only the last one changes weights and states, and nothing
    is refused there.
    """

    def __init__(
        self,
        homes: Homes,
        factors: GradientFactors,
        algorithm: Algorithm,
        with_gradient: Iterable[tuple[dict[str, Any], nn.Parameter]],
    ) -> None:
        """Check every parameter and complete its gradient."""
        self._homes = homes
        self._factors = factors
        self._algorithm = algorithm
        self._parts: list[Part] = []
        for group, parameter in with_gradient:
            home = homes.of(parameter)
            home.take_gradient()
            rule = algorithm.rule(group, parameter)
            home.check_rule(rule)
            self._parts.append(Part(group, home, rule))

    def left_out(self, nonfinite: str) -> bool:
        """Whether the policy `nonfinite` leaves the step out. Raises MemascendError if the policy is to raise."""
        if nonfinite == "propagate":
            return False
        home = next((part.home for part in self._parts if part.home.gradient_stats()[1]), None)
        if home is None:
            return False
        if nonfinite == "raise":
            raise MemascendError(
                f"the gradient of {home.name} is not finite, and the optimizer's policy is nonfinite='raise': "
                "nothing has changed; zero_grad() discards the gradients"
            )
        return True

    def plan(self) -> Schedule:
        """Make the room that the step takes and return its updates."""
        schedule = Schedule()
        for session in {part.home.session for part in self._parts}:
            if session is not None:
                session.generations.settle(self._homes.optimizer)
        room = Room()
        for part in self._parts:
            part.home.prepare_step(part.rule, room)
        self._homes.make(room)
        for part in self._parts:
            part.home.take_in(part.rule)
        for part in self._parts:
            self._add_work(part, schedule)
        schedule.let_go()
        return schedule

    def _add_work(self, part: Part, schedule: Schedule) -> None:
        group, home = part.group, part.home
        # The number keeps two parameters from rounding by the same random numbers.
        seed = int(group["seed"]) << 32 | self._homes.numbers[home.parameter]
        factor = self._factors.of(home)

        def scalars(step: int, begins: bool) -> StepScalars:
            return self._algorithm.scalars(group, step, begins, factor, seed)

        home.work(part.rule, scalars, schedule)

    def carry_out(self, schedule: Schedule) -> None:
        """Take the step: defer the updates of offloaded models, and run those of ordinary parameters."""
        schedule.defer()
        for part in self._parts:
            part.home.count(part.rule)
        self._factors.clear()
        schedule.run()
        for session in schedule.sessions:
            session.generations.stepped(self._homes.optimizer)
            session.streamer.start_next_pass()
