"""The three homes of a parameter's optimizer state: a model's store, a store of the optimizer's own, and memory.

A step asks the home to prepare, to work and to load, and does not look which one it is.

A place knows which of its states were made, and by which optimizer. A segment says for each plane whether it is new: a
new plane counts as zeros, whatever lies on the SSD. So parameters of a pack may begin in different steps, and begin
anew when a loaded dictionary has no states for them. A second optimizer begins anew with its first step, the planes
that only the first one kept are freed, and the first is told if it steps again. An fp16 weight that is not its master
rounded becomes the master: a master needs no making, and weights that the user sets are not lost.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.durable.protocols import Optimizer
from memascend.errors import MemascendError
from memascend.layout.units import DTYPE_NAMES
from memascend.offloading.places import place_of
from memascend.offloading.stand_ins import copy_of, early_gradient, is_stand_in
from memascend.optim.host_copies import HostCopies, Operands
from memascend.optim.room import allocate_states, free_unused_states, make_room, missing_planes
from memascend.optim.states import load_states, read_states
from memascend.optim.stored_state import NUMBERS, StoredState
from memascend.residency.updates import Segment

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from memascend._memascend import Rule, Runtime, StepScalars
    from memascend.layout.units import Place
    from memascend.offloading.session import Session
    from memascend.optim.own_store import OwnStores
    from memascend.optim.room import Room
    from memascend.optim.schedule import Schedule


class StateOwner(Optimizer, Protocol):
    """The optimizer whose parameters have homes; see `memascend.optim.base.OffloadedOptimizer`."""

    #: As in `torch.optim.Optimizer`: the steps of each parameter, and its states in memory.
    state: defaultdict[torch.Tensor, Any]


class Homes:
    """Where the states of one optimizer's parameters live, and the rule of each parameter's last step."""

    def __init__(self, optimizer: StateOwner, own_stores: OwnStores | None = None) -> None:
        """Begin without parameters; with `own_stores`, states of ordinary parameters go there instead of memory."""
        # Weak: in a cycle of references a deleted optimizer would own its states until collected.
        self._optimizer = weakref.ref(optimizer)
        self.own_stores = own_stores
        #: Offloaded models with room for this optimizer's states.
        self.sessions: list[Session] = []
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
        assert optimizer is not None, "the optimizer outlives its homes"
        return optimizer

    def seed(self, group: dict[str, Any], parameter: nn.Parameter) -> int:
        """Return the seed of a parameter's stochastic rounding: its number keeps two from rounding alike."""
        return int(group["seed"]) << 32 | self.numbers[parameter]

    @property
    def on_drives(self) -> bool:
        """Whether any state is on a drive."""
        return bool(self.sessions) or (self.own_stores is not None and self.own_stores.any_made)

    def of(self, parameter: nn.Parameter) -> Home:
        """Return a parameter's home as it is now: the parameter may be offloaded, or its model closed, later."""
        session_and_place = place_of(parameter)
        if session_and_place is not None:
            return OnModel(self, parameter, *session_and_place)
        if self.own_stores is not None:
            return OnStore(self, parameter, self.own_stores)
        return InMemory(self, parameter)

    def make(self, room: Room) -> None:
        """Make the room that parameters have asked for."""
        for session, tensors in room.on_sessions.items():
            if session.membership is not None and not self.optimizer.trains_only(session):
                session.refuse_ranks(
                    "training other parameters with the same optimizer",
                    "add adapters before memascend.offload, and have an optimizer for each model",
                )
            make_room(session, tensors, room.moments[session], self.optimizer)
            if session not in self.sessions:
                self.sessions.append(session)
            session.generations.join(self.optimizer)
        if room.on_own_store:
            assert self.own_stores is not None
            self.own_stores.reserve(room.on_own_store)

    def bring(self, homes: Iterable[tuple[Home, bool]]) -> None:
        """Copy weights and gradients of a device to host memory, for updates on a store of the optimizer's own.

        Beside each home stands whether something is found from the whole gradient before the update.
        """
        away = [home for home, whole in homes if home.gradient_is_away and (whole or isinstance(home, OnStore))]
        operands = self.copies.operands([(home.parameter, home.check_gradient()) for home in away])
        self.brought = {each.parameter: each for each in operands}

    def gradient_stats(self, homes: Sequence[Home]) -> list[tuple[float, bool]]:
        """Return what `Home.gradient_stats` does of each, with one wait for many gradients of a device."""
        away = [home for home in homes if home.gradient_is_away]
        measured = dict(zip(away, self.copies.stats([home.check_gradient() for home in away]), strict=True))
        return [measured[home] if home in measured else home.gradient_stats() for home in homes]

    def flush(self) -> None:
        """Apply deferred updates, and wait until all states are on the drives."""
        for session in self.sessions:
            if not session.closed:
                session.flush()
        if self.own_stores is not None:
            self.own_stores.flush()


