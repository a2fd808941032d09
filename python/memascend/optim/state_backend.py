"""The backend of one parameter's optimizer state: the questions of a step, and the answers that all share."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.autograd.proxies import copy_of, is_proxy
from memascend.durability.protocols import OptimizerProtocol
from memascend.errors import MemascendError
from memascend.optim.host_copies import HostCopies
from memascend.optim.states import load_states, read_states
from memascend.optim.stored_state import NUMBERS, StoredState

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable

    from torch import nn

    from memascend._memascend import Rule, Runtime, StepScalars
    from memascend.layout.units import ParameterEntry
    from memascend.optim.host_copies import Operands
    from memascend.optim.schedule import Schedule
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_store import OptimizerStateStores
    from memascend.session.session import Session
    from memascend.streaming.updates import Segment


class StateOwner(OptimizerProtocol, Protocol):
    """The optimizer whose parameters have backends; see `memascend.optim.base.OffloadedOptimizer`."""

    #: As in `torch.optim.Optimizer`: the steps of each parameter, and its states in memory.
    state: defaultdict[torch.Tensor, Any]


class BackendContext:
    """The shared state of an optimizer's backends: numbers and rules of parameters, stores, copies of gradients."""

    def __init__(self, optimizer: StateOwner, state_stores: OptimizerStateStores | None = None) -> None:
        """Begin without parameters; with `state_stores`, states of ordinary parameters go there instead of memory."""
        # Weak: in a cycle of references a deleted optimizer would own its states until collected.
        self._optimizer = weakref.ref(optimizer)
        self.state_stores = state_stores
        #: Offloaded models with room for this optimizer's states.
        self.sessions: list[Session] = []
        #: Offloaded models whose generations have states in memory: of parameters that were added to them.
        self.beside: list[Session] = []
        #: The number of each parameter, which selects its random numbers for stochastic rounding.
        self.numbers: dict[nn.Parameter, int] = {}
        #: The rule of the last step taken on each parameter.
        self.rules: dict[nn.Parameter, Rule] = {}
        #: Where gradients and weights of a device pass through host memory.
        self.copies = HostCopies()
        #: Weights and gradients of a device that a step has in host memory before it is carried out.
        self.brought: dict[nn.Parameter, Operands] = {}

    @property
    def optimizer(self) -> StateOwner:
        """The optimizer whose parameters these are."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer outlives its backends"
        return optimizer

    def seed(self, group: dict[str, Any], parameter: nn.Parameter) -> int:
        """Return the seed of a parameter's stochastic rounding: its number keeps two from rounding alike."""
        return int(group["seed"]) << 32 | self.numbers[parameter]


