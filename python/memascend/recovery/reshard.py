"""Rewriting the stores of a run for another number of ranks, piece by piece, without a process group.

Shares begin at gradient blocks, and so do the pieces that are copied, for which every state has whole pages: no byte is
looked into. The old stores are opened at the last common step, and not changed. Each new store is committed when it is
complete, under the name of a new run; as long as one is missing, none is resumed.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import GRADIENT_BLOCK, PAGE_BYTES, ClosedStore, Rule, Runtime
from memascend.common.progress import Progress
from memascend.durability import exact_json
from memascend.errors import INCOMPLETE, CheckpointError, OutputError, StoreError
from memascend.layout.shards import Shard, channels_of
from memascend.layout.units import PACK_ALIGN_ELEMENTS, round_up
from memascend.memory_plan.arena import Arena
from memascend.ranks.locations import PATTERN, by_rank, locations_of
from memascend.recovery.common_generation import opened_at_common_step
from memascend.recovery.resume import read_record, refuse_added
from memascend.session.runtime import when_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.options import RankLocations

#: The sizes of an arena without updates.
_LEAST = (PAGE_BYTES, 1, GRADIENT_BLOCK, PAGE_BYTES, 1)
#: Elements that are copied at once: whole gradient blocks, at which shares begin.
PIECE_ELEMENTS = 32 * GRADIENT_BLOCK
#: The most bytes of an element, in float32.
PIECE_BYTES = PIECE_ELEMENTS * torch.float32.itemsize


def reshard(store: RankLocations, to: RankLocations, *, ranks: int) -> int:
    """Write the stores of a run anew for another number of ranks, and return the run's durable steps.

    `memascend.resume` then goes on in `ranks` processes: with the bits of the run as it was, if each step has the same
    batches. Weights and optimizer states come from the last step that all stores of the run have. Random numbers,
    buffers and the states of `memascend.track` are a rank's own: rank r gets those of rank r modulo the former number.
    Checkpoints (`save_checkpoint`) stay behind.

    All stores are on this machine, and no run uses them. The run's own stay as they are. Little memory is used.

    Args:
        store: the run's stores, with "{rank}" for the number of each rank, or a list with an entry for each; or the
            store of one process.
        to: directories that do not exist yet, or are empty, with "{rank}" if there are several `ranks`; or a list with
            an entry for each rank, a directory or a list of several.
        ranks: how many there are to be; 1 is a store of one process.

    Raises:
        StoreError: a store cannot be read or written, or is in use.
        CheckpointError: the stores do not belong to one run, or hold a state that cannot be divided.
        OutputError: there is something in `to`.
        MemascendError: a list does not have an entry for each rank.
    """
    targets = _targets(to, ranks)
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(kept_store)) for kept_store in _open_sources(store)]
        records = [json.loads(kept_store.state or "") for kept_store in sources]
        refuse_added(records[0])
        copied = _Copied(sources, _arrays_of(records[0], sources[0], ranks), _moments_of(records[0], sources), ranks)
        run = uuid.uuid4().hex
        made: list[list[Path]] = []
        try:
            for rank, target in enumerate(targets):
                made.append(target)
                copied.write(target, rank, _record_for(records[rank % len(records)], copied, rank, ranks, run))
        except BaseException:
            for target in made:
                _remove(target)
            raise
        finally:
            copied.close()
        return records[0]["steps"]


def _targets(to: RankLocations, ranks: int) -> list[list[Path]]:
    """Return where the new stores go. Raises OutputError where there is something already."""
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: there is at least 1")
    if isinstance(to, str | os.PathLike):
        if ranks > 1 and PATTERN not in os.fspath(to):
            raise OutputError(
                f"{to} is one place for the stores of {ranks} ranks: write {PATTERN} for their numbers, or give a list"
            )
        to = [to] * ranks
    entries = [[entry] if isinstance(entry, str | os.PathLike) else entry for entry in to]
    targets = [[Path(path) for path in locations_of(entries, rank, ranks)] for rank in range(ranks)]
    every = [target for of_rank in targets for target in of_rank]
    for target in every:
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise OutputError(f"{target} exists: choose another place for the new stores, or move it away")
        if every.count(target) > 1:
            raise OutputError(f"{target} is given twice: every new store has a place of its own")
    return targets


def _open_sources(store: RankLocations) -> list[ClosedStore]:
    """Open the stores of a run's ranks at the last step that all of them have, or the store of one process."""
    entries: list[Any] = [store] if isinstance(store, str | os.PathLike) else list(store)
    if len(entries) > 1 and not by_rank(entries) and _are_shares(entries):
        entries = [[entry] for entry in entries]
    first = locations_of(entries, 0, len(entries) if by_rank(entries) else 1)
    described = read_record(first).get("ranks")
    if described is None:
        return [when_free(lambda: ClosedStore(first))]
    ranks = described["ranks"]
    if not by_rank(entries) and not any(PATTERN in os.fspath(entry) for entry in entries):
        raise CheckpointError(
            f"the store in {entries[0]} holds the shares of rank {described['rank']} of {ranks}: give one place, with "
            f"{PATTERN} for the numbers of all ranks, or a list with the place of each"
        )
    return opened_at_common_step([[Path(path) for path in locations_of(entries, rank, ranks)] for rank in range(ranks)])