class Home(ABC):
    """Where the optimizer state of one parameter lives, and how a step reaches it.

    Made anew for every use, and not to be kept. A step calls `take_gradient`, `prepare_step`, `take_in`, `work` and
    `count` in this order.
    """

    #: The offloaded model that the parameter belongs to.
    session: Session | None = None
    #: The factor of the gradient in a step, beside the factors of clipping and unscaling.
    gradient_factor: float = 1.0

    def __init__(self, homes: Homes, parameter: nn.Parameter) -> None:
        """Stand for the state of `parameter`."""
        self.homes = homes
        self.parameter = parameter

    # ---- the same for every home -----------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The number of steps and the states in memory, if the parameter has any: an entry of `Optimizer.state`."""
        return self.homes.optimizer.state.get(self.parameter, {})

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
        return self.homes.rules.get(self.parameter)

    def was_reset(self, rule: Rule) -> bool:
        """Return whether the program has given up states on a store: it removed, replaced or cleared their entry.

        Raises MemascendError for an entry that was assigned with states of `rule`, which the store's would not be.
        """
        if self.location is None:
            return False
        _, place = self.location
        state, last_rule = self.state, self.last_rule
        made = bool(place.made) or place.moments is not None
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
        self.homes.rules[self.parameter] = rule
        self.note_step(step, in_memory)

    def note_step(self, step: int, in_memory: dict[str, Any] | None = None) -> None:
        """Set the parameter's entry in `Optimizer.state`: a number of steps, and states if those are in memory."""
        numbers = {name: value for name, value in self.state.items() if name in NUMBERS} | {"step": step}
        stored = self.location is not None
        self.homes.optimizer.state[self.parameter] = (
            StoredState(self.name, numbers) if stored else numbers | (in_memory or {})
        )

    def count(self, rule: Rule) -> None:
        """Note that a step by `rule` was taken; its updates can no longer be refused."""
        step = self.next_step
        self.homes.rules[self.parameter] = rule
        state = self.homes.optimizer.state[self.parameter]
        if _goes_on(state) or self.location is None:
            state["step"] = step
        else:
            self.note_step(step)
        self.mark_made(rule)

    def mark_made(self, rule: Rule) -> None:
        """Note that the states of `rule` have values: a later update reads them instead of beginning with zeros."""
        if self.location is not None:
            _, place = self.location
            place.made.update(rule.planes)

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
        if is_stand_in(gradient):
            gradient = parameter.grad = copy_of(gradient)  # another parameter's
        if gradient.layout is not torch.strided:
            optimizer_name = type(self.homes.optimizer).__name__
            raise RuntimeError(f"{optimizer_name} does not support sparse gradients: use sparse=False")
        if gradient.shape != parameter.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} for a parameter of shape {tuple(parameter.shape)}"
            )
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            raise RuntimeError(
                f"a gradient in {gradient.dtype} on {gradient.device} for a parameter in {parameter.dtype} on "
                f"{parameter.device}: they must be alike"
            )
        return gradient

    @property
    def gradient_is_away(self) -> bool:
        """Whether the gradient is a tensor of a device, which is measured in host memory."""
        return False

    # ---- questions that each home answers ----------------------------------------------------------

    @property
    @abstractmethod
    def name(self) -> str:
        """The parameter's name in messages."""

    @property
    @abstractmethod
    def location(self) -> tuple[Runtime, Place] | None:
        """The store that has the states, and their place there; None for states in memory."""

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
    def prepare(self, rule: Rule, room: Room) -> None:
        """Ask for the room of the states that `rule` keeps."""

    @abstractmethod
    def prepare_step(self, rule: Rule, room: Room) -> None:
        """Claim the states for a step by `rule`, and ask for the room of those that are missing."""

    @abstractmethod
    def take_in(self, rule: Rule) -> None:
        """Bring the states of earlier steps to the room that was made for them."""

    @abstractmethod
    def restart(self, rule: Rule) -> None:
        """Give up all states: the parameter begins anew, by `rule`, with its next gradient."""

    @abstractmethod
    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return for each of the rule's planes whether it has no values yet, so that it begins as zeros."""

    @abstractmethod
    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update by `rule` to `schedule`, and return it."""


def _goes_on(state: dict[str, Any]) -> bool:
    """Return whether steps have made an entry, and the program has not given it up."""
    return not state.cleared if isinstance(state, StoredState) else _has_tensors(state)


def _has_tensors(state: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for name, value in state.items() if name not in NUMBERS)


class OnModel(Home):
    """A parameter of an offloaded model: weight, gradient and states are on the model's store."""

    session: Session

    def __init__(self, homes: Homes, parameter: nn.Parameter, session: Session, place: Place) -> None:
        """Stand for the state of the parameter at `place` of the model that `session` offloads."""
        super().__init__(homes, parameter)
        self.session = session
        self.place = place
        self.gradient_factor = session.gradient_factor

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return self.place.name

    @property
    def location(self) -> tuple[Runtime, Place]:
        """The model's store, and the parameter's place there."""
        return self.session.runtime, self.place

    @property
    def unscaled_by_update(self) -> bool:
        """Always: the gradient is on the store."""
        return True

    @property
    def captures(self) -> tuple[int, int]:
        """How many gradients the store has taken over, and how often it has added to one."""
        return self.place.captured, self.place.added

    @property
    def is_owner(self) -> bool:
        """Whether the states on the store are this optimizer's."""
        return self.place.owner is not None and self.place.owner() is self.homes.optimizer

    def check(self) -> None:
        """Raise MemascendError if the model was closed."""
        if self.session.closed:
            raise MemascendError(f"{self.name} belongs to a model that was closed")

    def take_gradient(self) -> None:
        """Take over a gradient that the program has assigned, and wait for one on its way from a device."""
        gradients, place = self.session.gradients, self.place
        gradients.settle(place)
        gradient = self.parameter.grad
        if place.early:
            raise MemascendError(early_gradient(place.name))
        if gradient is not place.marker:
            self.check_gradient()
            gradients.capture(place, accumulate=False)
        elif not place.held:
            raise MemascendError(
                f"the values of the gradient of {place.name} are gone: step() or zero_grad() has consumed them, or a "
                "backward pass failed; call zero_grad(), and backward() again, before the next step()"
            )
        gradients.finish(place)

    def gradient_stats(self) -> tuple[float, bool]:
        """Return the sum and the check that were made when the gradient was taken over."""
        self.place.awaits_step = True
        return self.place.sum_squares, self.place.non_finite

    def clear_gradient(self, set_to_none: bool) -> None:
        """Discard the gradient on the store, or set it to zero."""
        gradients, place, gradient = self.session.gradients, self.place, self.parameter.grad
        if not set_to_none and gradient is place.marker:
            gradients.fill(place, 0.0)
            return
        gradients.clear(place)
        if not set_to_none:
            self.parameter.grad = gradient  # a tensor of the program's, which PyTorch sets to zero

    def prepare(self, rule: Rule, room: Room) -> None:
        """Ask for room on the model's store, and claim states that no other optimizer has."""
        place = self.place
        room.add(self.session, place.tensor, rule)
        if place.owner is None:
            place.rule = rule
        elif place.owner() is None:  # its optimizer was deleted
            self.restart(rule)

    def prepare_step(self, rule: Rule, room: Room) -> None:
        """Become the optimizer that has the states, and ask for the room of those that are missing."""
        place = self.place
        if not self.is_owner:
            if place.owner is not None and self.has_stepped:
                raise MemascendError(
                    f"{place.name} has been trained by another optimizer since: its states on the store are "
                    "that one's; load a state_dict to go on with this one"
                )
            self.restart(rule)
        place.rule = rule
        if missing_planes(place.tensor, rule) or self.session not in self.homes.sessions:
            room.add(self.session, place.tensor, rule)

    def take_in(self, rule: Rule) -> None:
        """Write states to the model's store that were in memory before the parameter was offloaded."""
        state, last_rule = self.state, self.last_rule
        own_stores = self.homes.own_stores
        was_on_own_store = own_stores is not None and own_stores.location(self.parameter) is not None
        if last_rule is not None and was_on_own_store and not self.place.made:
            raise MemascendError(
                f"{self.name} was offloaded while its states were on the optimizer's own store: make a new optimizer "
                "and load the state_dict that this one gave before"
            )
        if _has_tensors(state):
            self.session.refuse_ranks("an optimizer with states from before memascend.offload", "make it after that")
        if last_rule is None or not any(plane.name in state for plane in last_rule.planes):
            return
        load_states(self.parameter, rule, read_states(self.parameter, last_rule, state, None), self.location)
        self.mark_made(rule)
        on_store = {plane.name for plane in rule.planes}
        rest = {name: value for name, value in state.items() if name not in on_store}
        self.homes.optimizer.state[self.parameter] = rest

    def restart(self, rule: Rule) -> None:
        """Become the optimizer that has the states, and give up another optimizer's."""
        session, place = self.session, self.place
        session.generations.settle()  # the generation being committed still has them
        place.owner, place.rule = weakref.ref(self.homes.optimizer), rule
        place.made.clear()
        if place.moments is not None:
            session.runtime.store.remove_tensor(place.moments.id)
            place.moments = None
        session.streamer.updates.apply(place.tensor.unit)
        session.runtime.units.wait_unit(place.tensor.unit.index)
        free_unused_states(session.runtime, place.tensor)

    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return which planes the store has no values of."""
        return [plane not in self.place.made for plane in rule.planes]

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
        self.place.version += 1
        self.place.held = False


class _Ordinary(Home):
    """A parameter whose weight and gradient are in memory, on the CPU or on a CUDA device."""

    @property
    def name(self) -> str:
        """The parameter's number in the optimizer."""
        return f"parameter number {self.homes.numbers.get(self.parameter, 0)}"

    @property
    def unscaled_by_update(self) -> bool:
        """Whether PyTorch refuses to unscale the gradient: it does so for float16."""
        return self.parameter.dtype == torch.float16

    @property
    def captures(self) -> None:
        """None: the gradient is `parameter.grad` itself."""
        return

    def check(self) -> None:
        """Raise ValueError for a parameter of a dtype or on a device that the kernels do not take."""
        parameter = self.parameter
        if is_stand_in(parameter):
            raise MemascendError(
                f"{self.name} is a part of an offloaded model that was closed, or a view of one of its parameters: "
                "train the parameters that model.parameters() gives"
            )
        if torch.is_complex(parameter):
            raise ValueError(
                f"{type(self.homes.optimizer).__name__} does not support complex parameters: pass "
                "torch.view_as_real(parameter)"
            )
        if parameter.dtype not in DTYPE_NAMES:
            name = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"cannot train a parameter of dtype {name}: convert it to bfloat16, float16 or float32")
        if parameter.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a parameter is on {parameter.device}: only those on the CPU or on CUDA are trained")

    def take_gradient(self) -> None:
        """Check the parameter and its gradient."""
        self.check()
        self.check_gradient()

    @property
    def gradient_is_away(self) -> bool:
        """Whether the parameter, and therefore its gradient, is on a device."""
        return self.parameter.device.type != "cpu"

    def gradient_stats(self) -> tuple[float, bool]:
        """Measure the gradient."""
        return self.homes.copies.stats([self.check_gradient()])[0]

    def clear_gradient(self, set_to_none: bool) -> None:
        """Do nothing: the gradient is `parameter.grad` itself."""

    def take_in(self, rule: Rule) -> None:
        """Do nothing: the states of earlier steps are where they were."""

    def operands(self) -> Operands:
        """Return weight and gradient as they are on a device, or in one piece in host memory."""
        brought = self.homes.brought.pop(self.parameter, None)
        if brought is not None:
            return brought
        weight, gradient = self.parameter.detach(), self.check_gradient().detach()
        if self.gradient_is_away:
            return Operands(self.parameter, weight, gradient)
        return Operands(self.parameter, weight.contiguous(), gradient.contiguous())

    def count(self, rule: Rule) -> None:
        """Note that a step was taken."""
        super().count(rule)
        # The kernels write without autograd: have it refuse graphs made before the step.
        torch.autograd.graph.increment_version(self.parameter)


