"""Where a model computes: in host memory, or on a device (`memascend.streaming.device_cache`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from memascend.streaming.demand import HostDemand
from memascend.streaming.prefetch import HostPrefetcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    import torch

    from memascend.layout.units import Unit
    from memascend.ranks.group import Ranks
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.demand import Demand
    from memascend.streaming.order import UseOrder
    from memascend.streaming.table_reads import TableReads

    #: Makes the cache of host memory, whose buffers the demand asks for.
    MakeCache: TypeAlias = Callable[[Demand], WeightCache]
    #: Makes the reads of tables: of a cache, and with a function that fetches other units ahead.
    MakeTables: TypeAlias = Callable[[WeightCache, Callable[[], None]], TableReads]
    #: Makes the memory in which a model computes, and its cache and reads of tables.
    MakeMemory: TypeAlias = Callable[[UseOrder[Unit], MakeCache, MakeTables], "ComputeMemory"]


class ComputeMemory(Protocol):
    """The memory in which a model computes with its units."""

    #: The cache of host memory, through which every unit comes, and the reads of its tables.
    cache: WeightCache
    tables: TableReads
    #: Whether the model uses copies of units, and leaves those in host memory to updates.
    uses_copies: bool
    #: Units that hold the shares of all ranks here: those in use, and the one that was used last.
    whole: set[Unit]

    @property
    def to_host(self) -> bool:
        """Whether units are wanted in host memory, for a model that computes elsewhere."""

    def only_host(self) -> AbstractContextManager[None]:
        """Enclose reads for which units are wanted in host memory only."""

    def hosted(self, unit: Unit, /) -> torch.Tensor:
        """Return the unit's bytes (uint8) in host memory, fetched if need be."""

    def bring(self, unit: Unit, /) -> torch.Tensor:
        """Return the unit's bytes (uint8) where the model computes, fetched if need be."""

    def use(self, unit: Unit, /) -> torch.Tensor:
        """Return the bytes (uint8) of a unit that `complete` has brought."""

    def complete(self, unit: Unit, ranks: Ranks, gather: Callable[[], None], /) -> None:
        """Bring the shares of all ranks to where the model computes; `gather` collects them in host memory."""

    def prefetch(self) -> None:
        """Start bringing the units that are used next."""

    def differs(self, unit: Unit, /) -> bool:
        """Return whether the bytes that the model uses may differ from the store's."""

    def take_back(self, unit: Unit, /) -> None:
        """Bring writes to the unit into its bytes in host memory, where they are not there already."""

    def forget(self, unit: Unit, /) -> None:
        """Declare the shares of other ranks, and copies outside host memory, out of date."""

    def is_beyond(self, unit: Unit, /) -> bool:
        """Return whether the plan has no room outside host memory for the unit as a whole."""

    def free_whole(self, unit: Unit, /) -> None:
        """Give back memory beyond the plan, outside host memory, that an idle unit takes."""

    def attach(self) -> None:
        """Prepare for the first use; the model's weights are only in the store now."""

    def close(self) -> None:
        """Prepare for the end of the runtime."""

    def free(self) -> None:
        """Release all memory outside the runtime, which was closed."""


class InHostMemory:
    """The memory of a model that computes on the CPU: the cache of host memory alone."""

    to_host = False
    uses_copies = False

    def __init__(self, order: UseOrder[Unit], make_cache: MakeCache, make_tables: MakeTables) -> None:
        """Make the cache and the reads of its tables, and fetch into it by `order`."""
        demand = HostDemand(order)
        self.whole = demand.whole
        self.cache = make_cache(demand)
        self.prefetch = HostPrefetcher(order, self.cache).prefetch
        self.tables = make_tables(self.cache, self.prefetch)
        #: Everything that is used is in host memory.
        self.hosted = self.bring = self.use = self.cache.hosted

    def only_host(self) -> AbstractContextManager[None]:
        """Enclose reads like others."""
        return nullcontext()

    def complete(self, unit: Unit, ranks: Ranks, gather: Callable[[], None]) -> None:
        """Collect the shares of all ranks."""
        gather()

    def differs(self, unit: Unit) -> bool:
        """Return whether the bytes in host memory may differ from the store's."""
        return self.cache.differs(self.cache.cached_units[unit])

    def take_back(self, unit: Unit) -> None:
        """Do nothing: it was written to in host memory."""

    def forget(self, unit: Unit) -> None:
        """Declare the shares of other ranks out of date."""
        self.whole.discard(unit)

    def is_beyond(self, unit: Unit) -> bool:
        """Return False: nothing is outside host memory."""
        return False

    def free_whole(self, unit: Unit) -> None:
        """Do nothing: nothing is outside host memory."""

    def attach(self) -> None:
        """Do nothing: the runtime has the buffers."""

    def close(self) -> None:
        """Do nothing: the cache releases the buffers."""

    def free(self) -> None:
        """Forget addresses."""
        self.cache.clear()


def discard(memory: ComputeMemory, unit: Unit) -> None:
    """Evict a unit without writing it back; the next use fetches it."""
    memory.forget(unit)
    memory.cache.discard(unit)
