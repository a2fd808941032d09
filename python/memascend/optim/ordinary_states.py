"""The backends of an ordinary parameter's states: a store of the optimizer's own, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.autograd.proxies import is_proxy
from memascend.errors import MemascendError
from memascend.layout.units import DTYPE_NAMES
from memascend.optim.host_copies import Operands
from memascend.optim.state_allocation import allocate_states
from memascend.optim.state_backend import StateBackend
from memascend.streaming.updates import Segment

if TYPE_CHECKING:
    from torch import nn

    from memascend._memascend import Rule, Runtime, StepScalars
    from memascend.layout.units import ParameterEntry
    from memascend.optim.schedule import Schedule
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import BackendContext
    from memascend.optim.state_store import OptimizerStateStores


class _Ordinary(StateBackend):
    """A parameter whose weight and gradient are in memory, on the CPU or on a CUDA device."""

    @property
    def name(self) -> str:
        """The parameter's number in the optimizer."""
        return f"parameter number {self.backends.numbers.get(self.parameter, 0)}"

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
        if is_proxy(parameter):
            raise MemascendError(
                f"{self.name} is a part of an offloaded model that was closed, or a view of one of its parameters: "
                "train the parameters that model.parameters() gives"
            )
        if torch.is_complex(parameter):
            raise ValueError(
                f"{type(self.backends.optimizer).__name__} does not support complex parameters: pass "
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
        return self.backends.copies.stats([self.check_gradient()])[0]

    def clear_gradient(self, set_to_none: bool) -> None:
        """Do nothing: the gradient is `parameter.grad` itself."""

    def take_in(self, rule: Rule) -> None:
        """Do nothing: the states of earlier steps are where they were."""

    def operands(self) -> Operands:
        """Return weight and gradient as they are on a device, or in one piece in host memory."""
        brought = self.backends.brought.pop(self.parameter, None)
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


class StoreState(_Ordinary):
    """An ordinary parameter whose states are on a store that the optimizer has made."""

    def __init__(self, backends: BackendContext, parameter: nn.Parameter, state_stores: OptimizerStateStores) -> None:
        """Stand for the state of `parameter`, which may have no room on a store yet."""
        super().__init__(backends, parameter)
        self.state_stores = state_stores

    @property
    def location(self) -> tuple[Runtime, ParameterEntry] | None:
        """The store that has the states and their entry there, or None before room is made."""
        store_and_place = self.state_stores.location(self.parameter)
        if store_and_place is None:
            return None
        store, place = store_and_place
        return store.runtime, place

    def prepare(self, rule: Rule, room: StateAllocation) -> None:
        """Ask for room, or make room for the states that are missing."""
        self.prepare_step(rule, room)

    def prepare_step(self, rule: Rule, room: StateAllocation) -> None:
        """Ask for room if the parameter was frozen so far; otherwise make room for the states that are missing."""
        parameter = self.parameter
        if self.location is None:
            room.on_own_store[parameter] = rule
            return
        runtime, place = self.location
        if place.shape != parameter.shape or place.dtype != parameter.dtype:
            raise RuntimeError(
                f"{self.name} was {place.dtype} of shape {tuple(place.shape)} when its states were "
                f"made, and is now {parameter.dtype} of shape {tuple(parameter.shape)}: make a new optimizer"
            )
        allocate_states(runtime, place.tensor, rule)

    def restart(self, rule: Rule) -> None:
        """Have all states begin as zeros."""
        if self.location is not None:
            _, place = self.location
            place.states.made.clear()

    def fresh_planes(self, rule: Rule) -> list[bool]:
        """Return which planes the store has no values of."""
        assert self.location is not None
        _, place = self.location
        return [plane not in place.states.made for plane in rule.planes]

    def add_update(self, rule: Rule, scalars: StepScalars, fresh: list[bool], schedule: Schedule) -> Segment:
        """Add an update that runs within the step, on the store."""
        store_and_place = self.state_stores.location(self.parameter)
        assert store_and_place is not None
        store, place = store_and_place
        operands = self.operands()
        segment = Segment(place.start, place.numel, rule, scalars, fresh, operands.addresses)
        schedule.add_on_store(store, place, segment, operands)
        return segment


class MemoryState(_Ordinary):
    """An ordinary parameter whose states are in memory, in `Optimizer.state`."""

    @property
    def location(self) -> None:
        """None: the states are on no store."""
        return

    def prepare(self, rule: Rule, room: StateAllocation) -> None:
        """Do nothing: the states are made in the parameter's first step."""

    def prepare_step(self, rule: Rule, room: StateAllocation) -> None:
        """Make the states that are missing, and check that the others have the form that the kernels expect."""
        parameter, state = self.parameter, self.backends.optimizer.state[self.parameter]
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
