"""The site of a session: the processor, or a device by a plan of its memory that may change between passes.

A site knows where the model computes: the memory there, the tables, the moves of buffers and arguments, and which
classes capture gradients and put inputs aside there.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from memascend.autograd.recompute import DeviceInputStash, InputStash
from memascend.common.interrupts import uninterrupted
from memascend.errors import DeviceError, MemascendError
from memascend.gradients.capture import GradientCapture
from memascend.gradients.device_capture import DeviceCapture
from memascend.gradients.device_reduce import DeviceReducedGradients
from memascend.gradients.in_backward import UpdatesInBackward
from memascend.gradients.in_backward_device import DeviceUpdatesInBackward
from memascend.gradients.reduce import ReducedGradients
from memascend.hardware.matmul_rates import warn_of_slow
from memascend.layout.units import CPU
from memascend.memory_plan.host import updates_in_backward
from memascend.streaming.compute import InHostMemory
from memascend.streaming.device_cache import DeviceCache
from memascend.streaming.device_tables import DeviceTable
from memascend.streaming.tables import OffloadedTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from torch import nn

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.durability.commits import CommitLog
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan
    from memascend.options import Tuning
    from memascend.ranks.group import Ranks
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

    #: No device has memory for the model: its number, and its plan.
    index = None
    plan = None
    #: Whether weights go on from host memory to a device.
    uploads = False

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

    def gradients(self, streamer: Streamer, commit_log: CommitLog, plan: Plan) -> GradientCapture:
        """Return the capture of gradients, which updates weights at once if the plan of host memory says so."""
        in_backward = None
        if plan.update == "backward":
            in_backward = UpdatesInBackward(streamer, commit_log, streamer.timeline, plan.applied.total)
        return GradientCapture(streamer.runtime, streamer, streamer.timeline, in_backward)

    def reduced_gradients(self, ranks: Ranks, units: Sequence[Unit], streamer: Streamer) -> ReducedGradients:
        """Return the capture of the gradients of `units`, whose sums over ranks are divided over them."""
        return ReducedGradients(ranks, units, streamer.runtime, streamer, streamer.timeline)

    def inputs(self, runtime: Runtime, timeline: Timeline) -> InputStash:
        """Return the inputs of recomputed units that are put aside."""
        return InputStash(runtime, self.computing.activations, timeline)

    def slow_tuning(self, tuning: Tuning) -> list[str]:
        """Return a notice for each entry of `tuning` that costs time: none does here."""
        return []

    def warn_of_slow(self, dtypes: Iterable[torch.dtype]) -> None:
        """Warn of dtypes in which the processor multiplies slowly."""
        warn_of_slow(dtypes)

    def stats(self, runtime: Runtime) -> dict[str, Any]:
        """Return the counters of a device; see `memascend.stats`."""
        return {}

    def take(self, model: nn.Module) -> None:
        """Leave the buffers of the model where they are."""

    def moved(self, arguments: Any, on_copy: OnCopy | None) -> Any:
        """Return the arguments of a call as they are."""
        return arguments

    def change(self, budget: int, streamer: Streamer, inputs: InputStash) -> None:
        """Raise MemascendError: the model holds no device memory."""
        raise MemascendError(
            "the model computes on the CPU and holds no device memory: open it with device='cuda', or use "
            "memascend.set_host_memory"
        )

    def release(self) -> None:
        """Do nothing: the processor's memory has no limit of ours."""


class DeviceSite:
    """A device: the plan of its memory, and the options that the plan was made from."""

    #: Whether weights go on from host memory to a device.
    uploads = True

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
        #: The gradients that the device makes, in one process.
        self._gradients: DeviceCapture

    def _make(self, computing: ComputeOptions, leaving_bytes: int) -> DevicePlan:
        return computing.plan(self._device, self._units, getattr(self._model(), "config", None), leaving_bytes)

    @property
    def index(self) -> int:
        """Number of the device among those that this process may see."""
        return self._device.index

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

    def gradients(self, streamer: Streamer, commit_log: CommitLog, plan: Plan) -> GradientCapture:
        """Return the capture of gradients, which updates weights at once if the plan of host memory says so."""
        in_backward = None
        if plan.update == "backward":
            in_backward = DeviceUpdatesInBackward(streamer, commit_log, streamer.timeline, self._device)
        capture = DeviceCapture(
            streamer.runtime, streamer, streamer.timeline, in_backward, device=self._device, plan=self.plan
        )
        if in_backward is not None:
            in_backward.hold = capture.leaving.hold
        self._gradients = capture
        return capture

    def reduced_gradients(self, ranks: Ranks, units: Sequence[Unit], streamer: Streamer) -> ReducedGradients:
        """Return the capture of the gradients of `units`, whose sums over ranks are divided over them."""
        return DeviceReducedGradients(
            ranks,
            units,
            streamer.runtime,
            streamer,
            streamer.timeline,
            device=self._device,
            in_flight_bytes=self.plan.in_flight_bytes,
            allocator=self.computing.options.tuning.get("allocator", "auto"),
        )

    def inputs(self, runtime: Runtime, timeline: Timeline) -> InputStash:
        """Return the inputs of recomputed units that are put aside."""
        return DeviceInputStash(runtime, self.computing.activations, timeline, self._device)

    def slow_tuning(self, tuning: Tuning) -> list[str]:
        """Return a notice for each entry of `tuning` that costs time on a device."""
        if tuning.get("allocator") not in ("locked", "pageable"):
            return []
        return [
            f"allocator={tuning['allocator']!r}: every copy to the device and back stops the program until it is "
            "done, which pinned memory ('auto', 'cuda', 'registered') spares"
        ]

    def warn_of_slow(self, dtypes: Iterable[torch.dtype]) -> None:
        """Leave the dtypes alone: the device multiplies."""

    def stats(self, runtime: Runtime) -> dict[str, Any]:
        """Return the counters of the device; see `memascend.stats`."""
        assert runtime.device is not None, "it was opened for the device"
        return {
            "device_bytes_budget": self.plan.budget,
            "device_bytes_planned": self.plan.total,
            "device": runtime.device.stats(),
        }

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

    def change(self, budget: int, streamer: Streamer, inputs: InputStash) -> None:
        """Change the budget of device memory; see `memascend.set_device_memory`."""
        before, memory = self.plan, self._memory
        streamer.check_between_passes("device")
        memory.finish_uses()
        self._gradients.wait_copied()
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
            self._gradients.change_plan(plan)

    def release(self) -> None:
        """Lift the limit of `take`."""
        self._device.release()
