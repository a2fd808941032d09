"""The backend of the states of an offloaded model's parameter: the model's store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.autograd.binding import outdate_graphs
from memascend.autograd.proxies import applied_gradient
from memascend.errors import MemascendError
from memascend.optim.state_allocation import free_unused_states, missing_planes
from memascend.optim.state_backend import StateBackend, has_tensors
from memascend.optim.states import load_states, read_states
from memascend.streaming.updates import Segment

if TYPE_CHECKING:
    from torch import nn

    from memascend._memascend import Rule, Runtime, StepScalars
    from memascend.layout.units import ParameterEntry
    from memascend.optim.schedule import Schedule
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import BackendContext
    from memascend.session.session import Session


class OffloadedState(StateBackend):
    """A parameter of an offloaded model: weight, gradient and states are on the model's store."""

    session: Session

    def __init__(
        self, backends: BackendContext, parameter: nn.Parameter, session: Session, place: ParameterEntry
    ) -> None:
        """Stand for the state of the parameter of `place`, in the model that `session` offloads."""
        super().__init__(backends, parameter)
        self.session = session
        self.place = place
        self.gradient_factor = session.gradient_factor

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return self.place.name

    @property
    def location(self) -> tuple[Runtime, ParameterEntry]:
        """The model's store, and the parameter's entry there."""
        return self.session.runtime, self.place

    @property
    def unscaled_by_update(self) -> bool:
        """Always: the gradient is on the store."""
        return True

    @property
    def captures(self) -> tuple[int, int]:
        """How many gradients the store has taken over, and how often it has added to one."""
        return self.place.gradient.captured, self.place.gradient.added

    @property
    def is_owner(self) -> bool:
        """Whether the states on the store are this optimizer's."""
        return self.place.states.owner is self.backends.optimizer

    def check(self) -> None:
        """Raise MemascendError if the model was closed."""
        if self.session.closed:
            raise MemascendError(
                f"{self.name} belongs to a model that was closed: make an optimizer of the parameters of an open one"
            )

    def take_gradient(self) -> None:
        """Take over a gradient that the program has assigned, and wait for one on its way from a device."""
        gradients, place = self.session.gradients, self.place
        gradients.settle(place)
        gradient = self.parameter.grad
        if place.gradient.updated_in_backward:
            raise MemascendError(applied_gradient(place.name))
        if gradient is not place.gradient.marker:
            self.check_gradient()
            gradients.capture(place, accumulate=False)
        elif not place.gradient.held:
            raise MemascendError(
                f"the values of the gradient of {place.name} are gone: step() or zero_grad() has consumed them, or a "
                "backward pass failed; call zero_grad(), and backward() again, before the next step()"
            )
        gradients.finish(place)

    def gradient_stats(self) -> tuple[float, bool]:
        """Return the sum and the check that were made when the gradient was taken over."""
        return self.session.gradients.stats(self.place)

    def clear_gradient(self, set_to_none: bool) -> None:
        """Discard the gradient on the store, or set it to zero."""
        gradients, place, gradient = self.session.gradients, self.place, self.parameter.grad
        if not set_to_none and gradient is place.gradient.marker:
            gradients.fill(place, 0.0)
            return
        gradients.clear(place)
        if not set_to_none:
            self.parameter.grad = gradient  # a tensor of the program's, which PyTorch sets to zero

    def prepare(self, rule: Rule, room: StateAllocation) -> None:
        """Ask for room on the model's store, and claim states that no other optimizer has."""
        place = self.place
        room.add(self.session, place.tensor, rule)
        if not place.states.claimed:
            place.states.rule = rule
        elif place.states.owner is None:  # its optimizer was deleted
            self.restart(rule)

    def prepare_step(self, rule: Rule, room: StateAllocation) -> None:
        """Become the owner of the states, and request the room of those that are missing."""
        place = self.place
        if not self.is_owner:
            if place.states.claimed and self.has_stepped:
                raise MemascendError(
                    f"{place.name} has been trained by another optimizer since: its states on the store are "
                    "that one's; load a state_dict to go on with this one"
                )
            self.restart(rule)
        place.states.rule = rule
        if missing_planes(place.tensor, rule) or self.session not in self.backends.sessions:
            room.add(self.session, place.tensor, rule)

    def take_in(self, rule: Rule) -> None:
        """Write states to the model's store that were in memory before the parameter was offloaded."""
        state, last_rule = self.state, self.last_rule
        state_stores = self.backends.state_stores
        was_on_own_store = state_stores is not None and state_stores.location(self.parameter) is not None
        if last_rule is not None and was_on_own_store and not self.place.states.made:
            raise MemascendError(
                f"{self.name} was offloaded while its states were on the optimizer's own store: make a new optimizer "
                "and load the state_dict that this one gave before"
            )
        if has_tensors(state):
            self.session.refuse_ranks("an optimizer with states from before memascend.offload", "make it after that")
        if last_rule is None or not any(plane.name in state for plane in last_rule.planes):
            return
        load_states(self.parameter, rule, read_states(self.parameter, last_rule, state, None), self.location)
        self.mark_made(rule)
        on_store = {plane.name for plane in rule.planes}
        rest = {name: value for name, value in state.items() if name not in on_store}
        self.backends.optimizer.state[self.parameter] = rest

    def restart(self, rule: Rule) -> None:
        """Become the owner of the states, and discard those of another optimizer."""
        session, place = self.session, self.place
        session.commit_log.wait_committed()  # the generation being committed still has them
        place.states.claim(self.backends.optimizer, rule)
        place.states.made.clear()
        if place.states.moments is not None:
            session.runtime.store.remove_tensor(place.states.moments.id)
            place.states.moments = None
        session.streamer.updates.apply(place.tensor.unit)
        session.runtime.units.wait_unit(place.tensor.unit.index)
        free_unused_states(session.runtime, place.tensor)

    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return which planes the store has no values of."""
        return [plane not in self.place.states.made for plane in rule.planes]

    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update that runs when the unit is next fetched."""
        place = self.place
        first, start, count = place.stored
        segment = Segment(start, count, rule, scalars, fresh, first_element=first)
        schedule.add_deferred(self.session, place, segment)
        return segment

    def count(self, rule: Rule) -> None:
        """Note that a step was taken: it consumes the gradient, and graphs made before it are out of date.

        `parameter.grad` goes on standing for the gradient until `zero_grad`, but refuses to be read or added to.
        """
        super().count(rule)
        outdate_graphs(self.place)
        self.session.gradients.consume(self.place)
