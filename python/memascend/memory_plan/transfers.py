"""The buffers through which bytes move: the update pipeline, staging, and the states that stay in memory.

Chunks shrink with the budget, so that pipeline and staging take 1/6 of it at most; results do not depend on the chunk
size. The least plan has eight slots with any number of threads, so that it does not depend on the machine. A slot is as
large as AdamW with fp32 moments needs, since a plan is made before the optimizer is known: rules that keep more per
element (AMSGrad) move in halves of a chunk.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memascend.common.sizes import format_least, format_size
from memascend.errors import BudgetError
from memascend.layout.units import round_up
from memascend.memory_plan.in_parts import smaller_in_pieces
from memascend.memory_plan.lines import CHUNK_ELEMENTS_MIN, HEAP_BYTES, Line, Plan, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import StoreTensor

#: Elements of a chunk of the update pipeline, at most: a multiple of `CHUNK_ELEMENTS_MIN`.
CHUNK_ELEMENTS_MAX = 262_144
#: Bytes that an element of an update takes beside its weight: two fp32 moments, the gradient and,
#: for bf16 weights, the low half of the master. Rules that keep more (AMSGrad) move in smaller
#: pieces.
UPDATE_BYTES_PER_ELEMENT = 12
#: With fp16 weights, whose master is whole.
UPDATE_BYTES_PER_FLOAT16_ELEMENT = 14
#: Of that, the gradient is not kept from one step to the next. AdamW's states of a weight, by its dtype.
STATE_BYTES_PER_ELEMENT = {torch.bfloat16: 10, torch.float16: 12, torch.float32: 8}
#: Chunks of an update in the pipeline at once: some being read, one computed, some being written. This many work with
#: any number of threads, and are all that the least plan has.
UPDATE_SLOTS = 8
#: With room, each thread that updates has one chunk that it computes, one that is read and one that is written.
UPDATE_SLOTS_PER_THREAD = 3
#: Fraction of resident states lost to rounding at the ends of tensors and buffers.
STATES_ROUNDING = 0.02
#: Staging chunks that transfers under way need; chunks beyond keep gradients off the SSD.
STAGING_CHUNKS = 16
STATES_STAGING_CHUNKS = 4
#: Chunks shrink until pipeline and staging together take no more than this share of a budget. Small
#: chunks cost time: 65,536 elements took 1.1 to 1.3 times the step of 196,608 with 0.51B
#: parameters.
TRANSFER_SHARE = 1 / 6


def transfer_bytes(
    plan: Plan, tensors: Sequence[StoreTensor], chunk_elements: int, staging: int, slots: int = UPDATE_SLOTS
) -> int:
    """Return the bytes of `slots` and of `staging` buffers, for chunks of so many elements at most."""
    chunk_elements = min(chunk_elements, _largest_chunk(plan, tensors))
    slots = slots if _are_updated(tensors) else 0
    return chunk_elements * (_update_bytes(tensors) * slots + _staged_bytes(tensors) * staging)


def fit_transfers(plan: Plan, tensors: Sequence[StoreTensor], staging: int, sizes: Sizes | None = None) -> None:
    """Size the buffers through which bytes move, as in `sizes` if given.

    Larger chunks come first, then slots for more threads. Raises BudgetError when not even the smallest fit.
    """
    trained = _are_updated(tensors)

    def size(chunk_elements: int, slots: int = UPDATE_SLOTS) -> None:
        plan.chunk_elements, nbytes = chunk_elements, chunk_elements * _staged_bytes(tensors)
        slot, note = chunk_elements * _update_bytes(tensors), "moments, masters, gradient of a chunk"
        if plan.update_threads > 1:
            note += f", for {plan.update_threads} threads"
        plan.slots = Line("update pipeline", slot, slots if trained else 0, note)
        plan.staging = Line("staging", nbytes, staging, "gradients and activations on the move")
        plan.staging_cache = Line("kept off the SSD", nbytes, 0, "gradients, activations of recomputed layers")

    largest = min(_largest_chunk(plan, tensors), CHUNK_ELEMENTS_MAX) if sizes is None else 0
    for elements in range(largest, CHUNK_ELEMENTS_MIN, -CHUNK_ELEMENTS_MIN):
        size(elements)
        if _transfers_left(plan) >= 0:
            break
    else:
        if sizes is None:
            size(CHUNK_ELEMENTS_MIN)
        else:
            size(sizes.chunk_elements, sizes.slots)
    if sizes is None and plan.slots.count:
        wanted = UPDATE_SLOTS_PER_THREAD * plan.update_threads - plan.slots.count
        slot = plan.slots.total // plan.slots.count
        plan.slots.count += max(0, min(wanted, _transfers_left(plan) // slot))
    if plan.total > plan.budget:
        raise _too_small(plan, tensors)


def keep_states(plan: Plan, tensors: Sequence[StoreTensor]) -> None:
    """Spend the remainder on resident states: a byte saves a read, and a write where steps are not durable."""
    trained = [tensor for tensor in tensors if tensor.trained]
    nbytes = plan.chunk_elements * max((STATE_BYTES_PER_ELEMENT[tensor.dtype] for tensor in trained), default=0)
    if not nbytes:
        return
    needed = sum(STATE_BYTES_PER_ELEMENT[tensor.dtype] * tensor.numel for tensor in trained)
    wanted = math.ceil(needed * (1 + STATES_ROUNDING) / nbytes) + 1
    plan.states.nbytes, plan.states.count = nbytes, max(0, min(wanted, plan.left_bytes // nbytes))
    share = min(1.0, plan.states.total / needed)
    plan.states.note = "always there" if share == 1.0 else f"{share:.0%} of them"
    # States come last: with all of them, everything is in memory.
    plan.retain_heap |= share == 1.0 and plan.budget - plan.total >= HEAP_BYTES


def _staged_bytes(tensors: Sequence[StoreTensor]) -> int:
    """Return the bytes of a staging buffer for each element of a chunk, as gradients are put aside."""
    return max((tensor.gradient_dtype.itemsize for tensor in tensors), default=2)


def _are_updated(tensors: Sequence[StoreTensor]) -> bool:
    """Return whether anything is trained: an update pipeline is not needed where everything is frozen."""
    return any(tensor.trained for tensor in tensors)


def _update_bytes(tensors: Sequence[StoreTensor]) -> int:
    """Return the bytes of an update slot for each element of a chunk. Slots hold the weights of tables, too."""
    weights = max((tensor.dtype.itemsize for tensor in tensors if tensor.unit.is_table and tensor.trained), default=0)
    if any(tensor.trained and tensor.dtype == torch.float16 for tensor in tensors):
        return UPDATE_BYTES_PER_FLOAT16_ELEMENT + weights
    return UPDATE_BYTES_PER_ELEMENT + weights


def _largest_chunk(plan: Plan, tensors: Sequence[StoreTensor]) -> int:
    """Return the elements of a chunk that holds the largest trained tensor whole, or of any chunk of an input."""
    if plan.inputs is not None:
        return CHUNK_ELEMENTS_MAX
    return round_up(max((tensor.numel for tensor in tensors if tensor.trained), default=1), CHUNK_ELEMENTS_MIN)


def _transfers_left(plan: Plan) -> int:
    """Return the bytes that the budget and the transfers' share of it leave, less than 0 where they are exceeded."""
    share = int(plan.budget * TRANSFER_SHARE) - plan.slots.total - plan.staging.total
    return min(plan.budget - plan.total, share)


