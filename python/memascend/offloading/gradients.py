"""Captures gradients as autograd makes them: checks them for overflow, adds them up and moves them out of memory."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import DTYPE_NAMES

if TYPE_CHECKING:
    from memascend._memascend import Capture, CudaEvent, Runtime
    from memascend.common.timeline import Timeline
    from memascend.layout.units import Place, StoreTensor
    from memascend.machine.cuda import ComputeDevice
    from memascend.residency.host import Streamer


class GradientCapture:
    """Captures the gradients of parameters through autograd hooks. `parameter.grad` then shows a marker.

    A native thread copies gradients from a device while the device goes on computing. Call `finish` before using the
    norm or the overflow check of such a gradient.

    The marker has the gradient's shape and dtype and NaN for every value, so that code which reads gradients by
    itself cannot go wrong silently. Setting `parameter.grad = None` discards the gradient, as in PyTorch.
    """

    def __init__(
        self,
        runtime: Runtime,
        streamer: Streamer,
        timeline: Timeline,
        device: ComputeDevice | None = None,
        in_flight_bytes: int = 0,
    ) -> None:
        """Capture into `runtime`. Gradients on their way from `device` take about `in_flight_bytes` there at most."""
        self.runtime = runtime
        self.streamer = streamer
        self.timeline = timeline
        self.device = device
        self._accumulating: set[Place] = set()
        self._in_flight_bytes = in_flight_bytes
        #: Copies under way from the device, the oldest first: the capture, the event at which the
        #: gradient is computed, its bytes, and the tensors that must live until it has been copied.
        self._leaving: deque[tuple[Capture, CudaEvent, int, tuple[torch.Tensor, ...]]] = deque()
        self._leaving_bytes = 0

    def watch(self, place: Place) -> None:
        """Capture the gradients of a parameter from now on, if it is trained."""
        parameter = place.parameter
        if place.hooks or not parameter.requires_grad:
            return

        def before(_: torch.Tensor) -> None:
            self._accumulating.discard(place)  # A backward pass that failed may have left it.
            self.settle(place)
            if parameter.grad is place.marker:
                # AccumulateGrad would add to the marker. With None it stores the new gradient,
                # which `capture` adds.
                parameter.grad = None
                self._accumulating.add(place)

        def after(_: torch.Tensor) -> None:
            self.capture(place, accumulate=place in self._accumulating)
            self._accumulating.discard(place)

        place.hooks = [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]

    def unwatch(self, place: Place) -> None:
        """Stop capturing: PyTorch keeps the parameter's gradients again."""
        for hook in place.hooks:
            hook.remove()
        place.hooks = []

    def capture(self, place: Place, accumulate: bool) -> None:
        """Move `parameter.grad`, a tensor of values, out of memory; `accumulate` adds it to the one captured before.

        Raises ValueError for a sparse gradient.
        """
        gradient = place.parameter.grad
        assert gradient is not None, "called once autograd has stored a gradient"
        if gradient.is_sparse:
            raise ValueError(f"{place.name} has a sparse gradient, which memascend does not support: use sparse=False")
        place.parameter.grad = None
        gradient = gradient.detach().contiguous()
        tensor = place.tensor
        self.streamer.apply_update(tensor.unit)
        gradient_id = self.allocate(tensor)
        start = place.start if tensor.packed else 0
        with span(f"gradient of {place.name}"):
            if self.device is None:
                place.sum_squares, place.non_finite = self.runtime.capture(
                    gradient_id, start, gradient.data_ptr(), place.numel, accumulate
                )
            else:
                self._capture_from_device(self.device, gradient_id, place, gradient, start, accumulate)
        place.held = True
        if accumulate:
            place.added += 1
        else:
            place.captured += 1
        place.parameter.grad = place.marker

    def _capture_from_device(
        self,
        device: ComputeDevice,
        gradient_id: int,
        place: Place,
        gradient: torch.Tensor,
        start: int,
        accumulate: bool,
    ) -> None:
        # The device computes the sums of squares of a whole gradient, so that the host does not
        # read its bytes.
        sums = None if accumulate else device.block_sums(gradient)
        if accumulate:
            try:
                self.finish(place)  # The gradient of an earlier backward pass, to which this one is added.
            except BaseException:
                place.parameter.grad = place.marker  # The next step raises the error again; zero_grad clears it.
                raise
        else:
            self._discard(place)
        ready = device.record()
        capture = self.runtime.capture_from_device(
            gradient_id,
            start,
            gradient.data_ptr(),
            place.numel,
            accumulate,
            ready,
            None if sums is None else sums.addresses,
        )
        place.capturing = capture
        held = (gradient,) if sums is None else (gradient, sums.memory)
        self._leaving.append((capture, ready, gradient.nbytes, held))
        self._leaving_bytes += gradient.nbytes
        self._release()

    def _release(self) -> None:
        """Drop gradients that have been copied from the device. Wait for the oldest while too many are on their way."""
        while self._leaving:
            capture, ready, nbytes, _ = self._leaving[0]
            if not capture.copied():
                if self._leaving_bytes <= self._in_flight_bytes:
                    return
                ready.wait()
                with self.timeline.waiting("d2h"):
                    capture.wait_copied()
            self._leaving.popleft()
            self._leaving_bytes -= nbytes

    def finish(self, place: Place) -> None:
        """Wait until a gradient on its way from the device is captured, and its norm and overflow check are known.

        Raises the error of a copy that failed: the gradient must not be used.
        """
        if place.capturing is not None:
            with self.timeline.waiting("d2h"):
                place.sum_squares, place.non_finite = place.capturing.wait()
            place.capturing = None
            self._release()

    def allocate(self, tensor: StoreTensor) -> int:
        """Return the number of a tensor's gradient in the store, making room for it the first time.

        Raises MemascendError for a tensor that was frozen when the model was offloaded.
        """
        if tensor.gradient is not None:
            return tensor.gradient
        if not tensor.trained:
            raise MemascendError(
                f"{tensor.places[0].name} was frozen when the model was offloaded, so that the plan of host memory "
                "holds no room for its gradient: set requires_grad before"
            )
        dtype = DTYPE_NAMES[tensor.dtype]
        if tensor.packed:
            tensor.gradient = self.runtime.create_packed_gradient(dtype, tensor.numel)
        else:
            tensor.gradient = self.runtime.create_gradient(
                tensor.unit.index, f"{tensor.name}.grad", dtype, tensor.numel
            )
        return tensor.gradient

    def settle(self, place: Place) -> None:
        """Replace the captured gradient by the value with which the program has filled the marker, if it has.

        `model.zero_grad(set_to_none=False)` fills it with zeros.
        """
        parameter = place.parameter
        if parameter.grad is place.marker and (value := place.gradient_written()) is not None:
            self._discard(place)
            parameter.grad = torch.full(place.shape, value, dtype=place.dtype, device=place.marker.device)

    def clear(self, place: Place) -> None:
        """Discard a parameter's gradient, as `zero_grad` does."""
        self._discard(place)
        if place.parameter.grad is place.marker and not place.tensor.packed:
            gradient_id = place.tensor.gradient
            assert gradient_id is not None, "a marker stands for a gradient in the store"
            self.runtime.clear_gradient(gradient_id)
        place.held = False
        place.parameter.grad = None
        self._accumulating.discard(place)

    def _discard(self, place: Place) -> None:
        """Wait for the end of a copy whose gradient is no longer wanted, even if it fails."""
        if place.capturing is not None:
            with suppress(MemascendError):
                place.capturing.wait()
            place.capturing = None

    def close(self) -> None:
        """Wait until no copy reads the device."""
        while self._leaving:
            with suppress(MemascendError):
                self._leaving[0][0].wait_copied()
            self._leaving.popleft()
        self._leaving_bytes = 0

    def read(self, place: Place) -> torch.Tensor | None:
        """Return a copy of a parameter's gradient, of its shape and dtype and on the CPU, or None if there is none."""
        tensor = place.tensor
        self.settle(place)
        if place.parameter.grad is not place.marker:
            return place.parameter.grad
        self.finish(place)
        assert tensor.gradient is not None, "a marker stands for a gradient in the store"
        pack = torch.empty(tensor.numel, dtype=tensor.dtype)  # (elements of the pack,)
        self.runtime.read_gradient(tensor.gradient, pack.data_ptr(), pack.nbytes)
        return pack[place.start : place.start + place.numel].view(place.shape).clone()
