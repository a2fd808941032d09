"""The site of a session: the processor, or a device by a plan of its memory that may change between passes.

A site knows where the model computes: the memory there, the tables, the moves of buffers and arguments.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from memascend.common.interrupts import uninterrupted
from memascend.errors import DeviceError, MemascendError
from memascend.layout.units import CPU
from memascend.memory_plan.host import updates_in_backward
from memascend.streaming.compute import InHostMemory
from memascend.streaming.device_cache import DeviceCache
from memascend.streaming.device_tables import DeviceTable
from memascend.streaming.tables import OffloadedTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from torch import nn

    from memascend._memascend import Runtime
    from memascend.autograd.recompute import InputStash
    from memascend.gradients.capture import GradientCapture
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan
    from memascend.session.compute import ComputeOptions
    from memascend.streaming.compute import ComputeMemory, MakeCache, MakeMemory, MakeTables
    from memascend.streaming.order import UseOrder
    from memascend.streaming.streamer import Streamer

    Site: TypeAlias = "ProcessorSite | DeviceSite"
    #: Called with a copy of an argument there, and the argument.
    OnCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor], object]


def site_of(computing: ComputeOptions, units: Sequence[Unit], model: Callable[[], nn.Module | None]) -> Site:
    """Return the site of a session of `units`. Raises BudgetError as `ComputeOptions.plan` does."""
    if computing.device is None:
        return ProcessorSite(computing)
    return DeviceSite(computing, computing.device, units, model)


class ProcessorSite:
    """The processor: the model computes in host memory, and nothing is moved."""

    #: No device has memory for the model: its number, its plan, and the bytes of gradients there.
    index = None
    plan = None
    in_flight_bytes = sums_bytes = made_bytes = 0

    def __init__(self, computing: ComputeOptions) -> None:
        """Compute by these options."""
        self.computing = computing

    def current(self) -> AbstractContextManager[Any]:
        """Enclose calls of the native side."""
        return nullcontext()

    def stream(self) -> int | None:
        """Return None: the processor has no streams."""
        return None

    def memory(self, runtime: Runtime, plan: Plan, *, copies_ahead: bool) -> MakeMemory:
        """Return the class of the memory in which the model computes."""
        return InHostMemory

    def table(self, streamer: Streamer, place: ParameterEntry) -> OffloadedTable:
        """Return the weights of a table, read through `streamer`."""
        return OffloadedTable(streamer, place)

    def take(self, model: nn.Module) -> None:
        """Leave the buffers of the model where they are."""

    def moved(self, arguments: Any, on_copy: OnCopy | None) -> Any:
        """Return the arguments of a call as they are."""
        return arguments

    def change(self, budget: int, streamer: Streamer, gradients: GradientCapture, inputs: InputStash) -> None:
        """Raise MemascendError: the model holds no device memory."""
        raise MemascendError(
            "the model computes on the CPU and holds no device memory: open it with device='cuda', or use "
            "memascend.set_host_memory"
        )

    def release(self) -> None:
        """Do nothing: the processor's memory has no limit of ours."""


class DeviceSite:
    """A device: the plan of its memory, and the options that the plan was made from."""

    def __init__(
        self,
        computing: ComputeOptions,
        device: ComputeDevice,
        units: Sequence[Unit],
        model: Callable[[], nn.Module | None],
    ) -> None:
        """Plan the memory for the `units` of a model. Raises BudgetError as `ComputeOptions.plan` does."""
        self.computing = computing
        self._device = device
        self._units = units
        self._model = model
        # A model that is on the device now leaves it before training.
        places = (place for unit in units for place in unit.places)
        leaving_bytes = sum(place.nbytes for place in places if place.parameter.device.type == "cuda")
        self.plan = self._make(computing, leaving_bytes)
        self._memory: DeviceCache

    def _make(self, computing: ComputeOptions, leaving_bytes: int) -> DevicePlan:
        return computing.plan(self._device, self._units, getattr(self._model(), "config", None), leaving_bytes)

    @property
    def index(self) -> int:
        """Number of the device among those that this process may see."""
        return self._device.index

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of gradients that may be on their way from the device at a time."""
        return self.plan.in_flight_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of gradients that may be added up on the device."""
        return self.plan.sums_bytes

    @property
    def made_bytes(self) -> int:
        """Bytes of the largest gradient of a table that the device makes as a whole."""
        return self.plan.made_bytes

    def current(self) -> AbstractContextManager[Any]:
        """Make the device CUDA's current one within the context."""
        return self._device.current()

    def stream(self) -> int | None:
        """Return the handle of the stream that PyTorch computes on in this thread."""
        return self._device.stream()

    def memory(self, runtime: Runtime, plan: Plan, *, copies_ahead: bool) -> MakeMemory:
        """Return a function that makes the memory in which the model computes, beside the host memory of `plan`.

        `copies_ahead` says whether units in host memory are whole, so that they can be copied before their use.
        """
        self._device.link = runtime.device
        changing = {
            unit for unit in self._units if plan.update == "backward" and any(map(updates_in_backward, unit.tensors))
        }

        def make(order: UseOrder[Unit], make_cache: MakeCache, make_tables: MakeTables) -> ComputeMemory:
            self._memory = DeviceCache(
                order,
                make_cache,
                make_tables,
                device=self._device,
                plan=self.plan,
                changing=changing,
                copies_ahead=copies_ahead,
            )
            return self._memory

        return make

    def table(self, streamer: Streamer, place: ParameterEntry) -> OffloadedTable:
        """Return the weights of a table, copied through `streamer` to the device."""
        return DeviceTable(streamer, self._memory, place)

    def take(self, model: nn.Module) -> None:
        """Move the buffers of the model to the device, and limit PyTorch's memory there to the plan."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device.torch_device)
        # Weights that were on the device have left it, and the plan's own buffers are not there yet.
        self._device.hold(self.plan)

    def moved(self, arguments: Any, on_copy: OnCopy | None) -> Any:
        """Return the arguments of a call with copies of their tensors on the device; `on_copy` is told of each."""

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device != CPU:
                return value
            there = value.to(self._device.torch_device, non_blocking=True)
            if on_copy is not None:
                on_copy(there, value)
            return there

        return pytree.tree_map(move, arguments)

    def change(self, budget: int, streamer: Streamer, gradients: GradientCapture, inputs: InputStash) -> None:
        """Change the budget of device memory; see `memascend.set_device_memory`."""
        before, memory = self.plan, self._memory
        streamer.check_between_passes("device")
        memory.finish_uses()
        gradients.wait_copied()
        inputs.wait_copied()
        computing = self.computing.with_device_memory(budget)
        plan = self._make(computing, memory.pool.nbytes)
        # An interrupt amid the change would leave the device without buffers.
        with uninterrupted():
            try:
                memory.change_plan(plan)
            except DeviceError:
                # Another process was quicker: go on with the plan of before.
                memory.change_plan(before)
                raise
            self.plan, self.computing = plan, computing
            gradients.in_flight_bytes, gradients.made_bytes = plan.in_flight_bytes, plan.made_bytes
            gradients.sums.room = plan.sums_bytes

    def release(self) -> None:
        """Lift the limit of `take`."""
        self._device.release()