def _too_small(plan: Plan, tensors: Sequence[StoreTensor]) -> BudgetError:
    element = max((tensor.dtype.itemsize for tensor in tensors), default=2)
    smallest = plan.smallest_bytes
    overlap = f"; from {format_size(plan.overlap_bytes)} on, reading overlaps computing" if plan.overlap_bytes else ""
    knobs = []
    whole = (tensor for tensor in tensors if not (tensor.packed or tensor.unit.is_experts or tensor.shard is not None))
    experts = (place for tensor in whole for place in tensor.places if len(place.shape) == 3)
    if not plan.on_device and smaller_in_pieces(experts, plan.blocks.total):
        knobs.append("experts that are read one by one (experts='pieces'; --experts pieces)")
    if plan.units and element > 2:
        knobs.append("weights in bfloat16 instead of float32 (dtype='bfloat16'), whose masters stay exact")
    if plan.units:
        largest = max(plan.units, key=lambda line: line.nbytes).consumer.removeprefix("weights of ")
        knobs.append(f"a smaller model: its largest part ({largest}) must fit in memory as a whole")
    lowered = f"\nTo lower it: {'; '.join(knobs)}" if knobs else ""
    return BudgetError(
        f"a host memory budget of {format_size(plan.budget)} is too small: the least is "
        f"{format_least(smallest)} ({smallest} bytes){overlap}. The least plan:\n{plan.table()}"
        f"{lowered}",
        smallest,
    )
