"""The host memory plan: every consumer on a line, summed and checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.errors import BudgetError
from memascend.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.units import Unit

#: Elements of one step of the update pipeline, at least and at most; a multiple of 65,536, over which gradient
#: statistics are summed.
CHUNK_ELEMENTS_MIN = 65_536
CHUNK_ELEMENTS_MAX = 262_144
#: Two fp32 moments, the low half of the master and the gradient (or, for fp32 weights, two moments and the gradient).
UPDATE_BYTES_PER_ELEMENT = 12
#: Chunks of an update in the pipeline at once: some being read, one computed, some being written.
UPDATE_SLOTS = 8
#: Staging chunks that transfers under way need; what lies beyond keeps gradients off the SSD.
STAGING_CHUNKS = 16
#: Buffers of a repeated unit: the one in use and the next; a third lets the previous one linger.
REPEATED_BUFFERS_MIN = 2
REPEATED_BUFFERS = 3

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str | int) -> int:
    """Turn "8GiB", "500 MB" or a number of bytes into bytes.

    Raises ValueError with the accepted forms.
    """
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{text!r} is not a size: write bytes, or a number with MB, GB, MiB or GiB, as in 8GiB")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if value <= 0:
        raise ValueError(f"a size must be greater than zero, not {text!r}")
    return value


def format_size(nbytes: float) -> str:
    """Write bytes with a binary unit: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


@dataclass(slots=True)
class Line:
    """One consumer of host memory: `count` buffers of `nbytes` bytes."""

    consumer: str
    nbytes: int
    count: int

    @property
    def total(self) -> int:
        """Bytes of all buffers, each rounded up to a page."""
        return round_up(self.nbytes, PAGE_BYTES) * self.count


@dataclass(slots=True)
class Plan:
    """Host memory of one run, to the byte."""

    budget: int
    units: list[Line] = field(default_factory=list)
    packs: list[Line] = field(default_factory=list)
    staging: Line = field(default_factory=lambda: Line("staging", 0, 0))
    slots: Line = field(default_factory=lambda: Line("update slots", 0, 0))
    chunk_elements: int = CHUNK_ELEMENTS_MIN

    @property
    def lines(self) -> list[Line]:
        """Every consumer."""
        return [*self.units, *self.packs, self.slots, self.staging]

    @property
    def total(self) -> int:
        """Bytes that will be reserved."""
        return sum(line.total for line in self.lines)

    def table(self) -> str:
        """Write the plan with a line per consumer."""
        rows = [
            f"  {line.consumer:<44} {line.count:>5} x {format_size(line.nbytes):>10} = {format_size(line.total):>10}"
            for line in self.lines
            if line.count
        ]
        return "\n".join([*rows, f"  {'total':<44} {'':>5}   {'':>10}   {format_size(self.total):>10}"])


def make_plan(units: Sequence[Unit], budget: int) -> Plan:
    """Size the pool for `units`: what is needed first, then what a spare byte saves most with.

    Raises BudgetError, with the smallest budget that works, when `budget` does not hold what is needed.
    """
    tensors = [tensor for unit in units for tensor in unit.tensors]
    largest = max((tensor.numel for tensor in tensors), default=1)
    chunk_elements = min(max(round_up(largest, CHUNK_ELEMENTS_MIN), CHUNK_ELEMENTS_MIN), CHUNK_ELEMENTS_MAX)
    element = max((tensor.dtype.itemsize for tensor in tensors), default=2)
    plan = Plan(budget, chunk_elements=chunk_elements)

    # Unit buffers: one line per size, those of the repeated layers with enough to prefetch into.
    sizes: dict[tuple[bool, int], list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.repeated, unit.nbytes), []).append(unit)
    spread: list[tuple[Line, bool, int]] = []
    for (repeated, nbytes), members in sorted(sizes.items(), key=lambda item: -item[0][1]):
        held = sum(unit.held for unit in members)
        least = min(len(members), REPEATED_BUFFERS_MIN if repeated else max(1, held + (held < len(members))))
        name = members[0].name if len(members) == 1 else f"{members[0].name} and {len(members) - 1} like it"
        line = Line(f"weights of {name}", nbytes, least)
        plan.units.append(line)
        spread.append((line, repeated, len(members)))
    packed: dict[int, int] = {}
    for tensor in tensors:
        if tensor.packed:
            nbytes = round_up(tensor.numel * tensor.dtype.itemsize, PAGE_BYTES)
            packed[nbytes] = packed.get(nbytes, 0) + 1
    plan.packs = [Line("gradients of small tensors", nbytes, count) for nbytes, count in sorted(packed.items())]
    plan.slots = Line("update pipeline", chunk_elements * UPDATE_BYTES_PER_ELEMENT, UPDATE_SLOTS)
    plan.staging = Line("staging, gradients and activations", chunk_elements * element, STAGING_CHUNKS)

    smallest = plan.total
    if smallest > budget:
        raise BudgetError(
            f"a host memory budget of {format_size(budget)} is too small for this model: the least is "
            f"{format_size(smallest)} ({smallest} bytes), asked for by\n{plan.table()}",
            smallest,
        )

    # A third buffer per repeated size lets the next prefetch start before the last user is gone.
    spare = budget - plan.total
    for line, repeated, members in spread:
        if repeated and members >= REPEATED_BUFFERS and line.nbytes <= spare:
            line.count = REPEATED_BUFFERS
            spare -= line.total // line.count
    # A gradient byte kept in memory saves a write and a read; a weight byte saves one read, so it comes second.
    wanted = sum(-(-tensor.numel // chunk_elements) for tensor in tensors if not tensor.packed)
    extra = min(wanted, spare // plan.staging.nbytes)
    plan.staging.count += extra
    spare -= extra * plan.staging.nbytes
    for line, _, members in spread:
        extra = min(members - line.count, spare // max(line.nbytes, 1))
        line.count += extra
        spare -= extra * round_up(line.nbytes, PAGE_BYTES)
    return plan
