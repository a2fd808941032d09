"""The ranks that a store is divided over, and their record in it; or the one process that has a store by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from memascend.errors import CheckpointError, MemascendError

if TYPE_CHECKING:
    from memascend.ranks.group import Ranks


class OneProcess:
    """The part of a store that one process has by itself: it does alone what ranks do together."""

    #: Whether the store is divided.
    divides = False
    ranks = None
    size = 1
    #: The entry in the record of every generation.
    described = None

    def refuse(self, action: str, remedy: str) -> None:
        """Allow an action that a store divided over ranks does not allow yet."""

    def barrier(self, action: str) -> None:
        """Return at once: there is no other process."""

    def all_gather_object(self, action: str, text: str) -> list[str]:
        """Return a text of every process."""
        return [text]

    def abort(self, reason: str) -> None:
        """Give up: no other process waits."""

    def stats(self) -> dict[str, Any]:
        """Return the counters of the ranks; see `memascend.stats`."""
        return {}


ONE_PROCESS = OneProcess()


@dataclass(frozen=True, slots=True)
class Membership:
    """A store's part in a run of several ranks."""

    ranks: Ranks
    #: Identifies the run: the stores of its ranks have the same.
    run: str

    @property
    def divides(self) -> bool:
        """Whether the store is divided."""
        return True

    @property
    def size(self) -> int:
        """Number of the ranks."""
        return self.ranks.size

    @property
    def described(self) -> dict[str, Any]:
        """The entry in the record of every generation."""
        return {"rank": self.ranks.rank, "ranks": self.ranks.size, "run": self.run}

    def refuse(self, action: str, remedy: str) -> NoReturn:
        """Raise MemascendError for an action that a store divided over ranks does not allow yet."""
        raise MemascendError(
            f"{action} is not possible yet for a model whose store is divided over {self.ranks.size} ranks: {remedy}"
        )

    def barrier(self, action: str) -> None:
        """Wait for all ranks, as `Ranks.barrier` does."""
        self.ranks.barrier(action)

    def all_gather_object(self, action: str, text: str) -> list[str]:
        """Return a text of every rank."""
        return self.ranks.all_gather_object(action, text)

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this one has given up."""
        self.ranks.abort(reason)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the ranks; see `memascend.stats`."""
        return {"rank": self.ranks.rank, "ranks": self.ranks.size, "network_bytes_sent": self.ranks.sent_bytes}


def refuse_share(record: dict[str, Any], where: str) -> None:
    """Raise CheckpointError for the record of a store that holds one rank's shares, and is to be used by itself."""
    described = record.get("ranks")
    if described is not None:
        raise CheckpointError(
            f"the store in {where} holds the shares of rank {described['rank']} of {described['ranks']}: resume it "
            f"with torchrun --nproc-per-node or --nnodes for {described['ranks']} processes, each with its own store, "
            f"or {resharding(1)}"
        )


def resharding(ranks: int) -> str:
    """Return the remedy for a run that is to go on in another number of processes."""
    return f"write its stores anew: memascend reshard STORES --ranks {ranks} --to NEW_STORES"
