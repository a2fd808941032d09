"""Where the store of each rank lies: by a pattern with the rank's number, or by a list with an entry for each rank.

A list has one meaning: with a list within it, it has an entry for each rank; without one, it is the volumes of each
rank, at least one of them with "{rank}". Guessing by the number of entries would make the meaning depend on how many
processes start.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from memascend.errors import MemascendError, StoreError
from memascend.ranks.group import group_of

if TYPE_CHECKING:
    from typing import Any

    from memascend.options import RankLocations

#: The part of a location that the rank's number replaces.
PATTERN = "{rank}"
#: Filesystems within /dev that have directories of programs.
_DIRECTORIES_IN_DEV = ("/dev/shm/", "/dev/hugepages/", "/dev/mqueue/")


def paths_of(store: RankLocations, process_group: Any = None) -> list[str | os.PathLike[str]]:
    """Return the locations of this rank's store, as `locations_of`; a program by itself is rank 0 of 1."""
    group = group_of(process_group)
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    locations = locations_of(store, rank, ranks)
    for location in locations:
        refuse_absent_device(location)
    return locations


def locations_of(store: RankLocations, rank: int, ranks: int) -> list[str | os.PathLike[str]]:
    """Return the locations of one rank's store, with its number for "{rank}".

    Args:
        store: a location; or several, the volumes of each rank; or, if one of its entries is a list, an entry for each
            rank, which is a location or a list of several.
        rank: the number of the rank.
        ranks: how many there are.

    Raises MemascendError for a list that has no entry for each rank, or that could mean either.
    """
    entries: list[Any] = _entries(store)
    own = entries
    if by_rank(entries):
        if len(entries) != ranks:
            raise MemascendError(
                f"store has entries for {len(entries)} ranks, of which there are {ranks}: give a list with one entry "
                "for each rank"
            )
        own = _entries(entries[rank])
        if not own or by_rank(own):
            raise MemascendError(f"store has {own!r} for rank {rank}: give a location, or a list of locations")
    elif ranks > 1 and len(own) > 1 and not any(PATTERN in str(path) for path in own):
        shown = ", ".join(map(str, own))
        raise MemascendError(
            f"store=[{shown}] could be a location for each rank or volumes of every rank: give a list for each rank, "
            f"as [[{own[0]!s}], [{own[1]!s}]], or {PATTERN} for the number of the rank in each location"
        )
    return [str(path).replace(PATTERN, str(rank)) if PATTERN in str(path) else path for path in own]


def refuse_absent_device(location: str | os.PathLike[str]) -> None:
    """Raise StoreError for a path where only devices are, and none is: a directory there would be in memory."""
    path = os.path.abspath(location)
    if path.startswith("/dev/") and not path.startswith(_DIRECTORIES_IN_DEV) and not os.path.exists(path):
        raise StoreError(errno.ENOENT, "there is no such device: `lsblk` lists those that are there", path)


def by_rank(store: RankLocations) -> bool:
    """Return whether a store is given as a list with an entry for each rank."""
    return any(not isinstance(entry, str | os.PathLike) for entry in _entries(store))


def _entries(store: RankLocations) -> list[Any]:
    return [store] if isinstance(store, str | os.PathLike) else list(store)
