"""Captures gradients as autograd makes them: checks them for overflow, adds them up and moves them out of memory."""

from __future__ import annotations

import math
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from memascend.autograd.proxies import applied_gradient, copy_of, is_proxy, make_marker
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.units import DTYPE_NAMES, raw_tensor_access
from memascend.vocabulary.gradient import TableGradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle

    from memascend._memascend import GradientRanges, Projection, Runtime
    from memascend.common.timeline import Timeline
    from memascend.gradients.in_backward import UpdatesInBackward
    from memascend.gradients.trained_later import LaterRoom
    from memascend.layout.units import ParameterEntry, StoreTensor
    from memascend.streaming.streamer import Streamer


class GradientCapture:
    """Captures the gradients of parameters through autograd hooks. `parameter.grad` then is a marker.

    Call `finish` before using the norm or the overflow check of a gradient.

    The marker is a proxy (`memascend.autograd.proxies`): an operation on it is done with the gradient.
    Setting `parameter.grad = None` discards the gradient, as in PyTorch.

    A tensor's `gradient_dtype` may be bfloat16 where its weights are float32. The stored gradient is then the
    rounding of the new one, or of the float32 sum of the stored and the new one; norm and overflow check are of the
    stored gradient.
    """

    def __init__(
        self,
        runtime: Runtime,
        streamer: Streamer,
        timeline: Timeline,
        in_backward: UpdatesInBackward | None = None,
    ) -> None:
        """Capture into `runtime`. Gradients that `in_backward` takes are applied at once, and not captured."""
        self.runtime = runtime
        self.streamer = streamer
        self.timeline = timeline
        self.in_backward = in_backward
        self._accumulating: set[ParameterEntry] = set()
        #: Room for gradients of weights that train later; the session gives it.
        self.later: LaterRoom

    def watch(self, place: ParameterEntry) -> None:
        """Capture the gradients of a parameter from now on, if it is trained."""
        parameter = place.parameter
        if place.gradient.hooks or not parameter.requires_grad:
            return

        def before(_: Any) -> None:
            with self.streamer.turns.take("a backward pass"), raw_tensor_access():
                self._before(place)

        def after(_: torch.Tensor) -> None:
            with self.streamer.turns.take("a backward pass"), raw_tensor_access():
                self.capture(place, accumulate=place in self._accumulating)
                self._accumulating.discard(place)

        if place.tensor.packed and not place.tensor.trained:
            # Before the pass fills the staging buffers. A refusal waits until there is a gradient.
            with suppress(MemascendError):
                self.allocate(place.tensor)
        # A hook of the node, not of the tensor: `torch.autograd.grad` runs hooks of the tensor too,
        # and accumulates nothing.
        with raw_tensor_access():
            node = get_gradient_edge(parameter).node
        captured = parameter.register_post_accumulate_grad_hook(after)
        # The program's own hooks see the captured gradient, wherever it has registered them.
        hooks: Any = parameter._post_accumulate_grad_hooks
        hooks.move_to_end(captured.id, last=False)
        place.gradient.hooks = [_HeldNode(node, node.register_prehook(before)), captured]

    def _before(self, place: ParameterEntry) -> None:
        """Prepare for autograd to accumulate a gradient."""
        parameter = place.parameter
        self._accumulating.discard(place)  # A backward pass that failed may have left it.
        if parameter.grad is not None and parameter.grad is not place.gradient.marker:
            place.gradient.must_wait_for_step = (
                True  # Autograd adds to a tensor of the program's, which it may go on to use.
            )
        self.settle(place)
        gradient = parameter.grad
        if gradient is place.gradient.marker:
            if place.gradient.updated_in_backward:
                raise MemascendError(applied_gradient(place.name))
            if not place.gradient.held:
                raise MemascendError(
                    f"the gradient of {place.name} was consumed by optimizer.step(), or lost in a backward pass that "
                    "failed, so that no other can be added to it: call optimizer.zero_grad() before the next backward()"
                )
            # AccumulateGrad would add to the marker. With None it stores the new gradient, which
            # `capture` adds.
            parameter.grad = None
            self._accumulating.add(place)
        elif is_proxy(gradient):
            parameter.grad = copy_of(gradient)

    def unwatch(self, place: ParameterEntry) -> None:
        """Stop capturing: PyTorch keeps the parameter's gradients again."""
        for hook in place.gradient.hooks:
            hook.remove()
        place.gradient.hooks = []

    def capture(self, place: ParameterEntry, accumulate: bool) -> None:
        """Move `parameter.grad`, a tensor of values, out of memory; `accumulate` adds it to the one captured before.

        Raises ValueError for a sparse gradient, MemascendError for one with a graph of its own.
        """
        gradient = self._take(place, accumulate)
        if gradient is None:
            return
        if (
            self.in_backward is not None
            and not isinstance(gradient, TableGradient)
            and self.in_backward.take(place, gradient)
        ):
            return
        self.streamer.updates.apply(place.tensor.unit)
        with span(f"gradient of {place.name}"):
            if isinstance(gradient, TableGradient) and self._made_whole(place):
                gradient = gradient.dense()
            if isinstance(gradient, TableGradient):
                self._keep_blocks(place, gradient, accumulate)
            else:
                self._keep(place, gradient.detach().contiguous(), accumulate)
        self._note_kept(place, accumulate)

    def _made_whole(self, place: ParameterEntry) -> bool:
        """Return whether the gradient of a table is made as a whole, and not block by block."""
        return place.tensor.packed

    def _take(self, place: ParameterEntry, accumulate: bool) -> torch.Tensor | None:
        """Take a new gradient from `parameter.grad`, and put the gradient that it is added to, if any, back there.

        None if there is nothing to add. Raises as `capture`.
        """
        gradient = place.parameter.grad
        if gradient is None:  # A function gave None for the gradient.
            if accumulate:
                place.parameter.grad = place.gradient.marker
            return None
        place.parameter.grad = place.gradient.marker if accumulate else None
        if gradient.is_sparse:
            raise ValueError(f"{place.name} has a sparse gradient, which memascend does not support: use sparse=False")
        if gradient.requires_grad:
            del gradient  # The error's traceback must not hold the graph, which holds weights.
            raise MemascendError(
                f"backward(create_graph=True) gives {place.name} a gradient with a graph, which cannot be kept on SSD: "
                "use torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        if place.gradient.updated_in_backward:
            raise MemascendError(applied_gradient(place.name))
        place.gradient.must_wait_for_step |= accumulate
        return gradient

    def _note_kept(self, place: ParameterEntry, accumulate: bool) -> None:
        """Note that a new gradient is kept, or was added to the one that is; `parameter.grad` stands for it."""
        place.gradient.held = True
        if accumulate:
            place.gradient.added += 1
        else:
            place.gradient.captured += 1
            # The proxy of an earlier gradient must not show this one.
            place.gradient.marker = make_marker(place)
        place.parameter.grad = place.gradient.marker

    def _keep(self, place: ParameterEntry, gradient: torch.Tensor, accumulate: bool, stays: bool = True) -> None:
        """Put a contiguous gradient into memascend's keeping, or add it to the one there.

        One that `stays` may be kept where it was made, and later ones are added to it in place.
        """
        place.gradient.filled = place.gradient.projection = None
        gradient_id, start = self._room_of(place)
        projection = self._projection_of(place)
        if projection is None:
            place.gradient.sum_squares, place.gradient.non_finite = self.runtime.gradients.capture(
                gradient_id, start, gradient.data_ptr(), place.numel, accumulate
            )
            return
        projected = self._allocate_projected(place, projection)
        place.gradient.sum_squares, place.gradient.non_finite = self.runtime.projections.capture_projected(
            gradient_id, gradient.data_ptr(), accumulate, projection, projected, torch.get_num_threads()
        )
        place.gradient.projection = projection

    def _room_of(self, place: ParameterEntry) -> tuple[int, int]:
        """Return the number of the store's gradient that a parameter's is in, and where it begins there."""
        return self.allocate(place.tensor), place.start if place.tensor.packed else 0

    def _projection_of(self, place: ParameterEntry) -> Projection | None:
        """Return how a gradient is projected as it is captured, if it is."""
        optimizer = place.states.owner
        # The gradients of a pack stay in memory: they are projected in the step.
        return None if optimizer is None or place.tensor.packed else optimizer.projection_of(place.parameter)

    def _allocate_projected(self, place: ParameterEntry, projection: Projection) -> int:
        """Return the number of a parameter's projected gradient in the store, making room for it the first time.

        It is a gradient of bfloat16, of two elements for each float32.
        """
        if place.gradient.projected is None or place.gradient.projected[1] != projection.numbers:
            name = f"{place.name}.projected"
            number = self.runtime.gradients.create_gradient(
                place.tensor.unit.index, name, "bfloat16", 2 * projection.numbers, "bfloat16"
            )
            place.gradient.projected = number, projection.numbers
        return place.gradient.projected[0]

    def _keep_blocks(self, place: ParameterEntry, gradient: TableGradient, accumulate: bool) -> None:
        """Put the gradient of a table into the store's keeping block by block, or add it to the one there."""
        place.gradient.filled = place.gradient.projection = None
        try:
            if accumulate:
                self.finish(place)  # The gradient of an earlier backward pass, to which this one is added.
            else:
                self._discard(place)
            ranges = self.runtime.gradients.begin_gradient(self.allocate(place.tensor), accumulate)
            self._add_to(ranges, map(itemgetter(1), gradient.blocks()))
            place.gradient.sum_squares, place.gradient.non_finite = ranges.end()
        except BaseException:
            # Some blocks are there, and others are not. The sum of earlier backward passes is gone, and reading it or
            # adding to it is refused.
            place.gradient.held, place.parameter.grad = False, place.gradient.marker if accumulate else None
            raise

    def _add_to(self, ranges: GradientRanges, blocks: Iterable[torch.Tensor]) -> None:
        """Add the blocks of a table's gradient, (n, width) each and in order, to the ranges that are captured."""
        for block in map(torch.Tensor.contiguous, blocks):
            ranges.add(block.data_ptr(), block.numel())
            del block  # before the next one is made

    def wait_copied(self) -> None:
        """Wait until no gradient is on its way to host memory, where these are made."""

    def finish(self, place: ParameterEntry) -> None:
        """Wait until a gradient is captured, and its norm and overflow check are known."""

    def allocate(self, tensor: StoreTensor) -> int:
        """Return the number of a tensor's gradient in the store, making room for it the first time.

        Raises MemascendError for a tensor that was frozen when the model was offloaded, and for which there is none.
        """
        if tensor.gradient is not None:
            return tensor.gradient
        if not tensor.trained:
            tensor.gradient = self.later.allocate(tensor)
            return tensor.gradient
        dtype, kept = DTYPE_NAMES[tensor.dtype], DTYPE_NAMES[tensor.gradient_dtype]
        if tensor.packed:
            tensor.gradient = self.runtime.gradients.create_packed_gradient(dtype, tensor.numel, kept)
        else:
            tensor.gradient = self.runtime.gradients.create_gradient(
                tensor.unit.index, f"{tensor.name}.grad", dtype, tensor.numel, kept
            )
        return tensor.gradient

    def settle(self, place: ParameterEntry) -> None:
        """Make a gradient that was filled with a value, as by `zero_grad(set_to_none=False)`, an ordinary tensor."""
        parameter = place.parameter
        if parameter.grad is place.gradient.marker and place.gradient.filled is not None:
            self._discard(place)
            parameter.grad = self.values(place).view(place.shape)
            place.gradient.filled, place.gradient.held = None, False

    def note_used(self, place: ParameterEntry) -> None:
        """Note that the program uses a gradient, or its weight within a backward pass, beside `optimizer.step()`.

        From then on the parameter's updates wait for the step (`memascend.gradients.in_backward`).
        """
        place.gradient.must_wait_for_step = True

    def stats(self, place: ParameterEntry) -> tuple[float, bool]:
        """Return the sum of squares of a finished gradient, and whether a value is infinite or NaN."""
        self.note_used(place)
        return place.gradient.sum_squares, place.gradient.non_finite

    def take_projected(self, place: ParameterEntry, projection: Projection) -> int | None:
        """Return the number in the store of a gradient as `projection` projects it, once; None where it is not there.

        It is there if the gradient was projected so when it was captured.
        """
        if place.gradient.projection == projection:
            assert place.gradient.projected is not None, "the projection was stored"
            place.gradient.projection = None
            return place.gradient.projected[0]
        return None

    def consume(self, place: ParameterEntry) -> None:
        """Note that a step has taken a gradient: it refuses to be read or added to until `zero_grad`."""
        place.gradient.held = False

    def fill(self, place: ParameterEntry, value: float) -> None:
        """Set every element of a parameter's gradient to a value."""
        if place.gradient.updated_in_backward:
            raise MemascendError(applied_gradient(place.name))
        self._discard(place)
        # In the stored dtype: a value that overflows there is not finite.
        value = torch.full((), value, dtype=place.dtype).to(place.tensor.gradient_dtype).item()
        place.gradient.held, place.gradient.filled = True, value
        place.gradient.sum_squares, place.gradient.non_finite = value * value * place.numel, not math.isfinite(value)
        place.gradient.added += 1

    def values(self, place: ParameterEntry) -> torch.Tensor:
        """Return a copy of the gradient that memascend keeps: (elements of the parameter,), where it computes."""
        device = place.binding.absent.device
        self.note_used(place)
        if place.gradient.filled is not None:
            return torch.full((place.numel,), place.gradient.filled, dtype=place.dtype, device=device)
        self.finish(place)
        tensor = place.tensor
        assert tensor.gradient is not None, "a marker stands for a gradient in the store"
        stored = torch.empty(tensor.numel, dtype=tensor.gradient_dtype)  # (elements of the tensor,)
        self.runtime.gradients.read_gradient(tensor.gradient, stored.data_ptr(), stored.nbytes)
        if tensor.packed:
            stored = stored[place.start : place.start + place.numel].clone()
        return stored.to(device, tensor.dtype)

    def replace(self, place: ParameterEntry, values: torch.Tensor) -> None:
        """Keep `values`, (elements of the parameter,), instead of the present gradient."""
        self.note_used(place)
        # The update that waits for the step's gradient reads it from where the new one goes.
        self.streamer.updates.apply(place.tensor.unit)
        self._discard(place)
        self._keep(place, values, accumulate=False, stays=False)
        place.gradient.added += 1

    def clear(self, place: ParameterEntry) -> None:
        """Discard a parameter's gradient, as `zero_grad` does."""
        if place.gradient.updated_in_backward:
            raise MemascendError(applied_gradient(place.name))
        self._discard(place)
        # A step has taken the gradient if it is not held, or was filled since: the update that waits
        # for it needs it.
        held = place.gradient.held and place.gradient.filled is None
        if place.parameter.grad is place.gradient.marker and held and not place.tensor.packed:
            gradient_id = place.tensor.gradient
            assert gradient_id is not None, "a marker stands for a gradient in the store"
            self.runtime.gradients.clear_gradient(gradient_id)
            if place.gradient.projection is not None and place.gradient.projected is not None:
                self.runtime.gradients.clear_gradient(place.gradient.projected[0])
        place.gradient.projection = None
        place.gradient.held, place.gradient.filled = False, None
        place.parameter.grad = None
        self._accumulating.discard(place)

    def _discard(self, place: ParameterEntry) -> None:
        """Forget a gradient, and wait for the end of its copy, even if that fails."""

    def complete(self) -> None:
        """Complete the gradients of the last backward pass; in one process they are complete."""

    def close(self) -> None:
        """Wait until no update uses a gradient."""
        if self.in_backward is not None:
            with suppress(MemascendError):
                self.in_backward.close()


class _HeldNode:
    """A hook of an autograd node, which holds the node: PyTorch makes a new one, without hooks, when none does."""

    def __init__(self, node: Any, hook: RemovableHandle) -> None:
        self.node = node
        self.remove = hook.remove
