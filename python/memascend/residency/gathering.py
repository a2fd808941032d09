"""The streamer of a model that computes in host memory, and whose store is divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from memascend.ranks.group import Ranks


class GatheringStreamer(Streamer):
    """Streams units that are divided over the stores of several ranks (`memascend.residency.shares`)."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        """Stream as `Streamer` does, with the other `ranks`."""
        super().__init__(*args, ranks=ranks, **options)