def _are_shares(locations: Sequence[str | os.PathLike[str]]) -> bool:
    """Return whether the first of some locations has the store of a rank of as many, and not a volume of one store."""
    described = None
    with suppress(StoreError):  # A volume of a store that was moved is opened with the others.
        described = read_record(list(locations[:1])).get("ranks")
    return described is not None and described["ranks"] == len(locations)


# ---- copied parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of a tensor in the stores of a run, weights or states, as the ranks have it together."""

    #: Its name in each store, and its tensor's.
    name: str
    tensor: str
    elements: int
    packed: bool
    #: The bytes of so many elements, counted from a gradient block's first.
    nbytes: Callable[[int], int]

    def share(self, ranks: int) -> int:
        """Return the elements that each of `ranks` has of it, padding included."""
        return self.elements if ranks == 1 else Shard.of(self.elements, self.packed, 0, ranks).elements

    def pieces(self, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield the first element of each piece of a rank's share, and the one after its last."""
        share = self.share(ranks)
        for first in range(rank * share, (rank + 1) * share, PIECE_ELEMENTS):
            yield first, min(first + PIECE_ELEMENTS, (rank + 1) * share)


def _arrays_of(record: dict[str, Any], store: ClosedStore, ranks: int) -> list[_Array]:
    """Return the arrays of a run, by the record of one of its stores.

    Raises CheckpointError for a run that `ranks` cannot go on with.
    """
    if ranks > 1 and record["gradients"] != "auto":
        raise CheckpointError(
            f"the run puts gradients aside in {record['gradients']}, which ranks do not yet: resume it with one process"
        )
    there = {name for name, _ in store.tensors()}
    planes = _planes_of(record)
    arrays: list[_Array] = []
    for tensor in (tensor for unit in record["units"] for tensor in unit["tensors"]):
        of_tensor = (tensor["name"], *_whole(tensor))
        itemsize = getattr(torch, tensor["dtype"]).itemsize
        arrays.append(_Array(tensor["name"], *of_tensor, itemsize.__mul__))
        for name, plane_name, dtype in tensor["states"]:
            # States that no optimizer has are removed when the run is resumed.
            plane = planes.get((tensor["name"], plane_name, dtype))
            if plane is not None:
                arrays.append(_Array(name, *of_tensor, plane.bytes))
    missing = next((array.name for array in arrays if array.name not in there), None)
    if missing is not None:
        raise CheckpointError(f"a store of the run has no {missing}, which its record names: {INCOMPLETE}")
    return arrays


@dataclass(frozen=True, slots=True)
class _Moments:
    """Both moments of one matrix's projected gradient in the stores of a run, (2, channels, numbers) float32.

    Each rank has some channels' moments.
    """

    #: Its name in each store, and its parameter's.
    name: str
    parameter: str
    #: Of the matrix: its shape, its first element in its tensor, and that tensor's elements, over all ranks.
    shape: tuple[int, int]
    start: int
    elements: int
    packed: bool
    #: Bytes of one moment of a channel.
    channel_bytes: int

    def channels(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first channel that one of `ranks` has, and how many it has."""
        shard = None if ranks == 1 else Shard.of(self.elements, self.packed, rank, ranks)
        return channels_of(self.shape, self.start, shard)

    def nbytes(self, rank: int, ranks: int) -> int:
        """Return the bytes that one of `ranks` has."""
        return 2 * self.channels(rank, ranks)[1] * self.channel_bytes

    def read(self, sources: Sequence[ClosedStore], channels: tuple[int, int], begin: int, piece: torch.Tensor) -> None:
        """Fill `piece` with the bytes from `begin` on of a store that has `channels`: the first, and how many."""
        first, count = channels
        for moment, (number, source) in product(range(2), enumerate(sources)):
            own, own_count = self.channels(number, len(sources))
            lowest, highest = max(first, own), min(first + count, own + own_count)
            # The bytes of those channels where they go to, and how much further they lie where they are.
            at, end = ((moment * count + channel - first) * self.channel_bytes for channel in (lowest, highest))
            further = (moment * (own_count - count) + first - own) * self.channel_bytes
            at, end = max(at, begin), min(end, begin + len(piece))
            if at < end:
                _read_unaligned(source, self.name, at + further, piece[at - begin : end - begin])


def _read_unaligned(source: ClosedStore, name: str, offset: int, target: torch.Tensor) -> None:
    """Fill `target` with the bytes of a tensor from any `offset` on: a store is read from whole pages on."""
    ahead = offset % PAGE_BYTES
    pages = torch.empty(ahead + len(target), dtype=torch.uint8)
    source.read(name, pages.data_ptr(), len(pages), offset - ahead)
    target.copy_(pages[ahead:])


def _moments_of(record: dict[str, Any], sources: Sequence[ClosedStore]) -> list[_Moments]:
    """Return the moments of a run's projected gradients, by the record of the first of its stores.

    That store has channels of each matrix.
    """
    found = []
    for tensor in (tensor for unit in record["units"] for tensor in unit["tensors"]):
        places = {name: (shape, start) for name, shape, start, _ in tensor["parameters"]}
        elements, packed = _whole(tensor)
        for parameter, name, numel in tensor["moments"]:
            shape, start = places[parameter]
            if len(shape) != 2:
                raise CheckpointError(
                    f"{parameter} has experts in one tensor, which APOLLO has trained, and it does so in one process "
                    "alone: go on in one, or export the weights (memascend export) and begin a new run over ranks"
                )
            rows, columns = shape
            moments = _Moments(name, parameter, (rows, columns), start, elements, packed, 0)
            _, count = moments.channels(0, len(sources))
            found.append(replace(moments, channel_bytes=numel // (2 * count) * torch.float32.itemsize))
    return found


def _whole(tensor: dict[str, Any]) -> tuple[int, bool]:
    """Return the elements of a recorded tensor as all ranks have it together, and whether it is a pack."""
    parameters = tensor["parameters"]
    if [name for name, _, _, _ in parameters] == [tensor["name"]]:
        return math.prod(parameters[0][1]), False
    ends = (start + math.prod(shape) for _, shape, start, _ in parameters)
    return round_up(max(ends), PACK_ALIGN_ELEMENTS), True


def _planes_of(record: dict[str, Any]) -> dict[tuple[str, str, str], Any]:
    """Return the planes that the optimizers of a run keep, by tensor, name and dtype."""
    tensor_of = {
        parameter[0]: tensor["name"]
        for unit in record["units"]
        for tensor in unit["tensors"]
        for parameter in tensor["parameters"]
    }
    return {
        (tensor_of[parameter], plane.name, plane.dtype): plane
        for optimizer in record["optimizers"]
        for parameter, (_, arguments, _) in optimizer["states"].items()
        for plane in Rule(*arguments).planes
    }


def _record_for(record: dict[str, Any], copied: _Copied, rank: int, ranks: int, run: str) -> str:
    """Return the record of a new store, made from a former one's."""
    shares = {array.tensor: array.share(ranks) for array in copied.arrays}
    kept = {moments.parameter: moments.nbytes(rank, ranks) for moments in copied.moments}

    def divided(tensor: dict[str, Any]) -> dict[str, Any]:
        names = (parameter[0] for parameter in tensor["parameters"])
        moments = [
            [moments.parameter, moments.name, kept[moments.parameter] // torch.float32.itemsize]
            for name in names
            for moments in copied.moments
            if moments.parameter == name and kept[name]
        ]
        return tensor | {"numel": shares[tensor["name"]], "moments": moments}

    units = [unit | {"tensors": [divided(tensor) for tensor in unit["tensors"]]} for unit in record["units"]]
    rest = {name: value for name, value in record.items() if name != "ranks"}
    described = {"ranks": {"rank": rank, "ranks": ranks, "run": run}} if ranks > 1 else {}
    return exact_json.as_json(rest | {"units": units} | described)


# ---- copying ------------------------------------------------------------------------------------------------


class _Copied:
    """Copies the arrays of a run to new stores, through one buffer."""

    def __init__(
        self, sources: Sequence[ClosedStore], arrays: Sequence[_Array], moments: Sequence[_Moments], ranks: int
    ) -> None:
        """Copy `arrays` and `moments` from the stores of all former ranks to the stores of `ranks` new ones."""
        self.arrays, self.moments = arrays, moments
        self._sources, self._ranks = sources, ranks
        total = ranks * sum(array.nbytes(array.share(ranks)) for array in arrays)
        total += sum(of.nbytes(rank, ranks) for of in moments for rank in range(ranks))
        total += sum(nbytes for rank in range(ranks) for _, nbytes in self._buffers_for(rank)[1])
        self._progress, self._done = Progress("resharding", total, unit="B"), 0

    def _buffers_for(self, rank: int) -> tuple[ClosedStore, list[tuple[str, int]]]:
        """Return the former store whose buffers of the model a new rank gets, and their names and bytes."""
        source = self._sources[rank % len(self._sources)]
        return source, [(name, nbytes) for name, nbytes in source.tensors() if name.startswith(".buffers")]

    def write(self, target: list[Path], rank: int, record: str) -> None:
        """Make the store of a new rank in `target`."""
        # A store without updates: its arena is the buffer, and the least of everything else.
        runtime = Runtime(target, Arena([("copies", PIECE_BYTES, 1)], [], *_LEAST), in_place=True, allocator="pageable")
        try:
            unit = runtime.units.add_unit()
            for array in self.arrays:
                self._write_array(runtime, unit, array, rank)
            for moments in self.moments:
                self._write_moments(runtime, unit, moments, rank)
            source, buffers = self._buffers_for(rank)
            for name, nbytes in buffers:
                self._write_buffers(runtime, unit, name, nbytes, source)
            runtime.store.commit(record, []).wait()
        except BaseException:
            runtime.close(keep=False)
            raise
        runtime.close(keep=True)

    def close(self) -> None:
        """End the line that shows the progress."""
        self._progress.close()

    def _write_array(self, runtime: Runtime, unit: int, array: _Array, rank: int) -> None:
        """Write a new rank's share of an array."""
        nbytes, begin = array.nbytes, rank * array.share(self._ranks)
        parts = [
            (nbytes(first - begin), nbytes(end - first), partial(self._read_piece, array, first, end))
            for first, end in array.pieces(rank, self._ranks)
        ]
        self._write_parts(runtime, unit, array.name, nbytes(array.share(self._ranks)), parts)

    def _write_moments(self, runtime: Runtime, unit: int, moments: _Moments, rank: int) -> None:
        """Write the moments of a new rank's channels, if it has some."""
        channels, total = moments.channels(rank, self._ranks), moments.nbytes(rank, self._ranks)
        parts = [
            (begin, min(PIECE_BYTES, total - begin), partial(moments.read, self._sources, channels, begin))
            for begin in range(0, total, PIECE_BYTES)
        ]
        if parts:
            self._write_parts(runtime, unit, moments.name, total, parts)

    def _write_buffers(self, runtime: Runtime, unit: int, name: str, nbytes: int, source: ClosedStore) -> None:
        """Write a former rank's part of the model's buffers, as it is."""

        def read(offset: int, piece: torch.Tensor) -> None:
            source.read(name, piece.data_ptr(), len(piece), offset)

        offsets = range(0, nbytes, PIECE_BYTES)
        parts = [(offset, min(PIECE_BYTES, nbytes - offset), partial(read, offset)) for offset in offsets]
        self._write_parts(runtime, unit, name, nbytes, parts)

    def _write_parts(
        self,
        runtime: Runtime,
        unit: int,
        name: str,
        total: int,
        parts: Sequence[tuple[int, int, Callable[[torch.Tensor], None]]],
    ) -> None:
        """Write a tensor of `total` bytes: the first byte of each part, how many, and a function that fills them."""
        tensor = runtime.store.create_tensor(name, total)
        for begin, nbytes, fill in parts:
            lease = runtime.memory.lease_unit(PIECE_BYTES)
            assert lease is not None, "the piece before has been written"
            buffer = torch.frombuffer(lease, dtype=torch.uint8)
            buffer.zero_()  # Elements that no former rank has are padding, and so is the rest of the last page.
            fill(buffer[:nbytes])
            del buffer
            runtime.units.write_part(unit, tensor, begin, nbytes, lease)
            del lease
            runtime.units.wait_unit(unit)
            self._done += nbytes
            self._progress.update(self._done)

    def _read_piece(self, array: _Array, first: int, end: int, piece: torch.Tensor) -> None:
        """Read the elements `first .. end` of an array from the stores of all ranks that have some of them."""
        nbytes, share = array.nbytes, array.share(len(self._sources))
        for number, source in enumerate(self._sources):
            start, stop = max(first, number * share), min(end, (number + 1) * share, array.elements)
            if start < stop:
                part = piece[nbytes(start - first) :]
                source.read(array.name, part.data_ptr(), nbytes(stop - start), nbytes(start - number * share))


def _remove(target: list[Path]) -> None:
    """Remove a new store, which is complete, where other ranks' are not."""
    if not ClosedStore.is_there(target):
        return
    Runtime(target, Arena([], [], *_LEAST), resume=True, allocator="pageable").close(keep=False)
