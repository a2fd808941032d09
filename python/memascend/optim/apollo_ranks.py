"""The factors of APOLLO's channels where a store is divided over ranks.

A number of a projected gradient is one chain of products in the order of its channel, and the shares of several ranks
may cut a channel. So each rank goes on with the sums of the rank before it. The ranks work side by side: at turn t,
rank k projects its share of matrix t - k and hands on its sums, so that M matrices take M turns and one for each rank.

Each rank keeps the moments of some channels (`layout.shards.channels_of`), and sends their squares to all ranks, which
compute the factors of all channels from them. One exchange ends a turn. The ranks compare the work once, before it.

The step does this, and not the capture, since each pass would carry sums for nothing. The price is that gradients on
the SSD are read once more.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import FactorOptions
from memascend.layout.shards import channels_of
from memascend.layout.units import round_up
from memascend.optim.step import FACTORS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from memascend._memascend import ProjectedGradient, Projection, Runtime
    from memascend.layout.shards import Shard
    from memascend.layout.units import ParameterEntry
    from memascend.ranks.group import Ranks
    from memascend.streaming.updates import Segment

#: Pieces of a message begin at multiples of this many bytes, so that each can be read where it arrives.
ALIGN_BYTES = 8
#: Bytes of the squares of one channel: three float64.
SQUARES_BYTES = 3 * torch.float64.itemsize


class Division:
    """The elements and channels of one matrix on each rank, and the bytes that each sends to each."""

    def __init__(self, projection: Projection, start: int, shard: Shard) -> None:
        """Divide the matrix that begins at element `start` of a tensor."""
        shape = projection.rows, projection.columns
        self.projection = projection
        #: For each rank: its first element of the matrix, the same counted in its share, and how many it has.
        self.parts = [shard.part(start, shape[0] * shape[1], rank) for rank in range(shard.ranks)]
        #: For each rank: the first channel whose moments it keeps, and the number of such channels.
        self.channels = [channels_of(shape, start, shard, rank) for rank in range(shard.ranks)]
        holders = [rank for rank, (_, _, count) in enumerate(self.parts) if count]
        #: The ranks that have elements follow one another.
        self.first, self.last = holders[0], holders[-1]
        self.by_column = shape[0] < shape[1]
        self._squares_bytes = sum(map(self.squares_bytes, range(shard.ranks)))

    def ends(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank that has some, and the one after its last."""
        first, _, count = self.parts[rank]
        return first, first + count

    def sent_by_turn(self, source: int, target: int) -> tuple[int, int]:
        """Return the bytes that go from one rank to another once `source` has projected its share.

        First the sums of incomplete channels, then the measured channels whose moments `target` keeps.
        """
        if not self.first <= source <= self.last:
            return 0, 0
        carried = self.projection.carried_bytes(self.ends(source)[1]) if target == source + 1 else 0
        # Rows are measured where their moments are.
        channels = self.channels[target][1] if self.by_column and source == self.last else 0
        return carried, channels * (self.projection.rank + 2) * torch.float32.itemsize

    def squares_bytes(self, source: int) -> int:
        """Return the bytes that a rank sends to each other one when it has updated its moments."""
        return self.channels[source][1] * SQUARES_BYTES

    def _targets(self, source: int) -> Sequence[int]:
        """Return the ranks to which `sent_by_turn` of a rank may be more than nothing."""
        every = self.by_column and source == self.last
        return range(len(self.parts)) if every else range(source + 1, min(source + 2, len(self.parts)))

    def _sources(self, target: int) -> set[int]:
        """Return the ranks from which `sent_by_turn` to a rank may be more than nothing."""
        return {target - 1, self.last}

    def sent_bytes(self, source: int) -> int:
        """Return all that a rank sends to others in a step."""
        turns = sum(_length(self.sent_by_turn(source, rank)) for rank in self._targets(source) if rank != source)
        return turns + (len(self.parts) - 1) * self.squares_bytes(source)

    def received_bytes(self, target: int) -> int:
        """Return all that a rank receives from others in a step."""
        turns = sum(_length(self.sent_by_turn(rank, target)) for rank in self._sources(target) if rank != target)
        return turns + self._squares_bytes - self.squares_bytes(target)

    def memory_bytes(self, rank: int) -> int:
        """Return about the most bytes that a rank needs while it finds factors, beside the plan.

        These are the projector of its share, the bytes that it receives and sends meanwhile, and the measured channels
        with both moments, of `FACTORS_AT_ONCE` matrices at a time and of one that waits.
        """
        projector = self.projection.share_bytes(*self.ends(rank)) if self.parts[rank][2] else 0
        sent = sum(_length(self.sent_by_turn(rank, other)) for other in self._targets(rank))
        received = sum(_length(self.sent_by_turn(other, rank)) for other in self._sources(rank))
        channel = (3 * self.projection.rank + 2) * torch.float32.itemsize
        return projector + sent + received + (FACTORS_AT_ONCE + 1) * self.channels[rank][1] * channel


