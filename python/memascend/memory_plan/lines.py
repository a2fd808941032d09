"""A plan of host memory: a line for each consumer of memory, and their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend._memascend import FILE_WINDOW_BYTES, GRADIENT_BLOCK, PAGE_BYTES
from memascend.common.sizes import format_size
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import Unit

#: Elements of a chunk of the update pipeline, at least: the block over which gradient statistics are summed.
CHUNK_ELEMENTS_MIN = GRADIENT_BLOCK
#: What malloc's freed blocks may take, where it keeps them. They have this room before caches do where it is at most a
#: fourth of what is to spare, and last where everything is in memory.
HEAP_BYTES = 256 * 2**20
HEAP_SHARE = 4
#: Less than this is not worth being left to activations.
ACTIVATIONS_BYTES_MIN = 2**20
#: Bytes of malloc's holes for each byte of activations, which live between temporaries: with 0.51B parameters, 8 slices
#: of 128 tokens and 1.1 GB of activations there were 0.15 GB beyond `HEAP_BYTES`.
HOLES_SHARE = 0.15


@dataclass(slots=True)
class Line:
    """One consumer of memory: `count` buffers of `nbytes` bytes, and their purpose."""

    consumer: str
    nbytes: int
    count: int
    note: str = ""

    @property
    def total(self) -> int:
        """Bytes of all buffers, each rounded up to a page."""
        return round_up(self.nbytes, PAGE_BYTES) * self.count


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of repeated layers that wait in host memory from the forward pass to the backward pass."""

    #: Bytes of one: of a layer, or of a slice of the batch that goes through a layer.
    nbytes: int
    #: Inputs of one layer.
    per_layer: int = 1

    def chunks(self, chunk_bytes: int) -> int:
        """Return the chunks that one layer's inputs take."""
        return -(-self.nbytes // chunk_bytes) * self.per_layer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that stay where a budget changes."""

    chunk_elements: int
    slots: int


@dataclass(slots=True)
class Plan:
    """Host memory of one run, to the byte: everything memascend holds, in the arena and beside it."""

    budget: int
    units: list[Line] = field(default_factory=list)
    packs: list[Line] = field(default_factory=list)
    slots: Line = field(default_factory=lambda: Line("update pipeline", 0, 0))
    staging: Line = field(default_factory=lambda: Line("staging", 0, 0))
    #: Buffers of the staging's size that keep data off the SSD.
    staging_cache: Line = field(default_factory=lambda: Line("kept off the SSD", 0, 0))
    #: Buffers in which states stay from one step to the next.
    states: Line = field(default_factory=lambda: Line("states kept in memory", 0, 0))
    bookkeeping: Line = field(default_factory=lambda: Line("bookkeeping", 0, 0))
    #: Beside the arena.
    windows: Line = field(default_factory=lambda: Line("windows into files", FILE_WINDOW_BYTES, 0))
    #: Gradients of autograd that are held until the update in the backward pass has used them.
    applied: Line = field(default_factory=lambda: Line("gradients being applied", 0, 0))
    #: Gradients of small tensors that were frozen when the plan was made.
    later: Line = field(default_factory=lambda: Line("gradients of what trains later", 0, 0))
    #: Buffers of exchanges between ranks, where the store is divided over them.
    exchanged: Line = field(default_factory=lambda: Line("exchanged between ranks", 0, 0))
    chunk_elements: int = CHUNK_ELEMENTS_MIN
    #: Blocks of tables that are read by blocks.
    blocks: Line = field(default_factory=lambda: Line("vocabulary, by blocks", 0, 0, "in use, next"))
    #: Experts that are read one by one, by size.
    experts: list[Line] = field(default_factory=list)
    #: Tables that have a buffer of their own, because there is room.
    whole_tables: list[Unit] = field(default_factory=list)
    #: Units with a buffer of their own, in which their weights stay from one step to the next.
    resident_units: list[Unit] = field(default_factory=list)
    #: Whether malloc may keep freed blocks for PyTorch's next ones: the budget leaves room for them beside all lines.
    retain_heap: bool = False
    #: One buffer serves all large units.
    by_turns: bool = False
    #: The least budget that works, and one with which the next layer is read while one computes, in
    #: full-size chunks.
    smallest_bytes: int = 0
    overlap_bytes: int = 0
    #: When large tensors are updated; see `memascend.options`.
    update: str = "forward"
    #: Whether gradients are made on a device.
    on_device: bool = False
    #: Threads that run the kernels of updates.
    update_threads: int = 1
    #: Inputs of layers that are to stay in host memory, where they are known.
    inputs: Inputs | None = None
    #: For a budget that may change: the plan of the largest, for whose buffers addresses are reserved.
    most: Plan | None = None
    #: Whether a part of the budget may be lent to activations, and the bytes of it that are.
    lends: bool = False
    lent_bytes: int = 0
    #: Whether nothing but that part of the budget may change.
    fixed: bool = False

    @property
    def budget_max(self) -> int | None:
        """The most that the budget may become; None where it stays."""
        return None if self.most is None or self.fixed else self.most.budget

    @property
    def freed_blocks_bytes(self) -> int:
        """Bytes of the budget that are left to freed blocks, beside all lines."""
        return HEAP_BYTES if self.retain_heap else 0

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that no line takes, nor freed blocks."""
        return self.budget - self.total - self.freed_blocks_bytes

    @property
    def activations_bytes(self) -> int:
        """Bytes of activations of recomputed layers for which there is room left, beside the holes between them.

        Those that fit are not computed again. Bytes that are lent (see `lend`) are among them. Activations of a device
        are there.
        """
        room = int(self.left_bytes / (1 + HOLES_SHARE))
        return 0 if self.on_device or room < ACTIVATIONS_BYTES_MIN else room

    @property
    def arena(self) -> list[Line]:
        """The lines of the consumers in the arena."""
        return [*self.buffers, *self.packs, self.slots, self.staging, self.staging_cache, self.states]

    @property
    def buffers(self) -> list[Line]:
        """The lines of the buffers that weights are read into."""
        return [*self.units, *([self.blocks] if self.blocks.count else []), *self.experts]

    @property
    def lines(self) -> list[Line]:
        """The lines of all consumers."""
        return [*self.arena, self.windows, self.applied, self.later, self.exchanged, self.bookkeeping]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, which is reserved as a whole."""
        return sum(line.total for line in self.arena)

    @property
    def total(self) -> int:
        """Bytes that all consumers take together, in the arena and beside it."""
        return sum(line.total for line in self.lines)

    def table(self) -> str:
        """Write the plan with a line per consumer."""
        return table_of(self.lines)


def table_of(lines: Sequence[Line]) -> str:
    """Write a line per consumer, of those that take anything, and their sum."""
    lines = [line for line in lines if line.count]
    width = max((len(line.consumer) for line in lines), default=len("total"))
    rows = [
        f"  {line.consumer:<{width}} {line.count:>5} x {format_size(line.nbytes):>10} = "
        f"{format_size(line.total):>10}  {line.note}".rstrip()
        for line in lines
    ]
    total = format_size(sum(line.total for line in lines))
    return "\n".join([*rows, f"  {'total':<{width}} {'':>5}   {'':>10}   {total:>10}"])