class OnStore(_Ordinary):
    """An ordinary parameter whose states are on a store that the optimizer has made."""

    def __init__(self, homes: Homes, parameter: nn.Parameter, own_stores: OwnStores) -> None:
        """Stand for the state of `parameter`, which may have no room on a store yet."""
        super().__init__(homes, parameter)
        self.own_stores = own_stores

    @property
    def location(self) -> tuple[Runtime, Place] | None:
        """The store that has the states and their place there, or None before room is made."""
        store_and_place = self.own_stores.location(self.parameter)
        if store_and_place is None:
            return None
        store, place = store_and_place
        return store.runtime, place

    def prepare(self, rule: Rule, room: Room) -> None:
        """Ask for room, or make room for the states that are missing."""
        self.prepare_step(rule, room)

    def prepare_step(self, rule: Rule, room: Room) -> None:
        """Ask for room if the parameter was frozen so far; otherwise make room for the states that are missing."""
        parameter = self.parameter
        if self.location is None:
            room.on_own_store[parameter] = rule
            return
        runtime, place = self.location
        if place.shape != parameter.shape or place.dtype != parameter.dtype:
            raise RuntimeError(
                f"{self.name} was {place.dtype} of shape {tuple(place.shape)} when its states were "
                f"made, and is now {parameter.dtype} of shape {tuple(parameter.shape)}"
            )
        allocate_states(runtime, place.tensor, rule)

    def restart(self, rule: Rule) -> None:
        """Have all states begin as zeros."""
        if self.location is not None:
            _, place = self.location
            place.made.clear()

    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return which planes the store has no values of."""
        assert self.location is not None
        _, place = self.location
        return [plane not in place.made for plane in rule.planes]

    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update that runs within the step, on the store."""
        store_and_place = self.own_stores.location(self.parameter)
        assert store_and_place is not None
        store, place = store_and_place
        operands = self.operands()
        segment = Segment(place.start, place.numel, rule, scalars, fresh, operands.addresses)
        schedule.add_on_store(store, place, segment, operands)
        return segment


