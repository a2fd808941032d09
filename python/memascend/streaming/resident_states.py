"""Which states stay in memory from one step to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.layout.units import StoreTensor
    from memascend.memory_plan.lines import Plan


def share_room(plan: Plan, tensors: Iterable[StoreTensor]) -> None:
    """Divide the plan's room for states over the tensors that have any."""
    tensors = [tensor for tensor in tensors if tensor.planes]
    sizes = [(tensor.numel, sum(plane.bytes(tensor.numel) for plane in tensor.planes)) for tensor in tensors]
    for tensor, kept in zip(tensors, kept_elements(plan, sizes), strict=True):
        tensor.kept_elements = kept


def stay_whole(tensors: Iterable[StoreTensor]) -> bool:
    """Return whether every state stays in memory, so that updates read none."""
    return all(tensor.kept_elements >= tensor.numel for tensor in tensors if tensor.planes)


def kept_elements(plan: Plan, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many elements of each tensor keep their states in memory: the same share of each.

    The drives are then as busy in any part of a pass as in the others. Elements keep their states from the first one
    on, in whole chunks or to the end of the tensor. `sizes` are each tensor's elements and the bytes of its states.
    """
    needed = sum(nbytes for _, nbytes in sizes)
    share = min(1.0, plan.states.total / needed) if needed else 0.0
    kept, owed = [], 0.0
    for numel, _ in sizes:
        owed += share * numel
        # Rounding must not cost a tensor its last chunk.
        whole = share == 1.0 or owed >= numel
        kept.append(numel if whole else int(owed) // plan.chunk_elements * plan.chunk_elements)
        owed -= kept[-1]
    return kept
