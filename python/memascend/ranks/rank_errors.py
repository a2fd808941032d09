"""Work of one rank alone, whose errors all ranks raise, and findings of one rank that all learn.

Work of a rank alone, such as writing files, is followed by an exchange of errors, so that no rank waits in the next
collective for one that has given up.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, MemascendError, OutputError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.ranks.group import Ranks


def exchange_errors(
    ranks: Ranks, action: str, error: Exception | None, kind: type[MemascendError] = OutputError
) -> None:
    """Raise on every rank where one has an error in its own work: that error there, and one of `kind` elsewhere."""
    told = [text.strip() for text in ranks.all_gather_object(action, "" if error is None else first_line(error))]
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text:
            raise kind(f"rank {rank} could not {action}: {text}")


@contextmanager
def raise_on_all_ranks(
    ranks: Ranks | None,
    action: str,
    caught: type[Exception] = CheckpointError,
    kind: type[MemascendError] = CheckpointError,
) -> Iterator[None]:
    """Raise an error of class `caught` of one rank in the block on every rank, at the block's end.

    Where there are collectives in the block, the error is one that none of them follows.
    """
    failure: Exception | None = None
    try:
        yield
    except caught as error:
        if ranks is None:
            raise
        failure = error
    if ranks is not None:
        exchange_errors(ranks, action, failure, kind)


def broadcast_from_rank0(ranks: Ranks | None, action: str, find: Callable[[], Any]) -> Any:
    """Return the finding of rank 0, a value that JSON holds, on every rank; its error is raised on every rank."""
    if ranks is None:
        return find()
    found = None
    with raise_on_all_ranks(ranks, action, Exception):
        if ranks.rank == 0:
            found = find()
    return json.loads(ranks.all_gather_object(action, json.dumps(found))[0])
