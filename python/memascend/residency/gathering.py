"""Residency of a model whose store is divided over ranks: a unit is fetched as this rank's shares, then completed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memascend.common.graphs import in_backward
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.division import whole_range
from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from memascend.layout.units import Place, Unit
    from memascend.ranks.group import Ranks
    from memascend.residency.host import Residency


class GatheringStreamer(Streamer):
    """Streams units of which each rank's store has a share.

    What is fetched ahead is a rank's own affair: budgets and drives may differ. The shares of the other ranks come when
    a use of the unit begins, whether or not they are in the buffer from an earlier use. So the order of collectives is
    that of the program's uses, and the same on all ranks.
    """

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        """Stream as `Streamer` does, with the other `ranks`."""
        #: Units that hold the shares of all ranks, where the model computes: those in use, and the one that was used
        #: last.
        self._whole: set[Unit] = set()
        self._gathers = True
        self.ranks = ranks
        #: Called with a unit that a backward pass is about to use.
        self.before_use: Callable[[Unit], None] = lambda unit: None
        super().__init__(*args, **options)

    def _bring(self, unit: Unit) -> torch.Tensor:
        if not self._gathers:
            return self._hosted(unit)
        if in_backward():
            self.before_use(unit)
        if unit not in self._whole:
            self.forget_last_use()
            self._bring_whole(unit)
            self._whole.add(unit)
        return self._use(unit)

    def _differs(self, unit: Unit) -> bool:
        """Take what was written to for changed: a rank's store has checksums of its own share alone."""
        return True

    def _bring_whole(self, unit: Unit) -> None:
        """Bring the shares of all ranks to where the model computes."""
        self._gather(unit)

    def _use(self, unit: Unit) -> torch.Tensor:
        """Return the bytes of a unit that is whole where the model computes."""
        return self._hosted(unit)

    def _gather(self, unit: Unit) -> None:
        """Complete the unit's bytes in host memory."""
        storage = self._hosted(unit)
        with span(f"gather {unit.name}"):
            ranges = (whole_range(tensor) for tensor in unit.tensors)
            self.ranks.gather(f"gather {unit.name}", [storage[begin : begin + nbytes] for begin, nbytes in ranges])

    def _busy(self, residency: Residency) -> bool:
        # A rank that gave up the last unit would gather it again, while others still have it.
        return residency.unit in self._whole or super()._busy(residency)

    def _drop(self, residency: Residency) -> None:
        self._whole.discard(residency.unit)
        super()._drop(residency)

    def let_go(self, unit: Unit) -> None:
        """Drop a unit that is about to change, or have it change where it is; the other shares are out of date."""
        super().let_go(unit)
        self._whole.discard(unit)

    def forget_last_use(self) -> None:
        """Have the next use of each unit gather it, unless it is in use."""
        self._whole = {unit for unit in self._whole if self.residencies[unit].users}

    def apply_updates(self) -> None:
        """Apply every deferred update to this rank's shares."""
        self.forget_last_use()  # Its buffer may be the only one.
        with self._own_shares():
            super().apply_updates()

    @contextmanager
    def _own_shares(self) -> Iterator[None]:
        self._gathers = False
        try:
            yield
        finally:
            self._gathers = True

    def check_writable(self, places: Sequence[Place]) -> None:
        """Raise MemascendError: what one rank writes, the others do not have."""
        self.discard(places[0].tensor.unit)
        raise MemascendError(
            f"{places[0].name} was written to, but its values are divided over {self.ranks.size} ranks: write to "
            "weights before memascend.offload"
        )
