"""The buffers of weights: how many of each size, for the units that share them.

There are two sets of size classes. Either one class per size, with two buffers for repeated layers, so that the next
layer is read while one computes; or, when the budget does not hold that, one buffer for all units by turns, the least
memory that works. Units that one module needs together, or that are in use around others, keep buffers of their own in
either. A module that reads another layer's weights in mid-pass cannot be foreseen: by turns it finds no buffer, and the
error names the budget with which it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.layout.units import SMALL_MODULE_BYTES
from memascend.memory_plan.lines import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import Unit

#: Buffers of a repeated unit: the one in use and the next; a third lets the previous one linger.
REPEATED_BUFFERS_MIN = 2
REPEATED_BUFFERS = 3


@dataclass(slots=True)
class BufferClass:
    """The buffers of some units' weights."""

    line: Line
    members: list[Unit]
    repeated: bool = False


def classes_apart(units: Sequence[Unit]) -> list[BufferClass]:
    """Return one class per size, with buffers to prefetch into for repeated layers."""
    sizes: dict[tuple[bool, int], list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.repeated, unit.nbytes), []).append(unit)
    classes = []
    for (repeated, nbytes), members in sorted(sizes.items(), key=lambda item: -item[0][1]):
        held = sum(unit.held for unit in members)
        least = min(len(members), held + (REPEATED_BUFFERS_MIN if repeated else 1))
        classes.append(BufferClass(Line(_weights_of(members), nbytes, least), members, repeated))
    return classes


def classes_by_turns(units: Sequence[Unit], block_bytes: int = 0) -> list[BufferClass]:
    """Return the fewest buffers that work: one for all units, except small ones and those in use beside others.

    `block_bytes` is the size of the buffers for blocks of tables.
    """
    apart = [unit.nbytes for unit in units if unit.held or (not unit.repeated and unit.nbytes <= SMALL_MODULE_BYTES)]
    # A request goes to the smallest class that holds it, so units no larger than these would take
    # their buffers.
    alone = [unit for unit in units if unit.nbytes <= max([*apart, block_bytes])]
    others = sorted((unit for unit in units if unit not in alone), key=lambda unit: -unit.nbytes)
    classes = classes_apart(alone)
    if others:
        classes.insert(0, BufferClass(Line(_weights_of(others), others[0].nbytes, 1), others))
    return classes


def _weights_of(members: Sequence[Unit]) -> str:
    if len(members) == 1:
        return f"weights of {members[0].name}"
    alike = all(unit.nbytes == members[0].nbytes for unit in members)
    return f"weights of {members[0].name} and {len(members) - 1} {'like it' if alike else 'others'}"


def why(kind: BufferClass) -> str:
    """Describe the purpose of the buffers of a class."""
    count, members = kind.line.count, len(kind.members)
    if count >= members:
        return "always there"
    if count == 1:
        return "by turns: nothing is read ahead"
    named = {2: "in use, next", 3: "in use, next, previous"}
    return named.get(count, f"{count} of {members} cached") if kind.repeated else f"{count} of {members}, by turns"