class InMemory(_Ordinary):
    """An ordinary parameter whose states are in memory, in `Optimizer.state`."""

    @property
    def location(self) -> None:
        """None: the states are on no store."""
        return

    def prepare(self, rule: Rule, room: Room) -> None:
        """Do nothing: the states are made in the parameter's first step."""

    def prepare_step(self, rule: Rule, room: Room) -> None:
        """Make the states that are missing, and check that the others have the form that the kernels expect."""
        parameter, state = self.parameter, self.homes.optimizer.state[self.parameter]
        for plane in rule.planes:
            dtype = getattr(torch, plane.dtype)
            shape = (plane.bytes(parameter.numel()),) if dtype == torch.uint8 else parameter.shape
            value = state.get(plane.name)
            if value is None:
                state[plane.name] = torch.zeros(shape, dtype=dtype)
            elif value.dtype != dtype or value.shape != shape or not value.is_contiguous() or not value.is_cpu:
                raise RuntimeError(
                    f"{plane.name} of {self.name}, of shape {tuple(parameter.shape)}, is {value.dtype} of "
                    f"shape {tuple(value.shape)}: one of them was replaced; states are replaced by load_state_dict"
                )

    def restart(self, rule: Rule) -> None:
        """Do nothing: the states went with the parameter's entry in `Optimizer.state`."""

    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return which planes are new in this step."""
        last_rule = self.last_rule or rule
        return [not self.has_stepped or plane not in last_rule.planes for plane in rule.planes]

    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update that runs within the step, in memory."""
        operands, states = self.operands(), [self.state[plane.name] for plane in rule.planes]
        host = operands.addresses if operands.weight.device.type == "cpu" else None
        segment = Segment(0, self.parameter.numel(), rule, scalars, fresh, host)
        schedule.add_in_memory(segment, states, operands)
        return segment
