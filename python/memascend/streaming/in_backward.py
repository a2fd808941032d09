"""Updates of the backward pass: weights change where they are, ahead of `optimizer.step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import MemascendError
from memascend.streaming.cache import use_before_step

if TYPE_CHECKING:
    from memascend._memascend import Applying, CudaEvent, Ticket
    from memascend.layout.units import StoreTensor, Unit
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.updates import MeasuredGradient, TensorUpdate


class BackwardUpdates:
    """Updates weights in the buffers of host memory, or on the store where the model computes on a device."""

    def __init__(self, cache: WeightCache, *, without_buffer: bool) -> None:
        """Update the units of `cache`; `without_buffer` says whether the weights may be on the store alone."""
        self._cache = cache
        self._without_buffer = without_buffer

    def can_update(self, tensor: StoreTensor) -> bool:
        """Return whether a tensor can be updated: its weights are hidden in a buffer, as the store has them."""
        cached = self._cache.cached_units[tensor.unit]
        if cached.lease is None:
            return self._without_buffer and not cached.users
        return cached.storage is not None and cached.is_resident and not (cached.dirty or cached.users)

    def weight_address(self, tensor: StoreTensor) -> int:
        """Return where the weights of a tensor lie whose unit is in a buffer."""
        lease = self._cache.cached_units[tensor.unit].lease
        assert lease is not None, "the unit is in a buffer"
        return lease.address + tensor.offset

    def update(self, update: TensorUpdate) -> Ticket:
        """Start an update, whose gradient the segments name, of weights that the backward pass has done with.

        They change where they are. `confirm` has to follow before the unit is used again.
        """
        cache, tensor, unit = self._cache, update.tensor, update.tensor.unit
        cached = cache.cached_units[unit]
        assert cached.lease is not None and tensor.id is not None, "as can_update says"
        if cached.ticket is not None:
            cache.settle(cached)
        ticket = cache.runtime.units.update_in_place(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            cached.lease,
            update,
            write_through=unit not in cache.resident_units,
            # The first update waits for the writes that the last step has left.
            beside=unit in cache.backward_units,
        )
        self._note_started(update, ticket)
        return ticket

    def update_from_device(
        self, update: TensorUpdate, gradient: int, ready: CudaEvent, measured: MeasuredGradient | None
    ) -> Applying:
        """Start an update with a gradient that is at an address of the device from `ready` on.

        Weights change in host memory if they are there, and on the store otherwise. `measured` gives the factors of
        channels, for an update that takes any. The device goes on computing with the weights that it has; `confirm` has
        to follow before the unit is used in another pass.
        """
        cache, tensor, unit = self._cache, update.tensor, update.tensor.unit
        cached = cache.cached_units[unit]
        assert tensor.id is not None, "as can_update says"
        if cached.ticket is not None:
            cache.settle(cached)
        ticket, applying = cache.runtime.units.update_from_device(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            cached.lease,
            update,
            gradient,
            tensor.numel * tensor.dtype.itemsize,
            ready,
            None if cached.lease is None else cache.uploads.latest(unit),
            measured,
            write_through=unit not in cache.resident_units,
            beside=unit in cache.backward_units,
        )
        self._note_started(update, ticket)
        return applying

    def _note_started(self, update: TensorUpdate, ticket: Ticket) -> None:
        update.started()
        unit = update.tensor.unit
        self._cache.cached_units[unit].backward_tickets.append(ticket)
        self._cache.backward_units.add(unit)

    def refuse(self) -> None:
        """Raise MemascendError if the backward pass has updated units and `optimizer.step()` has not followed."""
        if self._cache.backward_units:
            raise MemascendError(use_before_step("the model"))

    def confirm(self) -> set[Unit]:
        """Record that `optimizer.step()` has followed; return the units without other updates of the backward pass."""
        ahead = self._cache.backward_units
        confirmed = {unit for unit in ahead if not any(place.gradient.updated_in_backward for place in unit.places)}
        ahead -= confirmed
        return confirmed
