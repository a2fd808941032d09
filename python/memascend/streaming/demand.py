"""Which buffers of host memory are needed, and how soon: the cache of host memory asks before it evicts a unit.

Everything here is pure: it looks at the order of uses, and at records of which units are where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memascend.streaming.order import NEVER

if TYPE_CHECKING:
    from collections.abc import Container, Set

    from memascend.layout.units import Unit
    from memascend.streaming.order import UseOrder


class Used(Protocol):
    """A unit and how many modules use it (`memascend.streaming.cache.CachedUnit`)."""

    unit: Unit
    users: int


class Demand(Protocol):
    """The demand for the buffers of host memory."""

    def is_busy(self, used: Used, /) -> bool:
        """Return whether the unit must not be evicted."""

    def next_fetch(self, unit: Unit, /) -> int:
        """Return the number of the next use that needs the unit in host memory, or NEVER."""

    def note_dropped(self, unit: Unit, /) -> None:
        """Record that the unit has left host memory."""


class HostDemand:
    """The demand of a model that computes in host memory."""

    def __init__(self, order: UseOrder[Unit]) -> None:
        """Follow the order of uses."""
        self._order = order
        #: Units that hold the shares of all ranks. A rank that evicted the last one used would gather it again, while
        #: others still have it.
        self.whole: set[Unit] = set()

    def is_busy(self, used: Used) -> bool:
        """Return whether a module uses the unit, or the other ranks expect it here."""
        return used.users > 0 or used.unit in self.whole

    def next_fetch(self, unit: Unit) -> int:
        """Return the number of the next use."""
        return self._order.next_use(unit)

    def note_dropped(self, unit: Unit) -> None:
        """Record that the unit, and with it the shares of other ranks, has left host memory."""
        self.whole.discard(unit)


class DeviceDemand:
    """The demand of a model that computes on a device, which needs a unit in host memory until it is copied."""

    def __init__(self, order: UseOrder[Unit], on_device: Container[Unit], changing: Set[Unit]) -> None:
        """Follow the order of uses; `on_device` has the units with a copy there.

        `changing` are the units that the backward pass may update in host memory.
        """
        self._order = order
        self._on_device = on_device
        self._changing = changing
        #: Whether units are wanted in host memory only.
        self.to_host = False

    def is_busy(self, used: Used) -> bool:
        """Return whether a module uses the unit in host memory: once it was copied, the device uses the copy."""
        return used.users > 0 and (self.to_host or used.unit not in self._on_device)

    def next_fetch(self, unit: Unit) -> int:
        """Return the number of the next use that copies the unit, or that updates it in host memory."""
        use = self._order.next_use(unit)
        if unit not in self._on_device:
            return use
        if unit in self._changing and self._order.kind is True:
            # The backward pass updates it here, once its gradients have come: unless it lies here then, it is read.
            return 0 if use == NEVER and unit is self._order.latest else use
        # A unit on the device is needed in host memory only after the device has evicted the unit.
        return use + NEVER

    def note_dropped(self, unit: Unit) -> None:
        """Do nothing: the copy on the device stays."""
