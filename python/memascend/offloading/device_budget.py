"""Where a session computes: in host memory, or on a device, by a plan of its memory that may change between passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.common.interrupts import uninterrupted
from memascend.errors import DeviceError, MemascendError
from memascend.plan.host import updates_early
from memascend.residency.compute import InHostMemory
from memascend.residency.device_cache import DeviceCache
from memascend.residency.tables import OffloadedTable
from memascend.residency.tables_device import DeviceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memascend._memascend import Runtime
    from memascend.layout.units import Place, Unit
    from memascend.offloading.activations import InputStash
    from memascend.offloading.computing import Computing
    from memascend.offloading.gradients import GradientCapture
    from memascend.plan.device import DevicePlan
    from memascend.plan.lines import Plan
    from memascend.residency.compute import ComputeMemory, MakeCache, MakeMemory, MakeTables
    from memascend.residency.host import Streamer
    from memascend.residency.order import UseOrder


class DeviceBudget:
    """The memory in which a session computes, its plan on a device, and the options that the plan was made from."""

    def __init__(self, computing: Computing, units: Sequence[Unit], model: Callable[[], nn.Module | None]) -> None:
        """Plan the memory for the `units` of a model. Raises BudgetError as `Computing.plan` does."""
        self.computing = computing
        self._units = units
        self._model = model
        # A model that is on the device now leaves it before training.
        places = (place for unit in units for place in unit.places)
        leaving_bytes = sum(place.nbytes for place in places if place.parameter.device.type == "cuda")
        self.plan: DevicePlan | None = self._make(computing, leaving_bytes)
        #: The memory of the device, None on the CPU.
        self._memory: DeviceCache | None = None

    def _make(self, computing: Computing, leaving_bytes: int) -> DevicePlan | None:
        return computing.plan(self._units, getattr(self._model(), "config", None), leaving_bytes)

    def memory(self, runtime: Runtime, plan: Plan, *, copies_ahead: bool) -> MakeMemory:
        """Return what makes the memory in which the model computes, beside the host memory of `plan`.

        `copies_ahead` says whether units in host memory are whole, so that they can be copied before their use.
        """
        device, device_plan = self.computing.device, self.plan
        if device is None or device_plan is None:
            return InHostMemory
        device.link = runtime.device
        changing = {unit for unit in self._units if plan.update == "backward" and any(map(updates_early, unit.tensors))}

        def make(order: UseOrder[Unit], make_cache: MakeCache, make_tables: MakeTables) -> ComputeMemory:
            self._memory = DeviceCache(
                order,
                make_cache,
                make_tables,
                device=device,
                plan=device_plan,
                changing=changing,
                copies_ahead=copies_ahead,
            )
            return self._memory

        return make

    def table(self, streamer: Streamer, place: Place) -> OffloadedTable:
        """Return the weights of a table, read through `streamer` to where the model computes."""
        if self._memory is None:
            return OffloadedTable(streamer, place)
        return DeviceTable(streamer, self._memory, place)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of gradients that may be on their way from the device at a time."""
        return 0 if self.plan is None else self.plan.in_flight_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of gradients that may be added up on the device."""
        return 0 if self.plan is None else self.plan.sums_bytes

    def change(self, budget: int, streamer: Streamer, gradients: GradientCapture, inputs: InputStash) -> None:
        """Change the budget of device memory; see `memascend.set_device_memory`."""
        before, memory = self.plan, self._memory
        if before is None or memory is None:
            raise MemascendError(
                "the model computes on the CPU and holds no device memory: open it with device='cuda', or use "
                "memascend.set_host_memory"
            )
        streamer.check_between_passes("device")
        memory.finish_uses()
        gradients.wait_copied()
        inputs.wait_copied()
        computing = self.computing.with_device_memory(budget)
        plan = self._make(computing, memory.pool.nbytes)
        assert plan is not None
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
