"""Captures gradients that a device makes: a native thread copies them while the device goes on computing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memascend.errors import MemascendError
from memascend.gradients.capture import GradientCapture
from memascend.gradients.device_sums import DeviceSums
from memascend.gradients.leaving import LeavingGradients
from memascend.gradients.tables import add_from_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from memascend._memascend import GradientRanges
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import ParameterEntry
    from memascend.memory_plan.device import DevicePlan


class DeviceCapture(GradientCapture):
    """Captures the gradients that a device makes.

    Sums of several backward passes stay there as far as the plan has room (`sums`). Call `finish` before using the norm
    or the overflow check of such a gradient.
    """

    def __init__(self, *args: Any, device: ComputeDevice, plan: DevicePlan) -> None:
        """Capture as `GradientCapture` does, from `device` by the `plan` of its memory."""
        super().__init__(*args)
        self.device = device
        self.leaving = LeavingGradients(self.timeline, plan.in_flight_bytes)
        #: Gradients that are on the device alone.
        self.sums = DeviceSums(plan.sums_bytes)
        #: The largest gradient of a table that the device makes as a whole.
        self.made_bytes = plan.made_bytes

    def change_plan(self, plan: DevicePlan) -> None:
        """Follow another plan of the device's memory."""
        self.leaving.most_bytes, self.made_bytes = plan.in_flight_bytes, plan.made_bytes
        self.sums.room = plan.sums_bytes

    def _made_whole(self, place: ParameterEntry) -> bool:
        # With room for it a whole gradient is measured on the device, and captured by another thread.
        return super()._made_whole(place) or place.nbytes <= self.made_bytes

    def _keep(self, place: ParameterEntry, gradient: torch.Tensor, accumulate: bool, stays: bool = True) -> None:
        place.gradient.filled = place.gradient.projection = None
        if not accumulate:
            self._discard(place)
        leaving = self.sums.add(place, gradient, accumulate) if stays else (gradient, accumulate)
        if leaving is not None:
            self._capture_from_device(place, *leaving)

    def _add_to(self, ranges: GradientRanges, blocks: Iterable[torch.Tensor]) -> None:
        add_from_device(ranges, blocks, self.streamer, self.device)

    def _capture_from_device(self, place: ParameterEntry, gradient: torch.Tensor, accumulate: bool) -> None:
        gradient_id, start = self._room_of(place)
        # The device computes the sums of squares of a whole gradient, so that the host does not
        # read its bytes. So it does with the projection; a sum with an earlier gradient is projected in the step.
        sums = None if accumulate else self.device.block_sums(gradient)
        projection = None if accumulate else self._projection_of(place)
        numbers = None if projection is None else self.device.projection(gradient, projection)
        if accumulate:
            try:
                self.finish(place)  # The gradient of an earlier backward pass, to which this one is added.
            except BaseException:
                # The next step raises the error again; zero_grad clears it.
                place.parameter.grad = place.gradient.marker
                raise
        ready = self.device.record()
        capture = self.runtime.gradients.capture_from_device(
            gradient_id,
            start,
            gradient.data_ptr(),
            place.numel,
            accumulate,
            ready,
            None if sums is None else sums.addresses,
        )
        place.gradient.capturing = [capture]
        self.leaving.add(capture, ready, gradient.nbytes, (gradient,) if sums is None else (gradient, sums.memory))
        if projection is not None and numbers is not None:
            projected = self._allocate_projected(place, projection)
            capture = self.runtime.gradients.capture_from_device(
                projected, 0, numbers.data_ptr(), 2 * projection.numbers, False, ready, None
            )
            place.gradient.capturing.append(capture)
            place.gradient.projection = projection
            self.leaving.add(capture, ready, numbers.nbytes, (numbers,))
        self.leaving.drop_copied()

    def wait_copied(self) -> None:
        """Wait until no gradient is on the device, or on its way from there."""
        self._bring_down()
        self.leaving.wait()

    def _bring_down(self) -> None:
        """Have all gradients leave that are on the device alone."""
        for place in self.sums.places():
            gradient = self.sums.take(place)
            assert gradient is not None, "the place was listed"
            self._capture_from_device(place, gradient, accumulate=False)

    def finish(self, place: ParameterEntry) -> None:
        """Wait until a gradient on its way from the device is captured, and its norm and overflow check are known.

        Raises the error of a copy that failed: the gradient must not be used.
        """
        if place in self.sums:
            self._bring_down()  # all of them: a step, which usually asks for one, asks for the others next
        if place.gradient.capturing:
            with self.timeline.waiting("d2h"):
                place.gradient.sum_squares, place.gradient.non_finite = place.gradient.capturing[0].wait()
                for projected in place.gradient.capturing[1:]:
                    projected.wait()
            place.gradient.capturing = []
            self.leaving.drop_copied()

    def _discard(self, place: ParameterEntry) -> None:
        self.sums.take(place)
        for capture in place.gradient.capturing:
            with suppress(MemascendError):
                capture.wait()
        place.gradient.capturing = []

    def close(self) -> None:
        """Wait until no copy reads the device, and no update a gradient."""
        super().close()
        self.leaving.close()
