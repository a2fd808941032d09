"""The buffers of units that are read in parts: tables by blocks, and experts one by one.

Experts that are read one by one have two buffers of each size, and keep theirs as far as the budget has room.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memascend._memascend import PAGE_BYTES
from memascend.layout.units import round_up
from memascend.memory_plan.beside import BOOKKEEPING_BYTES_PER_UNIT
from memascend.memory_plan.lines import Line, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.layout.units import ParameterEntry, Unit

#: Buffers for blocks of tables: the one in use and the next. With a device: the one that is copied there and the next,
#: and as many for the gradient of a block that comes back.
BLOCK_BUFFERS = 2
#: Buffers for experts that are read one by one, of each size: the one in use and the next.
EXPERT_BUFFERS = 2


def add_blocks(plan: Plan, units: Sequence[Unit], tables: Sequence[Unit]) -> None:
    """Plan the buffers for blocks of tables, of a size that is no unit's: the pool tells buffers by their size."""
    if not tables:
        return
    nbytes = max(round_up(place.blocks.nbytes, PAGE_BYTES) for table in tables for place in table.places)
    while any(round_up(unit.nbytes, PAGE_BYTES) == nbytes for unit in units):
        nbytes += PAGE_BYTES
    plan.blocks.nbytes, plan.blocks.count = nbytes, BLOCK_BUFFERS
    if any(table.is_uploaded and table.tensors[0].trained for table in tables):
        plan.blocks.count, plan.blocks.note = 2 * BLOCK_BUFFERS, "in use, next; of gradients"


def add_experts(plan: Plan, units: Sequence[Unit]) -> list[int]:
    """Plan the least buffers for experts that are read one by one. Returns how many there are for each line."""
    numbers: dict[int, int] = {}
    for place in (place for unit in units if unit.is_experts for place in unit.places):
        nbytes = read_bytes(place)
        numbers[nbytes] = numbers.get(nbytes, 0) + place.shape[0]
    taken = {round_up(unit.nbytes, PAGE_BYTES) for unit in units} | {plan.blocks.nbytes}
    for nbytes, number in sorted(numbers.items(), reverse=True):
        while nbytes in taken:  # The pool tells buffers by their size.
            nbytes += PAGE_BYTES
        taken.add(nbytes)
        plan.experts.append(Line("experts, one by one", nbytes, min(EXPERT_BUFFERS, number), "in use, next"))
    return [number for _, number in sorted(numbers.items(), reverse=True)]


def read_bytes(place: ParameterEntry) -> int:
    """Return the most bytes of the whole pages that an expert of a parameter lies in."""
    nbytes = place.expert_nbytes
    begins = (number * nbytes for number in range(place.shape[0]))
    return max(round_up(begin + nbytes, PAGE_BYTES) - begin // PAGE_BYTES * PAGE_BYTES for begin in begins)


def smaller_in_pieces(places: Iterable[ParameterEntry], block_bytes: int) -> bool:
    """Return whether experts that are read with their layers would take less memory one by one.

    The plan has `block_bytes` of buffers for blocks of tables already.
    """
    of_units: Counter[Unit] = Counter()
    sizes, tensors, blocks = set(), 0, 0
    for place in places:
        of_units[place.tensor.unit] += place.nbytes
        sizes.add(read_bytes(place))
        tensors, blocks = tensors + 1, max(blocks, BLOCK_BUFFERS * place.blocks.nbytes)
    in_pieces = EXPERT_BUFFERS * sum(sizes) + tensors * BOOKKEEPING_BYTES_PER_UNIT + max(0, blocks - block_bytes)
    return in_pieces < max(of_units.values(), default=0)


def keep_experts(plan: Plan, numbers: Sequence[int], spare: int) -> int:
    """Spend spare bytes on buffers in which experts stay, the same share of each size; return the rest."""
    more = [number - line.count for number, line in zip(numbers, plan.experts, strict=True)]
    needed = sum(line.nbytes * count for line, count in zip(plan.experts, more, strict=True))
    share = min(1.0, max(0, spare) / needed) if needed else 0.0
    for line, count, number in zip(plan.experts, more, numbers, strict=True):
        extra = int(share * count)
        line.count += extra
        spare -= extra * line.nbytes
        if line.count == number:
            line.note = "always there"
        elif extra:
            line.note = f"in use, next; {line.count} of {number} stay"
    return spare
