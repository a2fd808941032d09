"""The step that the ranks of a run go on from: the newest one that every rank's store has.

Newer generations of a rank that goes back are removed, since their room is written over from then on. A checkpoint that
not all ranks have, because one was killed, is deleted when the run is resumed.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend._memascend import ClosedStore
from memascend.durability.record import parse_record
from memascend.errors import CheckpointError, MemascendError
from memascend.ranks.membership import resharding
from memascend.recovery.running_store import MANIFEST, manifest_in
from memascend.session.runtime import when_free

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.ranks.group import Ranks

#: A generation's number, the steps of its run, and the names of the checkpoints that are kept beside it.
_Generation = tuple[int, int, list[str]]

#: The file that has the manifest before the newest, until the next is written there.
BEFORE = f"{MANIFEST}.new"
#: The name of the newest while the one before is looked at.
_ASIDE = f"{MANIFEST}.aside"


def go_to_common_step(store: Sequence[str | os.PathLike[str]], ranks: Ranks) -> set[str]:
    """Have this rank's store, of one or several directories, be at the newest generation that all ranks have.

    Returns the names of the checkpoints that all of them have: a rank that was lost may have left others on some.

    A generation's room is not used again before every rank has the next one. So a rank that was quicker than the
    others to commit its last generation still has the one before, whole.

    Raises CheckpointError on every rank where there is none that all have, or where the stores do not belong to one run
    with as many ranks, each to its rank.
    """
    directories = [Path(path) for path in store]
    told = [json.loads(text) for text in ranks.all_gather_object("resume a run", json.dumps(_look(directories)))]
    common, tags = _common(told)
    if common != told[ranks.rank]["generations"][0][0]:
        # A newer generation must not be found again: its room is overwritten from now on.
        for directory in _volumes(directories):
            if _number(directory / MANIFEST) > common:
                _give_up(directory, common)
                _flush(directory)
    ranks.barrier(f"resume generation {common}")
    return tags


def opened_at_common_step(stores: Sequence[Sequence[Path]]) -> list[ClosedStore]:
    """Open the stores of all ranks of a run at the newest generation that all of them have, and leave them as they are.

    `stores` has the directories of each rank's. Raises CheckpointError as `go_to_common_step`.
    """
    told = [_look(directories) for directories in stores]
    common, _ = _common(told)
    with ExitStack() as opened:
        kept: list[ClosedStore] = []
        for directories, of_rank in zip(stores, told, strict=True):
            newest = of_rank["generations"][0][0]
            kept.append(_open(directories) if common == newest else _open_before(_volumes(directories), newest))
            opened.callback(kept[-1].close)
        opened.pop_all()
    return kept


def _common(told: list[dict[str, Any]]) -> tuple[int, set[str]]:
    """Return the newest generation that all ranks have, of whose stores they have told, and its checkpoints.

    Raises CheckpointError where there is none, or where the stores cannot go on together.
    """
    if problem := _problem(told):
        raise CheckpointError(problem)
    numbers = [[number for number, _, _ in of_rank["generations"]] for of_rank in told]
    common = max(set.intersection(*map(set, numbers)), default=None)
    if common is None:
        has = "; ".join(f"rank {rank}: {of_rank}" for rank, of_rank in enumerate(numbers))
        raise CheckpointError(
            f"no generation of the run is in the stores of all ranks ({has}): a store was lost, or is a copy of "
            "another time; begin the run anew"
        )
    there = [(steps, tags) for of_rank in told for number, steps, tags in of_rank["generations"] if number == common]
    if len({steps for steps, _ in there}) > 1:
        at = "; ".join(f"rank {rank}: step {steps}" for rank, (steps, _) in enumerate(there))
        raise CheckpointError(
            f"the stores of the ranks are at other steps in their generation {common} ({at}): go back to the same "
            "checkpoint on each (memascend checkpoints --restore)"
        )
    return common, set.intersection(*(set(tags) for _, tags in there))


def _problem(told: list[dict[str, Any]]) -> str | None:
    """Say why the stores that the ranks have described cannot go on together, or return None."""
    for rank, of_rank in enumerate(told):
        where = f"the store of rank {rank} in {of_rank['store']}"
        if "error" in of_rank:
            return f"{where} cannot be resumed: {of_rank['error']}"
        described = of_rank["ranks"]
        if described is None:
            return f"{where} is not divided over ranks: resume it with one process, or {resharding(len(told))}"
        if described["ranks"] != len(told):
            return (
                f"{where} is one of {described['ranks']}, and there are {len(told)} ranks: start as many as the run "
                f"had, or {resharding(len(told))}"
            )
        if described["rank"] != rank:
            return f"{where} is that of rank {described['rank']}: give each rank the store that it had"
        if described["run"] != told[0]["ranks"]["run"]:
            return f"{where} is of another run than that of rank 0: give each rank the store of the same run"
    return None


def _look(directories: Sequence[Path]) -> dict[str, Any]:
    """Return the description of its store that a rank sends: the generations there, the newest first."""
    told: dict[str, Any] = {"store": ", ".join(map(str, directories))}
    try:
        volumes = _volumes(directories)
        newest, described = _described(_open(directories), directories)
        told |= {"generations": [newest], "ranks": described}
    except (MemascendError, OSError) as error:
        return told | {"error": str(error)}
    before = _read_before(volumes, newest[0])
    if before is not None and before[1] == described:
        told["generations"].append(before[0])
    return told


def _open(directories: Sequence[Path]) -> ClosedStore:
    return when_free(lambda: ClosedStore(list(directories)))


def _volumes(directories: Sequence[Path]) -> list[Path]:
    """Return all directories of a store, some given, each with its newest manifest."""
    for directory in directories:
        _put_back(directory)  # An earlier look may have been interrupted.
    with closing(_open(directories)) as kept_store:
        volumes = [Path(volume["path"]) for volume in kept_store.report()["volumes"]]
    for directory in volumes:
        _put_back(directory)
    return volumes


def _number(manifest: Path) -> int:
    """Return the generation that a file with a manifest has; 0 where it has none, or is no whole manifest."""
    body = manifest_in(manifest, tries=1)
    return body["current"]["number"] if body is not None and body["current"] else 0


def _open_before(volumes: Sequence[Path], newest: int) -> ClosedStore:
    """Open a store at the generation before `newest`, with all its directories."""
    try:
        for directory in volumes:
            if _number(directory / MANIFEST) >= newest:
                os.link(directory / MANIFEST, directory / _ASIDE)
                _give_up(directory, newest - 1)
        return _open(volumes)
    finally:
        for directory in volumes:
            _put_back(directory)


def _give_up(directory: Path, limit: int) -> None:
    """Have a directory show the manifest before, if that is of generation `limit` at most, or else none.

    Where there is none, the store is opened by the manifests of its other directories. One of these has it: a
    generation's manifest is in all of them before the next one is written in any.
    """
    if 0 < _number(directory / BEFORE) <= limit:
        os.replace(directory / BEFORE, directory / MANIFEST)
    else:
        (directory / MANIFEST).unlink()


def _described(kept_store: ClosedStore, directories: Sequence[Path]) -> tuple[_Generation, dict[str, Any] | None]:
    """Return the generation of an open store, and the ranks in its record; close it."""
    with closing(kept_store):
        record = parse_record(kept_store.state, directories)
        tags = [tag for tag, _, _, _ in kept_store.snapshots()]
        return (kept_store.generation, record["steps"], tags), record.get("ranks")


def _read_before(volumes: Sequence[Path], newest: int) -> tuple[_Generation, dict[str, Any] | None] | None:
    """Return the generation before `newest`, as `_described`, or None where the next one was being written there."""
    if not any(0 < _number(directory / name) < newest for directory in volumes for name in (MANIFEST, BEFORE)):
        return None
    try:
        return _described(_open_before(volumes, newest), volumes)
    except (MemascendError, OSError):
        return None


def _put_back(directory: Path) -> None:
    """Have the newest manifest be found again, after the one before was looked at."""
    manifest, before, aside = directory / MANIFEST, directory / BEFORE, directory / _ASIDE
    if not aside.exists():
        return
    if manifest.exists() and not manifest.samefile(aside) and not before.exists():
        os.link(manifest, before)
    os.replace(aside, manifest)
    aside.unlink(missing_ok=True)  # Still there where it was another name of the manifest.
    _flush(directory)


def _flush(directory: Path) -> None:
    """Wait until the names in a directory are on its drive."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
