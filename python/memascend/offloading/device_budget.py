"""The memory that one session holds on its device: the plan, and its change between passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.common.interrupts import uninterrupted
from memascend.errors import DeviceError, MemascendError
from memascend.residency.device import DeviceStreamer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memascend.layout.units import Unit
    from memascend.offloading.activations import InputStash
    from memascend.offloading.computing import Computing
    from memascend.offloading.gradients import GradientCapture
    from memascend.plan.device import DevicePlan
    from memascend.residency.host import Streamer


class DeviceBudget:
    """The plan of a session's device memory, and the options that it was made from; no plan on the CPU."""

    def __init__(self, computing: Computing, units: Sequence[Unit], model: Callable[[], nn.Module | None]) -> None:
        """Plan the memory for the `units` of a model. Raises BudgetError as `Computing.plan` does."""
        self.computing = computing
        self._units = units
        self._model = model
        # A model that is on the device now leaves it before training.
        places = (place for unit in units for place in unit.places)
        leaving_bytes = sum(place.nbytes for place in places if place.parameter.device.type == "cuda")
        self.plan: DevicePlan | None = self._make(computing, leaving_bytes)

    def _make(self, computing: Computing, leaving_bytes: int) -> DevicePlan | None:
        return computing.plan(self._units, getattr(self._model(), "config", None), leaving_bytes)

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
        before = self.plan
        if before is None or not isinstance(streamer, DeviceStreamer):
            raise MemascendError(
                "the model computes on the CPU and holds no device memory: open it with device='cuda', or use "
                "memascend.set_host_memory"
            )
        streamer.finish_uses()
        gradients.wait_copied()
        inputs.wait_copied()
        computing = self.computing.with_device_memory(budget)
        plan = self._make(computing, streamer.pool.nbytes)
        assert plan is not None
        # An interrupt amid the change would leave the streamer without buffers.
        with uninterrupted():
            try:
                streamer.change_device_plan(plan)
            except DeviceError:
                # Another process was quicker: go on with the plan of before.
                streamer.change_device_plan(before)
                raise
            self.plan, self.computing = plan, computing
            gradients.in_flight_bytes, gradients.made_bytes = plan.in_flight_bytes, plan.made_bytes
            gradients.sums.room = plan.sums_bytes
