"""The streamer of a model that computes on a device, and whose store is divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.residency.device import DeviceStreamer

if TYPE_CHECKING:
    from memascend.ranks.group import Ranks


class GatheringDeviceStreamer(DeviceStreamer):
    """Brings units to a device, that are divided over the stores of several ranks (`memascend.residency.shares`)."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        """Stream as `DeviceStreamer` does, with the other `ranks`."""
        super().__init__(*args, ranks=ranks, **options)
