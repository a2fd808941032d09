"""Gradients taken over as autograd makes them: checked, summed and moved out of the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.units import DTYPE_NAMES

if TYPE_CHECKING:
    from memascend._memascend import Runtime
    from memascend.stream import Streamer
    from memascend.units import Place, StoreTensor


class GradientCapture:
    """Hooks on parameters. While a gradient is kept here, `parameter.grad` shows a marker.

    The marker has the right shape and dtype and NaN for every value, so that code which reads gradients by
    itself cannot go wrong silently; setting `parameter.grad = None` discards the gradient, as in PyTorch.
    """

    def __init__(self, runtime: Runtime, streamer: Streamer) -> None:
        """Keep gradients in `runtime`."""
        self.runtime = runtime
        self.streamer = streamer
        self._accumulating: set[Place] = set()

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
        place.sum_squares, place.non_finite = self.runtime.capture(
            tensor.gradient, start, gradient.data_ptr(), place.numel, accumulate
        )
        place.held = True
        if accumulate:
            place.added += 1
        else:
            place.captured += 1
        place.parameter.grad = place.marker

    def allocate(self, tensor: StoreTensor) -> None:
        """Make room for a tensor's gradient."""
        if tensor.gradient is not None:
            return
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
        if parameter.grad is place.marker and (value := place.written(place.marker)) is not None:
            parameter.grad = torch.full(place.shape, value, dtype=place.dtype)

    def clear(self, place: Place) -> None:
        """Discard a parameter's gradient, as `zero_grad` does."""
        if place.parameter.grad is place.marker and not place.tensor.packed:
            self.runtime.clear_gradient(place.tensor.gradient)
        place.held = False
        place.parameter.grad = None
        self._accumulating.discard(place)

    def read(self, place: Place) -> torch.Tensor | None:
        """Return a copy of a gradient kept here, or None: for inspection."""
        tensor = place.tensor
        self.settle(place)
        if place.parameter.grad is not place.marker:
            return place.parameter.grad
        whole = torch.empty(tensor.numel, dtype=tensor.dtype)
        self.runtime.read_gradient(tensor.gradient, whole.data_ptr(), whole.nbytes)
        return whole[place.start : place.start + place.numel].view(place.shape).clone()
