"""The streamer of a model that computes on a device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memascend.plan.host import updates_early
from memascend.residency.device_cache import DeviceCache
from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Unit
    from memascend.machine.cuda import ComputeDevice
    from memascend.plan.device import DevicePlan
    from memascend.plan.host import Plan
    from memascend.ranks.group import Ranks
    from memascend.residency.cuda import DevicePool


class DeviceStreamer(Streamer):
    """The streamer of a model that computes on a device."""

    memory: DeviceCache

    def __init__(
        self,
        runtime: Runtime,
        units: Sequence[Unit],
        plan: Plan,
        timeline: Timeline,
        device: ComputeDevice,
        device_plan: DevicePlan,
        *,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        """Stream `units` through the host buffers of `plan` and the device buffers of `device_plan`."""
        changing = {unit for unit in units if plan.update == "backward" and any(map(updates_early, unit.tensors))}
        compute_in = partial(
            DeviceCache, device=device, plan=device_plan, changing=changing, copies_ahead=ranks is None
        )
        super().__init__(runtime, units, plan, timeline, compute_in=compute_in, ranks=ranks, **options)

    @property
    def pool(self) -> DevicePool:
        """The buffers on the device."""
        return self.memory.pool

    def finish_uses(self) -> None:
        """Wait until no copy and no computation uses a device buffer.

        Raises PassError in a pass, and MemascendError where a tensor of the program refers to a buffer.
        """
        self.check_between_passes("device")
        self.memory.finish_uses()

    def change_device_plan(self, plan: DevicePlan) -> None:
        """Replace the device's buffers by the buffers of another plan; call `finish_uses` before.

        Raises DeviceError, with no buffer reserved, if the device has less memory than the plan takes.
        """
        self.memory.change_plan(plan)
