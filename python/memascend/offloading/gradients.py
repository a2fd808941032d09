"""Gradients taken over as autograd makes them: checked, summed and moved out of the way."""

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
    """Hooks on parameters. While a gradient is kept here, `parameter.grad` shows a marker.

    From a device, gradients are copied by a thread of the native side while the device computes on; whoever needs what
    comes of it calls `finish` first.

    The marker has the right shape and dtype and NaN for every value, so that code which reads gradients by
    itself cannot go wrong silently; setting `parameter.grad = None` discards the gradient, as in PyTorch.
    """

    def __init__(
        self,
        runtime: Runtime,
        streamer: Streamer,
        timeline: Timeline,
        device: ComputeDevice | None = None,
        in_flight_bytes: int = 0,
    ) -> None:
        """Keep gradients in `runtime`; of those on their way from `device`, at most about `in_flight_bytes` live."""
        self.runtime = runtime
        self.streamer = streamer
        self.timeline = timeline
        self.device = device
        self._accumulating: set[Place] = set()
        self._in_flight_bytes = in_flight_bytes
        #: What the device is still reading, in the order in which it is copied, and its bytes.
        self._leaving: deque[tuple[Capture, CudaEvent, int, tuple[torch.Tensor, ...]]] = deque()
        self._leaving_bytes = 0

    def watch(self, place: Place) -> None:
        """Take over the gradients of a parameter from now on."""
        parameter = place.parameter
        if place.hooks or not parameter.requires_grad:
            return

        def before(_: torch.Tensor) -> None:
            self._accumulating.discard(place)  # a backward pass that failed in between may have left it
            self.settle(place)
            if parameter.grad is place.marker:
                # AccumulateGrad would add to the marker: let it find nothing, and add ourselves.
                parameter.grad = None
                self._accumulating.add(place)

        def after(_: torch.Tensor) -> None:
            self.capture(place, accumulate=place in self._accumulating)
            self._accumulating.discard(place)

        place.hooks = [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]

    def unwatch(self, place: Place) -> None:
        """Leave a parameter's gradients to PyTorch again."""
        for hook in place.hooks:
            hook.remove()
        place.hooks = []

    def capture(self, place: Place, accumulate: bool) -> None:
        """Move `parameter.grad` (a real tensor) into the store's keeping."""
        gradient = place.parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(f"{place.name} has a sparse gradient, which memascend does not support: use sparse=False")
        place.parameter.grad = None
        gradient = gradient.detach().contiguous()
        tensor = place.tensor
        self.streamer.apply_update(tensor.unit)
        if tensor.gradient is None:
            self.allocate(tensor)
        start = place.start if tensor.packed else 0
        with span(f"gradient of {place.name}"):
            if self.device is None:
                place.sum_squares, place.non_finite = self.runtime.capture(
                    tensor.gradient, start, gradient.data_ptr(), place.numel, accumulate
                )
            else:
                self._capture_from_device(place, gradient, start, accumulate)
        place.held = True
        if accumulate:
            place.added += 1
        else:
            place.captured += 1
        place.parameter.grad = place.marker

    def _capture_from_device(self, place: Place, gradient: torch.Tensor, start: int, accumulate: bool) -> None:
        assert self.device is not None and place.tensor.gradient is not None
        # Where it is the whole gradient, the device measures it: the host then never touches its bytes.
        sums = None if accumulate else self.device.block_sums(gradient)
        if accumulate:
            try:
                self.finish(place)  # that of an earlier backward pass, which this one is added to
            except BaseException:
                place.parameter.grad = place.marker  # a step tells it again, and zero_grad ends it
                raise
        else:
            self._discard(place)
        ready = self.device.record()
        capture = self.runtime.capture_from_device(
            place.tensor.gradient,
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
        """Let go of gradients that the device has been read from; wait for some where too many are on their way."""
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
        """Wait until a gradient on its way from the device is kept and measured.

        Raises what went wrong on the way: the gradient is not to be used then.
        """
        if place.capturing is not None:
            with self.timeline.waiting("d2h"):
                place.sum_squares, place.non_finite = place.capturing.wait()
            place.capturing = None
            self._release()

    def allocate(self, tensor: StoreTensor) -> None:
        """Make room for a tensor's gradient."""
        if tensor.gradient is not None:
            return
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

    def settle(self, place: Place) -> None:
        """Make a gradient that was filled in place, as `model.zero_grad(set_to_none=False)` does, the true one."""
        parameter = place.parameter
        if parameter.grad is place.marker and (value := place.gradient_written()) is not None:
            self._discard(place)
            parameter.grad = torch.full(place.shape, value, dtype=place.dtype, device=place.marker.device)

    def clear(self, place: Place) -> None:
        """Discard a parameter's gradient, as `zero_grad` does."""
        self._discard(place)
        if place.parameter.grad is place.marker and not place.tensor.packed:
            self.runtime.clear_gradient(place.tensor.gradient)
        place.held = False
        place.parameter.grad = None
        self._accumulating.discard(place)

    def _discard(self, place: Place) -> None:
        """Wait for the end of a gradient that nobody wants any more; whatever came of it."""
        if place.capturing is not None:
            with suppress(MemascendError):
                place.capturing.wait()
            place.capturing = None

    def close(self) -> None:
        """Wait until the device is read from no more."""
        while self._leaving:
            with suppress(MemascendError):
                self._leaving[0][0].wait_copied()
            self._leaving.popleft()
        self._leaving_bytes = 0

    def read(self, place: Place) -> torch.Tensor | None:
        """Return a copy of a gradient kept here, or None: for inspection."""
        tensor = place.tensor
        self.settle(place)
        if place.parameter.grad is not place.marker:
            return place.parameter.grad
        self.finish(place)
        whole = torch.empty(tensor.numel, dtype=tensor.dtype)
        self.runtime.read_gradient(tensor.gradient, whole.data_ptr(), whole.nbytes)
        return whole[place.start : place.start + place.numel].view(place.shape).clone()
