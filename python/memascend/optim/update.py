"""How parameters are optimized: their rules, and the room of their states in the store."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memascend._memascend import Rule
from memascend.layout.units import DTYPE_NAMES, PACK_BELOW_BYTES, StorePlane
from memascend.residency.updates import Update

if TYPE_CHECKING:
    import torch

    from memascend._memascend import Plane, Runtime
    from memascend.layout.units import Place, StoreTensor
    from memascend.residency.updates import Segment


@lru_cache
def rule_for(algorithm: str, states: str, dtype: torch.dtype, nbytes: int, master: bool) -> Rule:
    """Return how a parameter of `nbytes` bytes is optimized; see `memascend._memascend.Rule`.

    Small parameters, which are packed together, keep fp32 states instead of 8-bit ones, as in Dettmers et al. 2022
    (arXiv 2110.02861): they weigh nothing, and are often the sensitive ones.
    """
    if states == "8bit" and nbytes < PACK_BELOW_BYTES:
        states = "float32"
    return Rule(algorithm, states, DTYPE_NAMES[dtype], master)


def missing_planes(tensor: StoreTensor, rule: Rule) -> list[Plane]:
    """Return the states for which there is no room on SSD yet."""
    return [plane for plane in rule.planes if plane not in tensor.planes]


def allocate_states(runtime: Runtime, tensor: StoreTensor, rule: Rule) -> None:
    """Make room for the states of a tensor; they begin as zeros without being written."""
    for plane in missing_planes(tensor, rule):
        name = f"{tensor.name}.{plane.name}"
        if runtime.find_tensor(name) is not None:
            # Two optimizers that share a pack keep states of one name in different formats.
            name = f"{name}.{plane.dtype}"
        tensor.planes[plane] = StorePlane(plane, name, runtime.create_tensor(name, plane.bytes(tensor.numel)))


def free_unused(runtime: Runtime, tensor: StoreTensor) -> None:
    """Give back the room of states that no parameter of a tensor has any more; nothing of its unit is under way."""
    used = {plane for place in tensor.places if place.rule is not None for plane in place.rule.planes}
    for plane in [plane for plane in tensor.planes if plane not in used]:
        runtime.remove_tensor(tensor.planes.pop(plane).id)


def add_segment(updates: dict[StoreTensor, Update], place: Place, segment: Segment, captured: bool) -> None:
    """Add one parameter's part to the update of its tensor."""
    update = updates.get(place.tensor)
    if update is None:
        update = updates[place.tensor] = Update(place.tensor, captured=captured)
    update.segments.append(segment)
