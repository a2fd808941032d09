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
from memascend.layout.units import as_held
from memascend.optim.room import Room
from memascend.optim.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memascend._memascend import Rule, StepScalars
    from memascend.optim.early import EarlySteps
    from memascend.optim.factors import GradientFactors
    from memascend.optim.home import Home
    from memascend.optim.homes import Homes
    from memascend.optim.on_model import OnModel
    from memascend.optim.rules import Algorithm
    from memascend.residency.updates import Segment

#: Gradients that are in work together where factors depend on the whole gradient: one is read or written while
#: another is computed.
FACTORS_AT_ONCE = 2
#: The values of `nonfinite`, the policy for a step whose gradients are not all finite.
NONFINITE = ("propagate", "skip", "raise")


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
        early: EarlySteps,
        nonfinite: str,
    ) -> None:
        """Check every parameter and complete its gradient. `nonfinite` is one of `NONFINITE`."""
        self._homes = homes
        self._factors = factors
        self._algorithm = algorithm
        self._early = early
        self._nonfinite = nonfinite
        self._parts: list[Part] = []
        #: The arguments of `Algorithm.find_joined_factors`.
        self._joined: list[tuple[dict[str, Any], Home, Segment, float]] = []
        #: Parameters whose states the program has given up since their last step, and the rules that they begin with.
        self._reset: list[tuple[Home, Rule]] = []
        #: Parameters that the backward pass has updated.
        self._ahead: list[OnModel] = []
        for group, parameter in with_gradient:
            home = homes.of(parameter)
            if (ahead := early.confirm(algorithm, group, home, nonfinite)) is not None:
                self._ahead.append(ahead)
                continue
            home.take_gradient()
            rule = algorithm.rule(group, parameter)
            if home.was_reset(rule):
                self._reset.append((home, rule))
            home.check_rule(rule)
            self._parts.append(Part(group, home, rule))
        early.check_complete(self._ahead)

    @property
    def takes_any(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._parts or self._ahead)

    def left_out(self) -> bool:
        """Return whether the policy leaves the step out. Raises MemascendError if the policy is to raise."""
        if self._nonfinite == "propagate":
            return False
        homes = [part.home for part in self._parts]
        stats = self._homes.gradient_stats(homes)
        home = next((home for home, (_, non_finite) in zip(homes, stats, strict=True) if non_finite), None)
        if home is None:
            return False
        if self._nonfinite == "raise":
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
        for home, rule in self._reset:
            home.restart(rule)
            self._homes.rules.pop(home.parameter, None)
        room = Room()
        for part in self._parts:
            part.home.prepare_step(part.rule, room)
            self._algorithm.ask(part.group, part.home, room)
        self._homes.make(room)
        for part in self._parts:
            part.home.take_in(part.rule)
        whole = self._algorithm.factor_options
        self._homes.bring((part.home, whole(part.group) is not None) for part in self._parts)
        for part in self._parts:
            self._add_work(part, schedule)
        schedule.let_go()
        return schedule

    def _add_work(self, part: Part, schedule: Schedule) -> None:
        group, home = part.group, part.home
        seed = self._homes.seed(group, home.parameter)
        factor = self._factors.of(home)

        def scalars(step: int, begins: bool) -> StepScalars:
            return self._algorithm.scalars(group, step, begins, factor, seed)

        segment = home.work(part.rule, scalars, schedule)

        def find_factors() -> None:
            with as_held():
                self._algorithm.find_factors(group, home, segment, factor)

        if self._algorithm.factor_options(group) is None:
            return
        if home.session is not None and home.session.membership is not None:
            self._joined.append((group, home, segment, factor))
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
            with span("find factors"), as_held():
                self._algorithm.find_joined_factors(self._joined)
        schedule.defer()
        for part in self._parts:
            part.home.count(part.rule)
        self._factors.clear()
        schedule.run(self._homes.copies)
        for session in dict.fromkeys([*self._early.confirmed(self._ahead), *schedule.sessions]):
            session.stepped(self._homes.optimizer)
