"""Updates in the backward pass of a device: a gradient is applied chunk by chunk as it arrives in host memory.

The device computes on meanwhile, with the weights that it has: its copies are from before the step, which confirms
the updates and gives the copies up.

A unit's buffer in host memory is kept from its last use in the pass until its gradients are there; where another unit
had to have it, pieces of the weights are read and written in update slots. Copies to the device and fetches of a unit
wait for its updates. APOLLO's factors are found between the projection, which the device makes, and the first chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.common.interrupts import uninterrupted
from memascend.gradients.in_backward import UpdatesInBackward

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memascend._memascend import Applying, CudaEvent
    from memascend.common.timeline import Timeline
    from memascend.durability.commits import CommitLog
    from memascend.gradients.leaving import DeviceToHostCopy
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry
    from memascend.streaming.streamer import Streamer


class DeviceUpdatesInBackward(UpdatesInBackward):
    """Takes the updates of the backward passes of a session whose gradients are made on a device."""

    def __init__(
        self,
        streamer: Streamer,
        commit_log: CommitLog,
        timeline: Timeline,
        device: ComputeDevice,
    ) -> None:
        """Update weights in host memory, or on the store where `streamer` has given their buffer up.

        `hold` has to be set.
        """
        super().__init__(streamer, commit_log, timeline, 0)
        self._device = device
        #: Called with a copy under way from the device, the event that it waits for, and the tensors that have to live
        #: until its end. See `memascend.gradients.leaving.LeavingGradients.hold`.
        self.hold: Callable[[DeviceToHostCopy, CudaEvent, tuple[torch.Tensor, ...]], None]
        #: Updates that `step` has not followed yet.
        self._applying: dict[ParameterEntry, Applying] = {}

    def take(self, place: ParameterEntry, gradient: torch.Tensor) -> bool:
        """Start the update of a parameter whose gradient the device is to make, if it need not wait for `step`.

        Afterwards `parameter.grad` is a marker, as after `step`.
        """
        optimizer = self._optimizer_of(place)
        segment = None if optimizer is None else optimizer.backward_segment(place.parameter, None)
        if optimizer is None or segment is None:
            return False
        held: tuple[torch.Tensor, ...] = (gradient.contiguous(),)
        measured = None
        projection = optimizer.projection_of(place.parameter)
        if projection is not None:
            numbers = self._device.projection(held[0], projection)
            if numbers is None:  # Nothing projects it before it is whole in host memory.
                return False
            held = (*held, numbers)
            measured = optimizer.measured_in_backward(place.parameter, projection, numbers.data_ptr())
            if measured is None:
                return False
        ready = self._device.record()
        self._commit_log.wait_committed(optimizer)
        with uninterrupted():
            applying = self._backward.update_from_device(
                self._update(place.tensor, segment), held[0].data_ptr(), ready, measured
            )
            self._applying[place] = applying
            self._note_taken(place, optimizer, segment)
        self.hold(applying, ready, held)
        return True

    def finish(self, place: ParameterEntry) -> float | None:
        """Wait until an update has all of its gradient, so that later fetches follow it."""
        applying = self._applying.get(place)
        if applying is None:
            return None
        with self._timeline.waiting("d2h"):
            return applying.wait()

    def confirm(self, places: list[ParameterEntry]) -> None:
        """Note that `optimizer.step()` has followed the updates of `places`."""
        for place in places:
            del self._applying[place]
        super().confirm(places)
