"""Experts on the store, read one by one into the buffers that the plan has for them.

An expert stays in its buffer until another needs it, or an update of its parameter is due. A pass that comes back in
the opposite order (a backward pass) evicts the expert that was used the longest time ago; a pass that goes on to its
end and begins anew evicts the latest, so that a part of all experts stays from one pass to the next.

A deferred update runs over all experts of a parameter, as over a table. Each is read as soon as its part is written.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend._memascend import PAGE_BYTES
from memascend.errors import MemascendError
from memascend.layout.units import raw_tensor_access, round_up
from memascend.streaming.streamer import NoBufferError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from memascend._memascend import LeaseBuffer, Ticket
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.streaming.streamer import Streamer


@dataclass(slots=True, eq=False)
class _Piece:
    """One expert in a buffer, or on its way there."""

    lease: LeaseBuffer
    #: Bytes of the buffer, and the first byte of the expert in it.
    nbytes: int
    begin: int
    #: The read, until its end was waited for.
    ticket: Ticket | None
    #: Whether it was read ahead, and waits for its use.
    is_ahead: bool
    is_used: bool = False


class ExpertPieces:
    """The experts of one session that are in memory. It implements `memascend.streaming.streamer.Pieces`."""

    def __init__(self, streamer: Streamer, buffers: Sequence[int]) -> None:
        """Read through `streamer` into buffers of these sizes, in bytes."""
        self._streamer = streamer
        self._buffers = sorted(buffers)
        #: Pieces by parameter and expert, the one that was used the longest time ago first.
        self._pieces: dict[tuple[ParameterEntry, int], _Piece] = {}
        #: Of trained experts: the update that the last use found under way.
        self._updates: dict[Unit, Ticket | None] = {}

    @staticmethod
    def version(place: ParameterEntry) -> int:
        """Return a number that grows with every write to the experts of a parameter."""
        with raw_tensor_access():
            return place.binding.version + place.parameter._version

    @contextmanager
    def use(self, place: ParameterEntry, expert: int, ahead: Iterable[int] = ()) -> Iterator[torch.Tensor]:
        """Give the weights of an expert, (rows, columns), for as long as the context is open; nothing may keep them.

        `ahead` are experts of the same parameter that follow: they are read meanwhile, as far as there are buffers.
        Raises NoBufferError if all buffers are in use.
        """
        with self._streamer.turns.take("the use of experts"):
            piece = self._bring(place, expert)
            piece.is_used = True
            try:
                self._read_ahead(place, ahead)
                values = _values(place, piece)
                try:
                    yield values
                finally:
                    values.set_()  # type: ignore[call-overload]  # The traceback of an error may go on holding the tensor.
            finally:
                piece.is_used = False

    def _read_ahead(self, place: ParameterEntry, ahead: Iterable[int]) -> None:
        """Start reading experts that follow, as long as there are buffers of others than those that come sooner."""
        sooner: set[tuple[ParameterEntry, int]] = set()
        for expert in ahead:
            if (place, expert) not in self._pieces and not self._read(place, expert, sooner):
                return
            sooner.add((place, expert))

    def begin(self, place: ParameterEntry) -> None:
        """Note that experts of a parameter are used now: their update begins, and what was written is waited for."""
        tensor, tables = place.tensor, self._streamer.tables
        if tensor.trained or tensor.trained_later:
            self._updates[tensor.unit] = tables.use_experts(tensor.unit)
        else:
            tables.finish_writes(tensor.unit)

    def _bring(self, place: ParameterEntry, expert: int) -> _Piece:
        """Return an expert in memory, read if need be; it becomes the latest that was used."""
        if (place, expert) not in self._pieces and not self._read(place, expert):
            raise NoBufferError(
                f"no buffer for an expert of {place.name} is free: all are held by tensors still alive; drop "
                "references to weights of experts, or give experts='whole'"
            )
        piece = self._pieces.pop((place, expert))
        if piece.ticket is not None:
            ticket, piece.ticket = piece.ticket, None
            self._streamer.cache.waits += not ticket.is_ready()
            with self._streamer.timeline.waiting("ssd_read"):
                ticket.wait()
        piece.is_ahead = False
        self._pieces[place, expert] = piece
        return piece

    def _read(
        self, place: ParameterEntry, expert: int, sooner: Container[tuple[ParameterEntry, int]] | None = None
    ) -> bool:
        """Start reading an expert: ahead of its use where others come `sooner`, whose buffers it does not take.

        Returns False where no buffer is free for it, or, ahead of its use, where it is being updated.
        """
        nbytes = place.expert_nbytes
        first = expert * nbytes // PAGE_BYTES * PAGE_BYTES
        unit = place.tensor.unit
        ((tensor_id, _, stored),) = unit.weights
        length = min(round_up((expert + 1) * nbytes, PAGE_BYTES), stored) - first
        buffer = next(size for size in self._buffers if size >= length)
        update = self._updates.get(unit)
        if update is not None and not self._is_updated(update, place, first, length, wait=sooner is None):
            return False
        lease = self._lease(buffer, sooner)
        if lease is None:
            return False
        part = unit.index, tensor_id, first, length, lease
        ticket = self._streamer.runtime.units.read_part(*part, update is not None)
        self._pieces[place, expert] = _Piece(lease, buffer, expert * nbytes - first, ticket, sooner is not None)
        return True

    def _is_updated(self, update: Ticket, place: ParameterEntry, first: int, length: int, wait: bool) -> bool:
        """Return whether the update of these bytes is written, once it is if `wait`."""
        group_nbytes = place.blocks.elements * place.dtype.itemsize
        last = min(first + length, place.nbytes) - 1
        groups = range(first // group_nbytes, last // group_nbytes + 1)
        if wait and not all(update.is_group_ready(group) for group in groups):
            with self._streamer.timeline.waiting("cpu_update"):
                for group in groups:
                    update.wait_group(group)
        return wait or all(update.is_group_ready(group) for group in groups)

    def _lease(self, nbytes: int, sooner: Container[tuple[ParameterEntry, int]] | None) -> LeaseBuffer | None:
        """Return a buffer of a size, if need be of another expert; None if there is none."""
        while True:
            lease = self._streamer.runtime.memory.lease_unit(nbytes)
            if lease is not None:
                return lease
            victim = self._victim(nbytes, sooner)
            if victim is None:
                return None
            self._drop(victim)

    def _victim(
        self, nbytes: int, sooner: Container[tuple[ParameterEntry, int]] | None
    ) -> tuple[ParameterEntry, int] | None:
        """Return the expert to evict. One that was read ahead may be evicted for one that is needed now."""
        idle = [key for key, piece in self._pieces.items() if piece.nbytes == nbytes and not piece.is_used]
        settled = [key for key in idle if not self._pieces[key].is_ahead and key not in (sooner or ())]
        if settled:
            return settled[0] if self._streamer.tables.comes_back else settled[-1]
        return idle[-1] if idle and sooner is None else None

    def _drop(self, key: tuple[ParameterEntry, int]) -> None:
        piece = self._pieces.pop(key)
        if piece.ticket is not None:
            with suppress(MemascendError):  # Of a read that nothing needs.
                piece.ticket.wait()

    def forget(self, unit: Unit) -> None:
        """Drop the experts of a unit, which the program has written to."""
        for key in [key for key in self._pieces if key[0].tensor.unit is unit]:
            self._drop(key)

    def clear(self) -> None:
        """Evict every expert."""
        for key in list(self._pieces):
            self._drop(key)


def _values(place: ParameterEntry, piece: _Piece) -> torch.Tensor:
    """Return the weights of an expert, (rows, columns), in its buffer."""
    with torch.inference_mode(False):
        rows, columns = place.shape[1:]
        stored = torch.frombuffer(piece.lease, dtype=place.dtype, offset=piece.begin, count=rows * columns)
        # No view, which would hold `stored`.
        offset = int(stored.storage_offset())
        shape, stride = (rows, columns), (columns, 1)
        return torch.empty(0, dtype=place.dtype).set_(stored.untyped_storage(), offset, shape, stride)
