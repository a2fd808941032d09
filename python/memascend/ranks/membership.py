"""The record in a store of the ranks that it is divided over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from memascend.errors import CheckpointError, MemascendError

if TYPE_CHECKING:
    from memascend.ranks.group import Ranks


@dataclass(frozen=True, slots=True)
class Membership:
    """A store's part in a run of several ranks."""

    ranks: Ranks
    #: Identifies the run: the stores of its ranks have the same.
    run: str

    @property
    def described(self) -> dict[str, Any]:
        """The entry in the record of every generation."""
        return {"rank": self.ranks.rank, "ranks": self.ranks.size, "run": self.run}

    def refuse(self, action: str, remedy: str) -> NoReturn:
        """Raise MemascendError for an action that a store divided over ranks does not allow yet."""
        raise MemascendError(
            f"{action} is not possible yet for a model whose store is divided over {self.ranks.size} ranks: {remedy}"
        )


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
