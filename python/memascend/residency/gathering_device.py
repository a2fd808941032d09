"""Residency on a device of a model that is divided over ranks: units are completed in host memory, then copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.residency.device import DeviceStreamer
from memascend.residency.gathering import GatheringStreamer
from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from memascend.layout.units import Unit
    from memascend.residency.host import Residency


class GatheringDeviceStreamer(GatheringStreamer, DeviceStreamer):
    """Brings units to a device, of which each rank's store has a share.

    Which units a device keeps is a rank's own affair too. So before a use all ranks tell whether they have the unit
    there, and gather it unless all do. A rank whose share a step changes has it no more. What is on the way to a
    device was gathered: nothing is copied ahead, and the host, which runs ahead of the device, gathers meanwhile.
    """

    def _bring(self, unit: Unit) -> torch.Tensor:
        if not self._to_host:
            return super()._bring(unit)
        if self._gathers:
            self._gather(unit)
        return self._hosted(unit)

    def _bring_whole(self, unit: Unit) -> None:
        has = torch.tensor([unit in self._on_device], dtype=torch.uint8)
        if self.ranks.collect(f"use {unit.name}", has).all():
            return
        self._gather(unit)
        # What this device has may be older than what was gathered.
        buffer = self._on_device.get(unit)
        if buffer is not None and buffer.users:
            self._forget(buffer)
            buffer = None
        self._upload(unit, buffer or self._buffer(unit))

    def _gather(self, unit: Unit) -> None:
        self._hosted(unit)
        self._uploads.wait(unit)
        super()._gather(unit)

    def _use(self, unit: Unit) -> torch.Tensor:
        return DeviceStreamer._use(self, unit)

    def _upload_ahead(self, unit: Unit, number: int) -> bool:
        """Copy nothing: what was fetched ahead are this rank's shares."""
        return False

    # ---- host buffers: what is whole is so on the device ------------------------------------------------

    def _busy(self, residency: Residency) -> bool:
        return DeviceStreamer._busy(self, residency)

    def _drop(self, residency: Residency) -> None:
        Streamer._drop(self, residency)

    def discard(self, unit: Unit) -> None:
        """Give up a unit's bytes and its buffers."""
        self._whole.discard(unit)
        super().discard(unit)