def _length(pieces: Sequence[int]) -> int:
    """Return the bytes of pieces as they are sent."""
    return sum(round_up(nbytes, ALIGN_BYTES) for nbytes in pieces)


@dataclass(slots=True)
class Matrix:
    """One matrix in a step."""

    runtime: Runtime
    place: ParameterEntry
    division: Division
    segment: Segment
    #: The arguments of `FactorOptions`.
    options: dict[str, Any]
    #: The norm of the step, once it is known.
    norm: float = 0.0
    #: The sums that the rank before has handed on.
    carried: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    #: The squares of this rank's channels, (channels, 3) float64, as soon as its moments are updated; None for none.
    squares: Future[torch.Tensor] | None = None


def find_factors(ranks: Ranks, matrices: Sequence[Matrix]) -> None:
    """Give the segments of all matrices the factors of their channels, and update the moments.

    Every rank calls this with the same matrices, as a part of the step itself. Raises RankError where they differ.
    """
    told = [(matrix.place.name, sorted(matrix.options.items())) for matrix in matrices]
    digest = hashlib.blake2b(repr(told).encode(), digest_size=4).hexdigest()
    lr = matrices[0].options["lr"]
    ranks.barrier(f"find factors of {len(matrices)} matrices (the first with lr={lr}; names and options {digest})")
    with ThreadPoolExecutor(FACTORS_AT_ONCE, thread_name_prefix="memascend-factors") as pool:
        turns = _PipelineSchedule(ranks, matrices, pool)
        for turn in range(len(matrices) + ranks.size):
            turns.take(turn)


