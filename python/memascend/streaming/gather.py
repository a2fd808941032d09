"""Values of units over ranks: a unit is fetched as this rank's shares, then completed with the others'.

Each rank fetches ahead for itself: budgets and drives may differ. The shares of the other ranks come when a use of the
unit begins, whether or not they are in the buffer from an earlier use. So the order of collectives is the order of the
program's uses, and the same on all ranks.

Each device keeps units for itself too. So before a use all ranks tell whether they have the unit there, and gather it
unless all do. A rank whose share a step changes has it no more. Only gathered units are copied to a device: nothing is
copied ahead, and the host, which runs ahead of the device, gathers meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol

from memascend.common.graphs import in_backward
from memascend.common.timeline import span
from memascend.errors import MemascendError
from memascend.layout.division import whole_range
from memascend.streaming.compute import discard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.ranks.group import Ranks
    from memascend.streaming.compute import ComputeMemory


class Values(Protocol):
    """The whole values of units, wherever the store has their shares."""

    def bring(self, unit: Unit, /) -> torch.Tensor:
        """Return the unit's bytes (uint8) where they are wanted, fetched if need be."""

    def differs(self, unit: Unit, /) -> bool:
        """Return whether a unit that was written to may differ from the store."""

    def forget_last_use(self) -> None:
        """Keep nothing for the next use that other ranks may not have."""

    def own_shares(self) -> AbstractContextManager[None]:
        """Enclose uses of no more than this rank's store has."""

    def check_writable(self, places: Sequence[ParameterEntry], /) -> None:
        """Raise MemascendError for weights that must not be written to."""


class Exchange(Protocol):
    """The exchange of gradients in a backward pass; see `memascend.gradients.reduce.ReducedGradients`."""

    def before_use(self, unit: Unit, /) -> None:
        """Exchange the gradients of the unit that the backward pass has used before `unit`."""


class OwnStore:
    """The values of units that are whole in this process's store."""

    def __init__(self, memory: ComputeMemory) -> None:
        """Bring units to `memory`."""
        self._memory = memory
        self.bring = memory.bring
        self.differs = memory.differs

    def forget_last_use(self) -> None:
        """Do nothing: there are no other ranks."""

    def own_shares(self) -> AbstractContextManager[None]:
        """Enclose uses like others."""
        return nullcontext()

    def check_writable(self, places: Sequence[ParameterEntry]) -> None:
        """Raise MemascendError for a weight that is only read, from a file outside the store; have it read anew."""
        for place in places:
            unit = place.tensor.unit
            if not unit.in_store:
                discard(self._memory, unit)
                raise MemascendError(f"{place.name} was written to, but it {unit.read_only}")


class ShardGatherer:
    """The values of units that are divided over the ranks' stores."""

    def __init__(self, ranks: Ranks, memory: ComputeMemory) -> None:
        """Bring units to `memory`, with the other `ranks`."""
        self.ranks = ranks
        self._memory = memory
        self._gathers = True
        self._exchange: Exchange | None = None

    def tell_uses_to(self, exchange: Exchange) -> None:
        """Tell `exchange` of each unit that a backward pass is about to use: all ranks use them in one order."""
        self._exchange = exchange

    def bring(self, unit: Unit) -> torch.Tensor:
        """Return the bytes of all ranks' shares; within `own_shares`, the bytes of this rank's alone."""
        memory = self._memory
        if not self._gathers:
            return memory.hosted(unit)
        if memory.to_host:
            self._gather(unit)
            return memory.hosted(unit)
        if self._exchange is not None and in_backward():
            self._exchange.before_use(unit)
        if unit not in memory.whole:
            self.forget_last_use()
            memory.complete(unit, self.ranks, partial(self._gather, unit))
            memory.whole.add(unit)
        return memory.use(unit)

    def _gather(self, unit: Unit) -> None:
        """Complete the unit's bytes in host memory."""
        storage = self._memory.hosted(unit)
        self._memory.cache.uploads.wait(unit)
        with span(f"gather {unit.name}"):
            ranges = (whole_range(tensor) for tensor in unit.tensors)
            self.ranks.gather(f"gather {unit.name}", [storage[begin : begin + nbytes] for begin, nbytes in ranges])

    def differs(self, unit: Unit) -> bool:
        """Return True: a rank's store has checksums of its own share alone."""
        return True

    def forget_last_use(self) -> None:
        """Have the next use of each unit gather it, unless it is in use."""
        cached_units = self._memory.cache.cached_units
        self._memory.whole.difference_update([unit for unit in self._memory.whole if not cached_units[unit].users])

    @contextmanager
    def own_shares(self) -> Iterator[None]:
        """Enclose uses of this rank's shares alone."""
        self.forget_last_use()  # Its buffer may be the only one.
        self._gathers = False
        try:
            yield
        finally:
            self._gathers = True

    def check_writable(self, places: Sequence[ParameterEntry]) -> None:
        """Raise MemascendError: the other ranks would not have what one writes."""
        unit = places[0].tensor.unit
        discard(self._memory, unit)
        raise MemascendError(
            f"{places[0].name} was written to, but its values are divided over {self.ranks.size} ranks: write to "
            "weights before memascend.offload"
        )
