"""Gradients of a model whose store is divided over ranks: the pieces of each rank's shares are added in rank order.

The result of N ranks has the bits of N micro-batches that one process accumulates: the same additions, by the same
kernels, in the order of the ranks.

Gradients wait until the backward pass goes on to another unit, which all ranks do alike. The sum is put aside once. The
sums of squares of all blocks are known to all ranks at the end of the pass, and are added in the order of the blocks;
1/N is a factor of the update. The end of a pass is found by a hook of the model's outputs (`rank_hooks`), or, where
PyTorch finds no tensors in them, at the next step or pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import GRADIENT_BLOCK
from memascend.common.graphs import after_backward, in_backward
from memascend.common.timeline import span
from memascend.errors import MemascendError, RankError
from memascend.gradients.capture import GradientCapture
from memascend.layout.division import ALIGN_BYTES, part_of, sent_bytes
from memascend.layout.units import DTYPE_NAMES, raw_tensor_access
from memascend.streaming.gather import ShardGatherer
from memascend.vocabulary.gradient import TableGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.ranks.group import Ranks

#: The entries of a rank for a parameter: it has a new gradient of it; it keeps an earlier one, to which new ones are
#: added.
NEW, KEPT = 1, 2


class ReducedGradients(GradientCapture):
    """Captures gradients, and keeps the sum over all ranks of this rank's share of each.

    The gradients of a unit are exchanged when the backward pass goes on to another unit. Later gradients, and gradients
    of units that it does not use, are exchanged at its end. Each exchange begins with a list from every rank: an expert
    that a rank did not use has no gradient there. Norms and overflow checks are known at the end of the backward pass.
    """

    def __init__(self, ranks: Ranks, units: Sequence[Unit], *args: Any) -> None:
        """Join the gradients of `units` with the other `ranks`; `GradientCapture` takes the other arguments."""
        super().__init__(*args)
        self.ranks = ranks
        self._units = list(units)
        assert isinstance(self.streamer.values, ShardGatherer), "each rank's store has a share"
        self.streamer.values.tell_uses_to(self)
        #: Gradients of this backward pass that have not been sent yet: None for one that `_pack` finds elsewhere.
        self._new: dict[ParameterEntry, torch.Tensor | None] = {}
        #: Sums of squares of the blocks on this rank, and whether a value is not finite, of gradients joined in this
        #: backward pass. The parameters are the same on all ranks.
        self._joined: dict[ParameterEntry, tuple[list[float], bool]] = {}
        #: The unit that the backward pass uses.
        self._used: Unit | None = None
        #: Whether a backward pass has begun that `complete` has not followed, and whether it ends with `complete`.
        self._unfinished = self._completes = False
        #: Gradients of one block in which sums are made, by dtype.
        self._sums: dict[torch.dtype, int] = {}

    # ---- the course of a backward pass ------------------------------------------------------------------

    def complete_after(self, outputs: Sequence[torch.Tensor]) -> None:
        """Have the backward pass from `outputs` end with `complete`."""

        def begin(_: torch.Tensor) -> None:
            self._unfinished = True
            if not self._completes:
                self._completes = True
                after_backward(self.complete)

        for output in outputs:
            output.register_hook(begin)

    def capture(self, place: ParameterEntry, accumulate: bool) -> None:
        """Take `parameter.grad` until it is exchanged.

        Raises MemascendError for a gradient that the program has assigned, and for the second one of a parameter in a
        backward pass; and as `GradientCapture.capture`.
        """
        if not in_backward():
            raise MemascendError(
                f"the program has assigned a gradient to {place.name}, of which each of {self.ranks.size} ranks keeps "
                "a share: leave gradients to backward()"
            )
        if place in self._new or place in self._joined:
            raise MemascendError(
                f"one backward pass makes the gradient of {place.name} in several parts, whose order over ranks would "
                "not be that of one process: use torch.utils.checkpoint with use_reentrant=False"
            )
        gradient = self._take(place, accumulate)
        if gradient is not None:
            dense = gradient.dense() if isinstance(gradient, TableGradient) else gradient
            self._keep_new(place, dense.detach())
            self._unfinished = True

    def _keep_new(self, place: ParameterEntry, gradient: torch.Tensor) -> None:
        """Keep a gradient until it is sent."""
        self._new[place] = gradient

    def before_use(self, unit: Unit) -> None:
        """Exchange the gradients of the unit that the backward pass has used before `unit`."""
        self._unfinished = True
        used, self._used = self._used, unit
        if used is not None and used is not unit:
            with raw_tensor_access():
                self._exchange(used)

    def complete(self) -> None:
        """Exchange the gradients that are left after a backward pass, and agree on norms and overflow checks."""
        if not self._unfinished:
            return
        with raw_tensor_access():
            used, self._used = self._used, None
            if used is not None:
                self._exchange(used)
            new = {place.tensor.unit for place in self._new}
            waiting = torch.tensor([unit in new for unit in self._units], dtype=torch.uint8)
            every = self.ranks.all_gather("complete the gradients of a backward pass", waiting)  # (ranks, units)
            for unit, waits in zip(self._units, every.any(dim=0).tolist(), strict=True):
                if waits:
                    self._exchange(unit)
            self._agree()
        self._unfinished = self._completes = False

    def _agree(self) -> None:
        """Add up the sums of squares of all ranks' blocks, in the order of the blocks."""
        joined, self._joined = self._joined, {}
        mine = [value for sums, non_finite in joined.values() for value in (*sums, float(non_finite))]
        every = self.ranks.all_gather("agree on the norm of the gradients", torch.tensor(mine, dtype=torch.float64))
        begin = 0
        for place, (sums, _) in joined.items():
            end = begin + len(sums)
            place.gradient.sum_squares = 0.0
            for value in every[:, begin:end].flatten().tolist():
                place.gradient.sum_squares += value
            place.gradient.non_finite = bool(every[:, end].any())
            begin = end + 1

    # ---- the exchange of a unit's gradients -------------------------------------------------------------

    def _exchange(self, unit: Unit) -> None:
        places = trained_places(unit)
        if not places:
            return
        action = f"exchange the gradients of {unit.name}"
        with span(action):
            flags = [NEW * (p in self._new) | KEPT * (p.parameter.grad is p.gradient.marker) for p in places]
            every = self.ranks.all_gather(action, torch.tensor(flags, dtype=torch.uint8)).tolist()
            self._check_kept(places, every)
            owners = [[bool(flags[at] & NEW) for flags in every] for at in range(len(places))]
            pieces = self._swap(action, places, owners)
            if pieces:
                self.streamer.updates.apply(unit)
            for place, of_ranks in pieces.items():
                self._join(place, of_ranks)

    def _check_kept(self, places: Sequence[ParameterEntry], every: list[list[int]]) -> None:
        """Raise RankError where one rank has discarded an earlier gradient and another has not."""
        for at, place in enumerate(places):
            kept = [rank for rank, flags in enumerate(every) if flags[at] & KEPT]
            if 0 < len(kept) < len(every):
                raise RankError(
                    f"the gradient of {place.name} was kept from an earlier backward pass by rank {kept[0]}, but not "
                    "by all ranks: call optimizer.zero_grad() on every rank alike"
                )
            if kept and not place.gradient.held and any(flags[at] & NEW for flags in every):
                raise MemascendError(
                    f"the gradient of {place.name} was consumed by optimizer.step(), so that no other can be added to "
                    "it: call optimizer.zero_grad() before the next backward()"
                )

    def _swap(
        self, action: str, places: Sequence[ParameterEntry], owners: list[list[bool]]
    ) -> dict[ParameterEntry, list[torch.Tensor]]:
        """Send each rank its share of this rank's gradients, and return the received pieces, in the order of the ranks.

        `owners` says of each parameter which ranks have a gradient. A received piece has this rank's elements of it.
        """
        mine = self.ranks.rank
        counts, wanted = [0] * self.ranks.size, [0] * self.ranks.size
        for rank in range(self.ranks.size):
            for place, has in zip(places, owners, strict=True):
                counts[rank] += sent_bytes(place, rank) if has[mine] else 0
                wanted[rank] += sent_bytes(place, mine) if has[rank] else 0
        if not any(map(any, owners)):
            return {}
        packed = self._pack([place for place, has in zip(places, owners, strict=True) if has[mine]])
        received = self.ranks.all_to_all(action, packed, counts, wanted)
        pieces: dict[ParameterEntry, list[torch.Tensor]] = {
            place: [] for place, has in zip(places, owners, strict=True) if any(has)
        }
        begin = 0
        for rank in range(self.ranks.size):
            for place, has in zip(places, owners, strict=True):
                if has[rank]:
                    nbytes = part_of(place, mine)[2] * place.dtype.itemsize
                    pieces[place].append(received[begin : begin + nbytes].view(place.dtype))
                    begin += sent_bytes(place, mine)
        return pieces

    def _pack(self, places: Sequence[ParameterEntry]) -> torch.Tensor:
        """Return the bytes to send: the part of new gradients that each rank keeps, by rank and then by parameter."""
        sent: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)]
        for rank in range(self.ranks.size):
            for place in places:
                first, _, count = part_of(place, rank)
                gradient = self._new[place]
                assert gradient is not None, "it is kept here"
                flat = gradient.contiguous().view(-1)[first : first + count].view(torch.uint8)
                sent += [flat, flat.new_zeros(-len(flat) % ALIGN_BYTES)]
        packed = torch.cat(sent)
        for place in places:
            del self._new[place]
        return packed

    def _join(self, place: ParameterEntry, pieces: Sequence[torch.Tensor]) -> None:
        """Store or add to the sum of the pieces: (elements that this rank has of the parameter,) each."""
        accumulate = place.parameter.grad is place.gradient.marker
        gradient = self.allocate(place.tensor)
        blocks = 1 if place.tensor.packed else -(-place.tensor.numel // GRADIENT_BLOCK)
        stats = [(0.0, False)] * blocks
        if len(pieces[0]) and place.tensor.packed:
            _, start, count = place.stored
            for number, piece in enumerate(pieces):
                added = accumulate or number > 0
                stats[0] = self.runtime.gradients.capture(gradient, start, piece.data_ptr(), count, added)
        elif len(pieces[0]):
            self._add_blocks(gradient, place, pieces, accumulate, stats)
        self._joined[place] = [sum_squares for sum_squares, _ in stats], any(bad for _, bad in stats)
        place.gradient.filled = place.gradient.projection = None
        self._note_kept(place, accumulate)

    def _add_blocks(
        self,
        gradient: int,
        place: ParameterEntry,
        pieces: Sequence[torch.Tensor],
        accumulate: bool,
        stats: list[tuple[float, bool]],
    ) -> None:
        """Add pieces block by block, whose statistics `stats` gets, and put the whole into the store's keeping."""
        share, count = place.tensor.numel, len(pieces[0])
        total = torch.zeros(share, dtype=place.dtype)
        addends = list(pieces)
        if accumulate:
            earlier = torch.empty(share, dtype=place.dtype)
            self.runtime.gradients.read_gradient(gradient, earlier.data_ptr(), earlier.nbytes)
            addends.insert(0, earlier)
        block = self._block(place.dtype)
        for number, begin in enumerate(range(0, count, GRADIENT_BLOCK)):
            length = min(GRADIENT_BLOCK, count - begin)
            for added, addend in enumerate(addends):
                stats[number] = self.runtime.gradients.capture(block, 0, addend[begin:].data_ptr(), length, added > 0)
            part = total[begin : begin + length]
            self.runtime.gradients.read_gradient(block, part.data_ptr(), part.nbytes)
        self.runtime.gradients.capture(gradient, 0, total.data_ptr(), share, False)

    def _block(self, dtype: torch.dtype) -> int:
        """Return the number of the gradient in which the blocks of others are summed."""
        if dtype not in self._sums:
            self._sums[dtype] = self.runtime.gradients.create_packed_gradient(DTYPE_NAMES[dtype], GRADIENT_BLOCK)
        return self._sums[dtype]

    # ---- uses of gradients by programs ----------------------------------------------------------------

    def values(self, place: ParameterEntry) -> torch.Tensor:
        """Raise MemascendError: this rank keeps a share of the gradient."""
        raise self._refusal(place, "read; clip with optimizer.clip_grad_norm_(...), which returns the norm")

    def replace(self, place: ParameterEntry, values: torch.Tensor) -> None:
        """Raise MemascendError, as `values`."""
        raise self._refusal(place, "written to; scale the loss instead")

    def fill(self, place: ParameterEntry, value: float) -> None:
        """Raise MemascendError, as `values`."""
        raise self._refusal(place, "filled with a value; use zero_grad(set_to_none=True)")

    def _refusal(self, place: ParameterEntry, what: str) -> MemascendError:
        return MemascendError(
            f"each of {self.ranks.size} ranks keeps a share of the gradient of {place.name}, which cannot be {what}"
        )


def trained_places(unit: Unit) -> list[ParameterEntry]:
    """Return the unit's parameters whose gradients are exchanged, in their order."""
    return [place for tensor in unit.tensors if tensor.trained for place in tensor.places]
