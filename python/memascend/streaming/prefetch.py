"""The prefetch of units into host memory, and from there to a device, in the order of their expected uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memascend.streaming.order import DEVICE_AHEAD, PREFETCH_UNITS

if TYPE_CHECKING:
    from collections.abc import Container

    from memascend.layout.units import Unit
    from memascend.streaming.order import UseOrder


class Host(Protocol):
    """The cache of host memory (`memascend.streaming.cache.WeightCache`)."""

    tables: set[Unit]
    streamed: set[Unit]

    def is_hosted(self, unit: Unit, /) -> bool:
        """Return whether the unit is in host memory, or on its way."""

    def fetch_ahead(self, unit: Unit, number: int, /) -> bool:
        """Start fetching a unit for use number `number`; return whether a buffer was found."""


class Device(Protocol):
    """The cache of a device (`memascend.streaming.device_cache.DeviceCache`)."""

    @property
    def on_device(self) -> Container[Unit]:
        """The units with a copy on the device, or on its way there."""

    @property
    def by_blocks(self) -> Container[Unit]:
        """Tables without a buffer on the device."""

    def upload_ahead(self, unit: Unit, number: int, /) -> bool:
        """Copy a unit for use number `number`; return whether it was in host memory and a buffer was found."""


class HostPrefetcher:
    """Fetches the units that a pass uses next into host memory."""

    def __init__(self, order: UseOrder[Unit], host: Host) -> None:
        """Fetch by `order` into the buffers of `host`."""
        self._order = order
        self._host = host

    def prefetch(self) -> None:
        """Start fetching the next units, as long as there are buffers for them."""
        self._order.prefetch(PREFETCH_UNITS, self._host.is_hosted, self._host.fetch_ahead)


class DevicePrefetcher:
    """Copies the units that a pass uses next to a device, and fetches the units after them into host memory."""

    def __init__(self, order: UseOrder[Unit], host: Host, device: Device) -> None:
        """Fetch by `order` into the buffers of `host`, and copy into the buffers of `device`."""
        self._order = order
        self._host = host
        self._device = device

    def prefetch(self) -> None:
        """Start the next copies and fetches, as long as there are buffers for them."""
        host, device = self._host, self._device
        hosted, in_order = 0, True
        for distance, (number, unit) in enumerate(self._order.upcoming(DEVICE_AHEAD + PREFETCH_UNITS)):
            if unit in device.on_device:
                continue
            if unit in host.streamed or unit in device.by_blocks or (unit in host.tables and number == 0):
                # It is copied as it is used; of an embedding, with which a pass begins, rows are used. Ahead of that it
                # is updated, or read.
                if not self._fetch(unit, number):
                    return
                continue
            if in_order and distance < DEVICE_AHEAD and device.upload_ahead(unit, number):
                continue
            # Later units are copied later: buffers are for the units that are used first.
            in_order = False
            if hosted == PREFETCH_UNITS or not self._fetch(unit, number):
                return
            hosted += 1

    def _fetch(self, unit: Unit, number: int) -> bool:
        return self._host.is_hosted(unit) or self._host.fetch_ahead(unit, number)
