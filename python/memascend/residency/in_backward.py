"""Updates of the backward pass: weights change where they are, ahead of `optimizer.step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import MemascendError
from memascend.residency.cache import early_use

if TYPE_CHECKING:
    from memascend._memascend import Applying, CudaEvent, Ticket
    from memascend.layout.units import StoreTensor, Unit
    from memascend.residency.cache import WeightCache
    from memascend.residency.updates import Measured, Update


class BackwardUpdates:
    """Updates weights in the buffers of host memory, or on the store where the model computes on a device."""

    def __init__(self, cache: WeightCache, *, without_buffer: bool) -> None:
        """Update the units of `cache`; `without_buffer` says whether the weights may be on the store alone."""
        self._cache = cache
        self._without_buffer = without_buffer

    def can_update(self, tensor: StoreTensor) -> bool:
        """Return whether a tensor can be updated: its weights are hidden in a buffer, as the store has them."""
        residency = self._cache.residencies[tensor.unit]
        if residency.lease is None:
            return self._without_buffer and not residency.users
        return residency.storage is not None and residency.stays and not (residency.dirty or residency.users)

    def weight_address(self, tensor: StoreTensor) -> int:
        """Return where the weights of a tensor lie whose unit is in a buffer."""
        lease = self._cache.residencies[tensor.unit].lease
        assert lease is not None, "the unit is in a buffer"
        return lease.address + tensor.offset

    def update(self, update: Update) -> Ticket:
        """Start an update, whose gradient the segments name, of weights that the backward pass has done with.

        They change where they are. `confirm` has to follow before the unit is used again.
        """
        cache, tensor, unit = self._cache, update.tensor, update.tensor.unit
        residency = cache.residencies[unit]
        assert residency.lease is not None and tensor.id is not None, "as can_update says"
        if residency.ticket is not None:
            cache.settle(residency)
        ticket = cache.runtime.units.update_in_place(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            residency.lease,
            update,
            write_through=unit not in cache.staying,
            # The first update waits for the writes that the last step has left.
            beside=unit in cache.early_units,
        )
        self._note_started(update, ticket)
        return ticket

    def update_from_device(
        self, update: Update, gradient: int, ready: CudaEvent, measured: Measured | None
    ) -> Applying:
        """Start an update with a gradient that is at an address of the device from `ready` on.

        Weights change in host memory if they are there, and on the store otherwise. `measured` gives the factors of
        channels, for an update that takes any. The device goes on computing with the weights that it has; `confirm` has
        to follow before the unit is used in another pass.
        """
        cache, tensor, unit = self._cache, update.tensor, update.tensor.unit
        residency = cache.residencies[unit]
        assert tensor.id is not None, "as can_update says"
        if residency.ticket is not None:
            cache.settle(residency)
        ticket, applying = cache.runtime.units.update_from_device(
            unit.index,
            (tensor.id, tensor.offset, tensor.nbytes),
            residency.lease,
            update,
            gradient,
            tensor.numel * tensor.dtype.itemsize,
            ready,
            None if residency.lease is None else cache.uploads.latest(unit),
            measured,
            write_through=unit not in cache.staying,
            beside=unit in cache.early_units,
        )
        self._note_started(update, ticket)
        return applying

    def _note_started(self, update: Update, ticket: Ticket) -> None:
        update.started()
        unit = update.tensor.unit
        self._cache.residencies[unit].early.append(ticket)
        self._cache.early_units.add(unit)

    def refuse(self) -> None:
        """Raise MemascendError if the backward pass has updated units and `optimizer.step()` has not followed."""
        if self._cache.early_units:
            raise MemascendError(early_use("the model"))

    def confirm(self) -> set[Unit]:
        """Record that `optimizer.step()` has followed; return the units without other updates of the backward pass."""
        ahead = self._cache.early_units
        confirmed = {unit for unit in ahead if not any(place.gradient.early for place in unit.places)}
        ahead -= confirmed
        return confirmed
