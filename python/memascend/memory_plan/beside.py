"""Memory beside the arena: bookkeeping, exchanges between ranks, and gradients of weights that train later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._memascend import GRADIENT_BLOCK, PAGE_BYTES
from memascend.layout.division import ranks_of, sent_bytes
from memascend.layout.tables import MIB
from memascend.layout.units import round_up
from memascend.memory_plan.lines import Line, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import StoreTensor, Unit

#: Gradients that the backward pass is applying: one under way, and the next.
APPLIED_GRADIENTS = 2
#: Bookkeeping of Python, autograd and Rust beside the arena, as benches/plan_accuracy.py measures it.
BOOKKEEPING_BYTES = 4 * 2**20
BOOKKEEPING_BYTES_PER_UNIT = 64 * 2**10
BOOKKEEPING_BYTES_PER_PARAMETER = 16 * 2**10
#: Checksums of the blocks of a MiB of a frozen table, once a row of the MiB was read.
BLOCK_SUMS_BYTES = 1088
#: The checksum of 4 KiB of quantised weights beside the store.
SUM_BYTES = 4


def add_bookkeeping(plan: Plan, units: Sequence[Unit]) -> None:
    """Plan the bookkeeping for each unit and parameter, and checksums of weights that are read in place."""
    parameters = sum(len(tensor.places) for unit in units for tensor in unit.tensors)
    nbytes = BOOKKEEPING_BYTES + len(units) * BOOKKEEPING_BYTES_PER_UNIT + parameters * BOOKKEEPING_BYTES_PER_PARAMETER
    tables = (unit for unit in units if unit.is_table and not unit.is_experts)
    frozen = (unit for unit in tables if not any(tensor.trained for tensor in unit.tensors))
    nbytes += sum(-(-unit.nbytes // MIB) for unit in frozen) * BLOCK_SUMS_BYTES
    nbytes += sum(round_up(unit.stored_nbytes, PAGE_BYTES) for unit in units if unit.bits) // PAGE_BYTES * SUM_BYTES
    plan.bookkeeping = Line("bookkeeping", nbytes, 1, f"beside the arena: {len(units)} units, {parameters} parameters")


def add_exchange(plan: Plan, units: Sequence[Unit], packed: dict[int, int]) -> None:
    """Plan the exchanges of ranks, and a buffer for the sum of a gradient block in each dtype.

    A unit's gradients are autograd's until they have been sent, and received bytes are at most as many. A device's
    gradients are copied to memory that is kept for them. Gloo gathers a tensor's weights beside the buffer that they
    are for.
    """
    trained = [tensor for unit in units for tensor in unit.tensors if tensor.trained]
    for itemsize in {tensor.gradient_dtype.itemsize for tensor in trained}:
        nbytes = GRADIENT_BLOCK * itemsize
        packed[nbytes] = packed.get(nbytes, 0) + 1
    gradients = max((_exchanged_bytes(unit) for unit in units), default=0)
    whole = max((t.nbytes * t.shard.ranks for unit in units for t in unit.tensors if t.shard is not None), default=0)
    plan.exchanged.nbytes, plan.exchanged.count = max(gradients, -(-(gradients + whole) // 2)), 2
    plan.exchanged.note = "beside the arena: sent and received"


def _exchanged_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's gradients as they are sent to all ranks."""
    return sum(
        sent_bytes(place, rank)
        for tensor in unit.tensors
        if tensor.trained and tensor.shard is not None
        for place in tensor.places
        for rank in ranks_of(place)
    )


def later_line(tensors: Sequence[StoreTensor]) -> Line:
    """Return the line of the gradients that lie beside the arena, because their tensors were frozen at first."""
    outside = [tensor.gradient_nbytes for tensor in tensors if tensor.gradient_outside and not tensor.trained]
    return Line("gradients of what trains later", sum(outside), min(len(outside), 1), "beside the arena")