class StateBackend(ABC):
    """Where the optimizer state of one parameter lives, and how a step reaches it.

    Made anew for every use, and not to be kept. A step calls `take_gradient`, `prepare_step`, `take_in`, `work` and
    `count` in this order.
    """

    #: The offloaded model that the parameter belongs to.
    session: Session | None = None
    #: The factor of the gradient in a step, beside the factors of clipping and unscaling.
    gradient_factor: float = 1.0

    def __init__(self, backends: BackendContext, parameter: nn.Parameter) -> None:
        """Stand for the state of `parameter`."""
        self.backends = backends
        self.parameter = parameter

    # ---- the same for every backend -----------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The number of steps and the states in memory, if the parameter has any: an entry of `Optimizer.state`."""
        return self.backends.optimizer.state.get(self.parameter, {})

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has taken a step on the parameter."""
        return "step" in self.state

    @property
    def next_step(self) -> int:
        """The number of the parameter's next step, the first being 1."""
        return int(self.state.get("step", 0)) + 1

    @property
    def last_rule(self) -> Rule | None:
        """The rule of the last step taken on the parameter."""
        return self.backends.rules.get(self.parameter)

    def was_reset(self, rule: Rule) -> bool:
        """Return whether the program has discarded states on a store: it removed, replaced or cleared their entry.

        Raises MemascendError for an entry that was assigned with states of `rule`, which the store's would not be.
        """
        if self.location is None:
            return False
        _, place = self.location
        state, last_rule = self.state, self.last_rule
        made = bool(place.states.made) or place.states.moments is not None
        # A parameter that was in memory before it was offloaded has its states there until they are taken in.
        if (made or last_rule is None) and any(plane.name in state for plane in rule.planes):
            raise MemascendError(
                f"Optimizer.state of {self.name} was assigned, but its states are on the store, and those would be "
                "used: give them by load_state_dict()"
            )
        return made and last_rule is not None and not _goes_on(state)

    def check_rule(self, rule: Rule) -> None:
        """Raise MemascendError if a step by `rule` would lose states that the steps before have made."""
        last = self.last_rule
        if last is None or last == rule or not self.has_stepped:
            return
        replaced = {plane.name for plane in rule.planes if plane not in last.planes}
        lost = [
            plane.name
            for plane in last.planes
            if plane.name in replaced or (plane.name.startswith("master") and plane not in rule.planes)
        ]
        if lost:
            raise MemascendError(
                f"states or master of a group, or the dtype of {self.name}, changed after the first step, "
                f"which would lose {', '.join(lost)}: make a new optimizer and load the state_dict of this one"
            )

    def read(self, rule: Rule) -> dict[str, Any]:
        """Return the parameter's states as `state_dict` shows them."""
        return read_states(self.parameter, rule, self.state, self.location)

    def load(self, rule: Rule, saved: dict[str, Any], step: int) -> None:
        """Take over saved states, for which there is room, and the number of steps that made them."""
        in_memory = load_states(self.parameter, rule, saved, self.location)
        self.mark_made(rule)
        self.backends.rules[self.parameter] = rule
        self.note_step(step, in_memory)

    def note_step(self, step: int, in_memory: dict[str, Any] | None = None) -> None:
        """Set the parameter's entry in `Optimizer.state`: a number of steps, and states if those are in memory."""
        numbers = {name: value for name, value in self.state.items() if name in NUMBERS} | {"step": step}
        stored = self.location is not None
        self.backends.optimizer.state[self.parameter] = (
            StoredState(self.name, numbers) if stored else numbers | (in_memory or {})
        )

    def count(self, rule: Rule) -> None:
        """Note that a step by `rule` was taken; its updates can no longer be refused."""
        step = self.next_step
        self.backends.rules[self.parameter] = rule
        state = self.backends.optimizer.state[self.parameter]
        if _goes_on(state) or self.location is None:
            state["step"] = step
        else:
            self.note_step(step)
        self.mark_made(rule)

    def mark_made(self, rule: Rule) -> None:
        """Note that the states of `rule` have values: a later update reads them instead of beginning with zeros."""
        if self.location is not None:
            _, place = self.location
            place.states.made.update(rule.planes)

    def work(self, rule: Rule, scalars: Callable[[int, bool], StepScalars], schedule: Schedule) -> Segment:
        """Add the parameter's next update to `schedule`, and return it; nothing changes.

        `scalars(step, begins)` returns the constants of step number `step`, where `begins` says that a state is new.
        """
        step = self.next_step
        fresh = self.fresh_planes(rule)
        return self.add_update(rule, scalars(step, step == 1 or any(fresh)), fresh, schedule)

    def check_gradient(self) -> torch.Tensor:
        """Return the gradient. Raises RuntimeError unless it is dense and like its parameter."""
        parameter, gradient = self.parameter, self.parameter.grad
        assert gradient is not None
        if is_proxy(gradient):
            gradient = parameter.grad = copy_of(gradient)  # another parameter's
        if gradient.layout is not torch.strided:
            optimizer_name = type(self.backends.optimizer).__name__
            raise RuntimeError(f"{optimizer_name} does not support sparse gradients: use sparse=False")
        if gradient.shape != parameter.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} for {self.name} of shape {tuple(parameter.shape)}: they "
                "must be alike"
            )
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            raise RuntimeError(
                f"a gradient in {gradient.dtype} on {gradient.device} for {self.name} in {parameter.dtype} on "
                f"{parameter.device}: they must be alike"
            )
        return gradient

    @property
    def gradient_is_away(self) -> bool:
        """Whether the gradient is a tensor of a device, which is measured in host memory."""
        return False

    # ---- questions that each backend answers ----------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The parameter's name in messages."""

    @property
    @abstractmethod
    def location(self) -> tuple[Runtime, ParameterEntry] | None:
        """The store that has the states, and their entry there; None for states in memory."""

    @property
    @abstractmethod
    def unscaled_by_update(self) -> bool:
        """Whether the gradient stays scaled until the update: PyTorch cannot unscale it in place."""

    @property
    @abstractmethod
    def captures(self) -> tuple[int, int] | None:
        """How many gradients a store has taken over and how often it has added to one; None where it keeps none."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError or MemascendError for a parameter that cannot be trained."""

    @abstractmethod
    def take_gradient(self) -> None:
        """Check the parameter and its gradient, and complete the gradient if it is still on its way."""

    @abstractmethod
    def gradient_stats(self) -> tuple[float, bool]:
        """Return the sum of squares of a gradient that was taken, and whether it is not finite."""

    @abstractmethod
    def clear_gradient(self, set_to_none: bool) -> None:
        """Discard the gradient in a store, or set it to zero. `Optimizer.zero_grad` does the same after."""

    @abstractmethod
    def prepare(self, rule: Rule, room: StateAllocation) -> None:
        """Ask for the room of the states that `rule` keeps."""

    @abstractmethod
    def prepare_step(self, rule: Rule, room: StateAllocation) -> None:
        """Claim the states for a step by `rule`, and ask for the room of those that are missing."""

    @abstractmethod
    def take_in(self, rule: Rule) -> None:
        """Bring the states of earlier steps to the room that was made for them."""

    @abstractmethod
    def restart(self, rule: Rule) -> None:
        """Discard all states: the parameter begins anew, by `rule`, with its next gradient."""

    @abstractmethod
    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return for each of the rule's planes whether it has no values yet, so that it begins as zeros."""

    @abstractmethod
    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update by `rule` to `schedule`, and return it."""


def _goes_on(state: dict[str, Any]) -> bool:
    """Return whether steps have made an entry, and the program has not given it up."""
    return not state.cleared if isinstance(state, StoredState) else has_tensors(state)


def has_tensors(state: dict[str, Any]) -> bool:
    """Return whether an entry of `Optimizer.state` has states in memory."""
    return any(isinstance(value, torch.Tensor) for name, value in state.items() if name not in NUMBERS)
