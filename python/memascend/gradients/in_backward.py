"""Updates in the backward pass: each large tensor is updated as soon as autograd has made its gradient.

The gradient then never goes to the SSD. Its bits are the same as after an update in `optimizer.step()`, since `step`
refuses to follow where its options, or the gradients that it would use, differ from the options and gradients of the
updates.

A weight's node in the graph runs after all nodes that use the weight, so its bytes can change in the unit's buffer
while the rest of the layer goes on; names in the graph carry versions, so a later use is refused. Uses that give the
weight no gradient (`detach()`, an attribute of a custom function's context) may come later: as long as a graph has the
weight's name, or anything but the graph's other weights refers to its bytes, its update waits for `step`. Updated
weights are written at once. Each pass waits at its first gradient for the commit of the step before. Between the
backward pass and `step` a part of the model is a step ahead, so everything that would read it is refused, and a model
that is closed there keeps its last durable step.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from memascend.autograd.proxies import make_marker
from memascend.autograd.recompute import recomputed_views
from memascend.common.interrupts import uninterrupted
from memascend.errors import MemascendError
from memascend.memory_plan.host import updates_in_backward
from memascend.streaming.updates import TensorUpdate

if TYPE_CHECKING:
    from memascend._memascend import Ticket
    from memascend.common.timeline import Timeline
    from memascend.durability.commits import CommitLog
    from memascend.durability.protocols import OptimizerProtocol
    from memascend.layout.units import ParameterEntry, StoreTensor
    from memascend.streaming.streamer import Streamer
    from memascend.streaming.updates import Segment


#: Counts the references to a storage, by its address. A PyTorch without it tells nothing, and updates wait for `step`.
_use_count = getattr(torch._C, "_storage_Use_Count", None)


class UpdatesInBackward:
    """Takes the updates of one session's backward passes, and holds gradients until their update has used them."""

    def __init__(
        self,
        streamer: Streamer,
        commit_log: CommitLog,
        timeline: Timeline,
        in_flight_bytes: int,
    ) -> None:
        """TensorUpdate weights in the buffers of `streamer`. Gradients in use take about `in_flight_bytes` at most."""
        self._streamer, self._backward = streamer, streamer.backward_updates
        self._commit_log = commit_log
        self._timeline = timeline
        self._in_flight_bytes = in_flight_bytes
        #: Updates under way and their gradients, the oldest first.
        self._in_flight: deque[tuple[Ticket, torch.Tensor]] = deque()

    def take(self, place: ParameterEntry, gradient: torch.Tensor) -> bool:
        """Start the update of a parameter whose gradient autograd has just made, if it need not wait for `step`.

        Afterwards `parameter.grad` is a marker, as after `step`.
        """
        optimizer, tensor = self._optimizer_of(place), place.tensor
        if optimizer is None or self._is_viewed(place):
            return False
        # As it would have been put aside.
        gradient = gradient.to(tensor.gradient_dtype).to(tensor.dtype).contiguous()
        addresses = self._backward.weight_address(tensor), gradient.data_ptr()
        segment = optimizer.backward_segment(place.parameter, addresses)
        if segment is None:
            return False
        self._commit_log.wait_committed(optimizer)
        self._release(gradient.nbytes)
        with uninterrupted():
            optimizer.prepare_in_backward(place.parameter, segment)
            self._in_flight.append((self._backward.update(self._update(tensor, segment)), gradient))
            self._note_taken(place, optimizer, segment)
        return True

    def _optimizer_of(self, place: ParameterEntry) -> OptimizerProtocol | None:
        """Return the optimizer that may update a parameter now; None if the update waits for `step`."""
        tensor = place.tensor
        if (
            place.gradient.must_wait_for_step
            or not updates_in_backward(tensor)
            or not self._backward.can_update(tensor)
        ):
            return None
        optimizer = None if place.binding.saved_names else place.states.owner
        return optimizer if optimizer is not None and self._commit_log.allows_in_backward(optimizer) else None

    def _update(self, tensor: StoreTensor, segment: Segment) -> TensorUpdate:
        return TensorUpdate(
            tensor, segment.updated, captured=False, write_through=self._commit_log.writes_through(in_backward=True)
        )

    def _note_taken(self, place: ParameterEntry, optimizer: OptimizerProtocol, segment: Segment) -> None:
        """Note that the update of a parameter was started."""
        optimizer.applied_in_backward(place.parameter, segment)
        place.gradient.updated_in_backward, place.gradient.filled = True, None
        place.gradient.captured += 1
        place.gradient.marker = make_marker(place)
        place.parameter.grad = place.gradient.marker

    def _is_viewed(self, place: ParameterEntry) -> bool:
        """Return whether a part of the graph that gives the weight no gradient may still read it in place."""
        storage = self._streamer.cached_units[place.tensor.unit].storage
        if storage is None or _use_count is None:
            return True
        whole = storage.untyped_storage()
        recomputed = recomputed_views(whole)
        # Beside those, the unit's own tensor and `whole` refer to the bytes.
        if _use_count(whole._cdata) != len(recomputed) + 2:
            return True
        return any(begin < place.offset + place.nbytes and place.offset < end for begin, end in recomputed)

    def _release(self, wanted: int = 0) -> None:
        """Drop gradients that have been used. Wait for the oldest while they and `wanted` bytes are too many."""
        while self._in_flight:
            ticket, _ = self._in_flight[0]
            held = sum(gradient.nbytes for _, gradient in self._in_flight)
            if not ticket.is_ready() and held + wanted <= self._in_flight_bytes:
                return
            try:
                with self._timeline.waiting("cpu_update"):
                    ticket.wait()
            finally:
                self._in_flight.popleft()

    def finish(self, place: ParameterEntry) -> float | None:
        """Have `optimizer.step()` follow the update of a parameter, as `confirm` then says.

        Returns the norm of the step, where the update was to find it. Raises the error of an update that failed.
        """
        return None

    def confirm(self, places: list[ParameterEntry]) -> None:
        """Note that `optimizer.step()` has followed the updates of `places`."""
        for place in places:
            place.gradient.updated_in_backward = False
        self._streamer.confirm_backward_updates()
        self._release()

    def close(self) -> None:
        """Wait until no update uses a gradient."""
        self._in_flight_bytes = -1
        while self._in_flight:
            with suppress(MemascendError):
                self._release()