class _PipelineSchedule:
    """The turns of this rank."""

    def __init__(self, ranks: Ranks, matrices: Sequence[Matrix], pool: ThreadPoolExecutor) -> None:
        self._ranks, self._matrices, self._pool = ranks, matrices, pool

    def take(self, turn: int) -> None:
        mine, everyone = self._ranks.rank, range(self._ranks.size)
        pieces: dict[int, list[torch.Tensor]] = {rank: [] for rank in everyone}
        if (matrix := self._projected(turn, mine)) is not None:
            self._project(matrix, pieces)
        if (matrix := self._squared(turn)) is not None and matrix.squares is not None:
            squares = matrix.squares.result().view(-1).view(torch.uint8)
            for rank in everyone:
                pieces[rank].append(squares)
        sent = [_padded(piece) for rank in everyone for piece in pieces[rank]]
        counts = [_length([len(piece) for piece in pieces[rank]]) for rank in everyone]
        lengths = [self._lengths(turn, rank, mine) for rank in everyone]
        received = self._ranks.all_to_all(
            "find factors of matrices",
            torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8),
            counts,
            [_length(of_rank) for of_rank in lengths],
        )
        self._receive(turn, received, lengths)

    def _projected(self, turn: int, rank: int) -> Matrix | None:
        """Return the matrix whose share a rank projects in a turn, if it has one."""
        number = turn - rank
        if not 0 <= number < len(self._matrices):
            return None
        matrix = self._matrices[number]
        return matrix if matrix.division.first <= rank <= matrix.division.last else None

    def _squared(self, turn: int) -> Matrix | None:
        """Return the matrix whose moments all ranks have updated before the end of a turn."""
        number = turn - self._ranks.size
        return self._matrices[number] if number >= 0 else None

    def _lengths(self, turn: int, source: int, target: int) -> tuple[int, int, int]:
        """Return the bytes that one rank sends to another in a turn: carried sums, measured channels, and squares."""
        projected, squared = self._projected(turn, source), self._squared(turn)
        carried, measured = (0, 0) if projected is None else projected.division.sent_by_turn(source, target)
        return carried, measured, 0 if squared is None else squared.division.squares_bytes(source)

    def _project(self, matrix: Matrix, pieces: dict[int, list[torch.Tensor]]) -> None:
        """Project this rank's share of a matrix, and add the results for other ranks to `pieces`."""
        rank, division, tensor = self._ranks.rank, matrix.division, matrix.place.tensor
        assert tensor.gradient is not None, "a step takes a gradient that was captured"
        first, start, count = division.parts[rank]
        carried = torch.empty(division.projection.carried_bytes(first + count), dtype=torch.uint8)
        measured = matrix.runtime.projections.project_share(
            tensor.gradient,
            start,
            division.projection,
            (first, count),
            (matrix.carried.data_ptr(), carried.data_ptr()),
            torch.get_num_threads(),
        )
        matrix.carried = carried[:0]
        if rank < division.last:
            pieces[rank + 1].append(carried)
        if not division.by_column:
            self._update_moments(matrix, measured)
        elif rank == division.last:
            for other, (begin, channels) in enumerate(division.channels):
                numbers = torch.empty(channels * (division.projection.rank + 2))
                measured.write(begin, channels, numbers.data_ptr())
                pieces[other].append(numbers.view(torch.uint8))

    def _update_moments(self, matrix: Matrix, measured: ProjectedGradient) -> None:
        """Update the moments of this rank's channels in another thread."""
        _, channels = matrix.division.channels[self._ranks.rank]
        assert measured.channels == channels, "what is measured here is what moments are kept of"
        if channels:
            matrix.squares = self._pool.submit(_squares_of, matrix, measured)

    def _receive(self, turn: int, received: torch.Tensor, lengths: Sequence[tuple[int, int, int]]) -> None:
        """Take the messages of all ranks in a turn."""
        of_ranks: list[torch.Tensor] = []
        begins = accumulate((_length(of_rank) for of_rank in lengths), initial=0)
        for rank, begin, (carried, measured, squares) in zip(range(len(lengths)), begins, lengths, strict=False):
            matrix = self._projected(turn, rank)
            if carried and matrix is not None:
                matrix.carried = received[begin : begin + carried]
            begin += _length([carried])
            if measured and matrix is not None:
                projection, (_, channels) = matrix.division.projection, matrix.division.channels[self._ranks.rank]
                address = received[begin:].data_ptr()
                self._update_moments(
                    matrix, matrix.runtime.projections.received_channels(projection, channels, address)
                )
            begin += _length([measured])
            of_ranks.append(received[begin : begin + squares])
        if (matrix := self._squared(turn)) is not None:
            every = torch.cat(of_ranks)  # (channels x SQUARES_BYTES,)
            options = FactorOptions(**matrix.options)
            matrix.segment.factors, matrix.norm = matrix.division.projection.factors(options, every.data_ptr())
            matrix.squares = None


def _squares_of(matrix: Matrix, measured: ProjectedGradient) -> torch.Tensor:
    """Update the moments of the channels that were measured, and return their squares, (channels, 3) float64."""
    squares, stored = torch.empty(measured.channels, 3, dtype=torch.float64), matrix.place.states.moments
    assert stored is not None, "room is made before a step"
    threads, options = torch.get_num_threads(), FactorOptions(**matrix.options)
    matrix.runtime.projections.stored_squares(measured, stored.id, stored.written, threads, options, squares.data_ptr())
    stored.written = True
    return squares


def _padded(piece: torch.Tensor) -> torch.Tensor:
    padding = -len(piece) % ALIGN_BYTES
    return torch.cat([piece, piece.new_zeros(padding)]) if padding else piece
