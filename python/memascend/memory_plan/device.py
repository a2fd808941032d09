"""The device memory plan: a line for each consumer in memascend and PyTorch, checked before anything starts.

Memory that memascend reserves itself (buffers of weights, gradients on their way to the host) is exact. PyTorch's is
estimated (`estimates`) if the tokens of a batch are known; if not, PyTorch gets the remainder, and in the least plan
the need of a short batch. Both count whole segments of PyTorch's allocator (`hardware/segments.py`): the budget is
the limit of these. CUDA's context and the code of kernels (a few hundred MB) are outside the budget.

The least plan has PyTorch's share for a short batch, because a plan that leaves PyTorch nothing runs out of memory in
its first pass. Where the tokens of a batch are not known, buffers that hide copies leave a quarter of the budget alone
and buffers that only cache leave half: a copy too many costs time, an allocation that fails costs the run. Logits and
gradients of weights are not summed, since the loss comes before the first gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend._memascend import PAGE_BYTES
from memascend.common.sizes import format_least, format_size
from memascend.common.tiles import tile_of
from memascend.errors import BudgetError
from memascend.hardware.segments import BLOCK_BYTES, LARGE_SEGMENT_BYTES, OWN_SEGMENT_BYTES, taken_bytes
from memascend.layout.tables import block_rows
from memascend.layout.units import round_up
from memascend.memory_plan.classes import classes_apart, classes_by_turns, why
from memascend.memory_plan.estimates import Shape
from memascend.memory_plan.in_parts import BLOCK_BUFFERS
from memascend.memory_plan.lines import Line, table_of
from memascend.vocabulary.chunked_loss import device_piece_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.hardware.segments import Segments
    from memascend.layout.units import ParameterEntry, Unit
    from memascend.memory_plan.classes import BufferClass
    from memascend.memory_plan.estimates import Tensors

#: Inputs of recomputed layers that are on the device although they are put aside elsewhere: two
#: being copied (`recompute.LEAVING_INPUTS`) and one in use.
PASSING_INPUTS = 3
#: Without a given budget: the share of the free memory that is left to kernels' code and to the
#: allocator's holes.
MARGIN_SHARE = 1 / 16
#: If the tokens of a batch are not known: the share of a budget that is left to activations by
#: buffers that spare the device a wait, and by buffers that only cache weights.
AHEAD_LEAVES, CACHE_LEAVES = 1 / 4, 1 / 2
#: The share by which PyTorch may exceed its estimate: buffers that only cache weights leave as much. Most of it are
#: freed segments that the allocator keeps, of other sizes than are wanted next: in five runs on an H200 it
#: reserved up to 1/6 more than the tensors' estimate and the other lines (`benches/results/device-h200-3.json`).
ESTIMATES_OFF = 1 / 4
#: Without `tokens`, the least plan has room for a batch of so many, or, where nothing is known of the model's layers,
#: for so many bytes.
LEAST_TOKENS = 256
LEAST_ACTIVATIONS_BYTES = 2 * LARGE_SEGMENT_BYTES
#: The share of the estimated allocations that PyTorch's allocator loses in holes.
HOLES_SHARE = 1 / 32
#: Blocks of a table's gradient on their way to the host while another is made.
GRADIENT_BLOCKS = 3

_ESTIMATE = "estimate: "


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Device memory of one run."""

    budget: int
    #: Buffers of weights, by size.
    units: tuple[Line, ...]
    #: Buffers for blocks of tables.
    blocks: Line
    #: Gradients on their way to the host, the gradient that autograd makes meanwhile, and sums that stay from one
    #: backward pass to the next.
    gradients: tuple[Line, ...]
    #: Other consumers of memascend, and PyTorch.
    rest: tuple[Line, ...]
    #: The least budget that works, and the least with which weights are copied while the device
    #: computes.
    smallest_bytes: int
    overlap_bytes: int
    #: Tables that have a buffer of their own, because there is room.
    whole_tables: tuple[Unit, ...] = ()

    @property
    def buffers(self) -> tuple[Line, ...]:
        """The lines of all buffers that are reserved."""
        return (*self.units, *((self.blocks,) if self.blocks.count else ()))

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of all consumers."""
        return (*self.buffers, *self.gradients, *self.rest)

    @property
    def total(self) -> int:
        """Bytes that all consumers take together."""
        return sum(line.total for line in self.lines)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the buffers of weights."""
        return sum(line.total for line in self.buffers)

    @property
    def made_bytes(self) -> int:
        """Bytes of the largest gradient that may be there as a whole; a larger table's is made by blocks."""
        return self.gradients[1].nbytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of gradients that may be on their way to the host while another is made."""
        return self.gradients[0].nbytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of sums of gradients that may stay on the device from one backward pass to the next."""
        return self.gradients[2].total

    def table(self) -> str:
        """Write the plan with a line per consumer, their sum and the budget."""
        return f"{table_of(self.lines)}\n  of a budget of {format_size(self.budget)}, without CUDA's own context"


def make_device_plan(
    units: Sequence[Unit],
    budget: int | None,
    *,
    tokens: int | None = None,
    layer_tokens: int | None = None,
    tile_tokens: int | str | None = None,
    config: Any = None,
    activations: str = "recompute",
    fused_loss: bool = False,
    free: int | None = None,
    segments: Segments | None = None,
) -> DevicePlan:
    """Divide the memory of a device: first the needs, then where a spare byte saves most.

    Args:
        units: all units of the model.
        budget: bytes that may be taken; None takes `free` less a margin of 1/16.
        tokens: tokens of one forward pass (sequences x length), if known.
        layer_tokens: those that a repeated layer computes at once, of slices of the batch; None is all.
        tile_tokens: those that an MLP or a norm computes at once, or "auto"; None is all.
        config: the model's Hugging Face configuration, if it has one. Without it or without `tokens` nothing is
            estimated, and buffers beyond the least leave room for activations: the least plan has room for
            `LEAST_TOKENS` tokens, or for `LEAST_ACTIVATIONS_BYTES`.
        activations: where the inputs of recomputed layers wait ("recompute": on the device, "host", "ssd"), or "keep",
            where layers are not recomputed.
        fused_loss: whether the loss makes the logits in pieces, as Liger-Kernel's fused linear cross entropy does.
        free: bytes that the device has free.
        segments: how PyTorch's allocator cuts the device's memory. None: each tensor takes its bytes and no more, and
            cuBLAS nothing.

    Raises:
        BudgetError: the budget is too small; the message says how to lower the need.
    """
    if budget is None:
        if free is None:
            raise ValueError("give `free`, the free memory of the device, where there is no budget of device memory")
        budget = int(free * (1 - MARGIN_SHARE))
    tables = [unit for unit in units if unit.is_table]
    gradients = [[_gradient_bytes(place) for place in unit.places if place.parameter.requires_grad] for unit in units]
    leaving, made, stand_ins = _needed_lines(units, max((nbytes for unit in gradients for nbytes in unit), default=0))
    fused_loss = fused_loss or any(table.is_head for table in tables)
    computing = Estimate(units, config, activations, fused_loss, leaving.total + made.total, segments, tile_tokens)
    estimated = None if tokens is None else computing.lines(tokens, layer_tokens)
    unknown = None if estimated else _unknown_line(computing)
    freed = Line("freed segments", 0, 0, "allowance: kept by PyTorch's allocator")
    rest = (
        stand_ins,
        *(estimated or (unknown,)),
        *_segment_lines(gradients, segments),
        *((freed,) if estimated else ()),
    )
    blocks = _blocks_line(tables)
    needed = blocks.total + leaving.total + made.total + sum(line.total for line in rest)
    layers = [unit for unit in units if not unit.is_table]
    classes, by_turns = classes_apart(layers), classes_by_turns(layers)
    apart, together = (sum(kind.line.total for kind in planned) for planned in (classes, by_turns))
    smallest, overlap = needed + min(apart, together), needed + apart
    if together < apart and budget < overlap:
        classes = by_turns
    sums = Line("sums of gradients", 0, 0, "from one backward pass to the next")
    leaving_made = (leaving, made, sums)
    plan = DevicePlan(budget, tuple(kind.line for kind in classes), blocks, leaving_made, rest, smallest, overlap)
    if plan.total > budget:
        beside = smallest - sum(line.total for line in estimated or ())
        most = None if tokens is None else computing.most_tokens(tokens, layer_tokens, budget - beside)
        raise _too_small(plan, tokens, most, computing)
    if unknown is not None:
        # The unknown's line is a part of the plan already.
        ahead_leaves, cache_leaves = (
            max(0, int(budget * share) - unknown.total) for share in (AHEAD_LEAVES, CACHE_LEAVES)
        )
    else:
        ahead_leaves, cache_leaves = 0, int(sum(line.total for line in estimated or ()) * ESTIMATES_OFF)
    _spend_spare(plan, classes, tables, list(map(sum, gradients)), ahead_leaves, cache_leaves)
    plan = _with_whole_tables(plan, tables, cache_leaves)
    _keep_sums(plan, classes, sum(map(sum, gradients)), cache_leaves)
    if estimated and segments is not None:
        freed.nbytes, freed.count = max(0, min(cache_leaves, plan.budget - plan.total) // PAGE_BYTES * PAGE_BYTES), 1
    if unknown is not None:
        unknown.nbytes = round_up(unknown.nbytes, PAGE_BYTES) + (budget - plan.total) // PAGE_BYTES * PAGE_BYTES
        unknown.note = "the remainder, for PyTorch"
    return plan


def _gradient_bytes(place: ParameterEntry) -> int:
    """Return the bytes of a gradient that are there at once: of a table, blocks of it."""
    if not place.tensor.unit.is_table:
        return place.nbytes
    # One may be the sum of products, in float32 then.
    return place.blocks.nbytes * GRADIENT_BLOCKS


def _blocks_line(tables: Sequence[Unit]) -> Line:
    nbytes = max((place.blocks.nbytes for table in tables for place in table.places), default=0)
    return Line("vocabulary, by blocks", nbytes, BLOCK_BUFFERS if tables else 0, "in use, next")


def _make_gradients_whole(plan: DevicePlan, tables: Sequence[Unit], cache_leaves: int) -> None:
    """Enlarge the lines of gradients to whole tables, where that leaves `cache_leaves` bytes.

    A whole one is measured on the device and captured by another thread. One that comes by blocks is measured by the
    thread that launches the backward pass.
    """
    trained = (place for table in tables for place in table.places if place.parameter.requires_grad)
    largest = max((place.nbytes for place in trained), default=0)
    lines = plan.gradients[:2]
    more = sum(max(0, largest - line.nbytes) for line in lines)
    if plan.total + round_up(more, PAGE_BYTES) + 2 * PAGE_BYTES <= plan.budget - cache_leaves:
        for line in lines:
            line.nbytes = max(line.nbytes, largest)


def _with_whole_tables(plan: DevicePlan, tables: Sequence[Unit], cache_leaves: int) -> DevicePlan:
    """Give heads buffers of their own, where they leave `cache_leaves` bytes: blocks are copied in each pass.

    An embedding that is looked up only gains nothing by that: its rows are fewer than the table.
    """
    for kind in sorted(classes_apart([table for table in tables if table.is_head]), key=lambda kind: kind.line.nbytes):
        kind.line.count, kind.line.note = len(kind.members), "copied once a step"
        if plan.total + kind.line.total > plan.budget - cache_leaves:
            break
        plan = replace(plan, units=(*plan.units, kind.line), whole_tables=(*plan.whole_tables, *kind.members))
    return plan


def _needed_lines(units: Sequence[Unit], largest: int) -> tuple[Line, Line, Line]:
    """Return the lines of gradients on their way, of the gradient being made, and of stand-ins for parameters.

    A gradient of up to `largest` bytes is on its way while autograd makes the next, which may be as large.
    """
    parameters = sum(1 for unit in units for _ in unit.places)
    return (
        Line("gradients on their way", largest, 1, "to host memory"),
        Line("gradient being made", largest, 1, "whole, by autograd"),
        Line("absent parameters", BLOCK_BYTES * parameters, 1, "stand-ins for them and their gradients"),
    )


def _spend_spare(
    plan: DevicePlan,
    classes: Sequence[BufferClass],
    tables: Sequence[Unit],
    gradients: Sequence[int],
    ahead_leaves: int,
    cache_leaves: int,
) -> None:
    """Enlarge the lines of a plan where a spare byte saves most.

    `gradients` are the bytes of each unit's gradients. Buffers that spare the device a wait leave
    `ahead_leaves` bytes of the budget, and buffers that only cache weights leave `cache_leaves`.
    """

    def add(kind: BufferClass, wanted: int, leave: int) -> None:
        room = (plan.budget - plan.total - leave) // max(round_up(kind.line.nbytes, PAGE_BYTES), 1)
        kind.line.count += max(0, min(wanted, len(kind.members) - kind.line.count, room))

    # Of repeated units there are two: one in use and the next, and `DeviceCache` copies two
    # ahead.
    for kind in classes:
        if kind.repeated:
            add(kind, 1, ahead_leaves)
    # With room for the gradients of a whole unit, the gradients of one layer are copied while the layer before it
    # computes.
    leaving = plan.gradients[0]
    more = max(gradients, default=0) - leaving.nbytes
    leaving.nbytes += max(0, min(more, (plan.budget - plan.total - ahead_leaves) // PAGE_BYTES * PAGE_BYTES))
    _make_gradients_whole(plan, tables, cache_leaves)
    # The layers first: the units at the turn from forward to backward pass are used again at once.
    for kind in sorted(classes, key=lambda kind: not kind.repeated):
        add(kind, len(kind.members), cache_leaves)
        kind.line.note = why(kind)


def _keep_sums(plan: DevicePlan, classes: Sequence[BufferClass], gradients: int, cache_leaves: int) -> None:
    """Give sums of gradients, of `gradients` bytes in all, the bytes beyond `cache_leaves` where all weights stay.

    One byte of a weight saves two copies to the device for each backward pass, one of a sum saves one copy to the host
    for each pass but one, which has the direction to itself, and the host's addition. Over ranks the host adds the
    gradients of all.
    """
    sums, room = plan.gradients[2], (plan.budget - plan.total - cache_leaves) // PAGE_BYTES * PAGE_BYTES
    divided = any(tensor.shard is not None for kind in classes for unit in kind.members for tensor in unit.tensors)
    if room > 0 and not divided and all(kind.line.count == len(kind.members) for kind in classes):
        sums.nbytes, sums.count = min(gradients, room), 1


def _unknown_line(computing: Estimate) -> Line:
    """Return the line of PyTorch's memory for a batch of unknown size, with the least that it may be."""
    least = computing.lines(LEAST_TOKENS)
    if least is None:
        note = f"allowance: {format_size(LEAST_ACTIVATIONS_BYTES)}, as batch_tokens or the layers' widths are not known"
        return Line("activations", LEAST_ACTIVATIONS_BYTES if computing.segments else 0, 1, note)
    note = f"estimate: of {LEAST_TOKENS} tokens, as batch_tokens is not given"
    return Line("activations", sum(line.total for line in least), 1, note)


def _segment_lines(gradients: Sequence[Sequence[int]], segments: Segments | None) -> list[Line]:
    """Return the lines of the allocator's segments beyond tensors, and of cuBLAS' workspaces."""
    if segments is None:
        return []
    # Gradients on their way are about one unit's. The weights lie in one tensor.
    rounding = max((sum(taken_bytes(nbytes) - nbytes for nbytes in unit) for unit in gradients), default=0)
    rest = segments.begun_bytes + OWN_SEGMENT_BYTES + rounding
    return [
        Line("rest of segments", rest, 1, "allowance: PyTorch's allocator"),
        Line("workspaces", segments.workspaces_bytes, 1, "of cuBLAS and cuBLASLt, in two threads"),
    ]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The inputs of the estimate of PyTorch's share, beside the tokens of a batch."""

    units: Sequence[Unit]
    config: Any
    activations: str
    fused_loss: bool
    #: Bytes for gradients of weights.
    gradients: int
    segments: Segments | None
    tile_tokens: int | str | None = None

    @property
    def in_pieces(self) -> bool:
        """Whether a head is a table, whose loss makes the logits in pieces."""
        return any(unit.is_head for unit in self.units)

    def lines(self, tokens: int, layer_tokens: int | None = None) -> list[Line] | None:
        """Return the lines of PyTorch's memory at its peak, or None if the model's widths are unknown.

        A repeated layer computes `layer_tokens` of the `tokens` at once.
        """
        layer_tokens = tokens if layer_tokens is None else layer_tokens
        shape = Shape.of(self.config)
        layers = sum(unit.repeated for unit in self.units)
        if shape is None or not layers:
            return None
        itemsize = next(unit for unit in self.units if unit.repeated).tensors[0].dtype.itemsize
        lines = self._waiting_lines(shape, tokens, layers, itemsize)
        layer = self._taken(self._of_layer(shape, layer_tokens, itemsize))
        if layer_tokens < tokens:
            # The last norm takes the whole batch, in float32: its input, two gradients; others in the layers' dtype.
            normed = tokens if self.tile_tokens is None else min(tokens, tile_of(self.tile_tokens, tokens))
            norm = [(normed * shape.hidden * 4, 3), (tokens * shape.hidden * itemsize, 3)]
            layer = max(layer + self._taken(self._of_batch(shape, tokens, itemsize)), self._taken(norm))
        loss = loss_in_pieces if self.in_pieces else _fused_loss if self.fused_loss else _whole_logits
        logits = self._taken(loss(shape, tokens, itemsize))
        # At the loss there are no gradients of weights yet, unless the loss makes them: their room
        # serves the logits.
        beyond = logits if self.fused_loss else logits - self.gradients
        if beyond > layer:
            note = "with gradients" if self.fused_loss else f"{format_size(logits)} in all, before weights' gradients"
            lines.append(Line("logits", beyond, 1, _ESTIMATE + note))
        else:
            note = f"{_ESTIMATE}with gradients (logits, before: {format_size(logits)})"
            lines.append(Line("one layer, recomputed", layer, 1, note))
        holes = int(HOLES_SHARE * (sum(line.total for line in lines) + self.gradients))
        lines.append(Line("holes", holes, 1, "allowance: PyTorch's allocator"))
        return lines

    def most_tokens(self, tokens: int, layer_tokens: int | None, room: int) -> int:
        """Return the most tokens of a batch, fewer than `tokens`, whose lines fit into `room` bytes; 0 if none do.

        A layer computes the same part of them at once as `layer_tokens` are of `tokens`.
        """
        fits, beyond = 0, tokens
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            at_once = None if layer_tokens is None else max(1, middle * layer_tokens // tokens)
            lines = self.lines(middle, at_once)
            if lines is not None and sum(line.total for line in lines) <= room:
                fits = middle
            else:
                beyond = middle
        return fits

    def _of_layer(self, shape: Shape, tokens: int, itemsize: int) -> Tensors:
        """Return the tensors of a layer that computes `tokens` at once, on tiles of them if it does."""
        tile = tokens if self.tile_tokens is None else tile_of(self.tile_tokens, tokens)
        if tile >= tokens:
            return shape.layer_tensors(tokens, itemsize)
        layers = [unit for unit in self.units if unit.repeated]
        trained = (sum(p.numel for p in unit.places if p.parameter.requires_grad) for unit in layers)
        weights = max(0, max(trained) - shape.attention_weights)
        # The gradients of the MLP's weights of one tile, and their sum in float32.
        sums = [(weights * itemsize, 1), (weights * 4, 1)]
        return [*shape.tiled_tensors(tokens, itemsize, tile), *sums]

    def _of_batch(self, shape: Shape, tokens: int, itemsize: int) -> Tensors:
        """Return the tensors of the whole batch beside slices that go through a layer, and sums of gradients."""
        # The gradients of the layer's outputs, of its inputs by slices, and of its inputs side by side.
        hidden = [(tokens * shape.hidden * itemsize, 3)]
        layers = ([p.nbytes for p in unit.places if p.parameter.requires_grad] for unit in self.units if unit.repeated)
        return hidden + [(nbytes, 1) for nbytes in max(layers, key=sum)]

    def _waiting_lines(self, shape: Shape, tokens: int, layers: int, itemsize: int) -> list[Line]:
        """Return the lines of tensors that live while layers and the loss are computed."""
        lines = []
        if self.activations == "keep":
            saved = self._taken(shape.kept_tensors(tokens, itemsize))
            lines.append(Line("activations of layers", saved, layers, f"{_ESTIMATE}all that is not recomputed"))
        else:
            here = layers if self.activations == "recompute" else min(layers, PASSING_INPUTS)
            note = "each waits here" if self.activations == "recompute" else "on their way"
            each = self._taken([(tokens * shape.hidden * itemsize, 1)])
            lines.append(Line("inputs of layers", each, here, _ESTIMATE + note))
        if getattr(self.config.get_text_config(), "tie_word_embeddings", False):
            # Autograd adds the gradient of the embedding, which comes last, to the head's. A table's gradient is made
            # from hidden states, block by block.
            rows = tokens if self.in_pieces else shape.vocabulary
            nbytes = self._taken([(rows * shape.hidden * itemsize, 1)])
            note = f"{_ESTIMATE}there until the pass is through"
            lines.append(Line("gradient of the tied embedding", nbytes, 1, note))
        return lines

    def _taken(self, tensors: Tensors) -> int:
        """Return the bytes that tensors take of the device's memory."""
        size: Callable[[int], int] = int if self.segments is None else taken_bytes
        return sum(size(nbytes) * count for nbytes, count in tensors)


def _whole_logits(shape: Shape, tokens: int, itemsize: int) -> Tensors:
    """Return the logits and their gradients at once; the caller of the model holds the logits too."""
    return [*shape.logits_tensors(tokens), (tokens * shape.vocabulary * itemsize, 1)]


def loss_in_pieces(shape: Shape, tokens: int, itemsize: int) -> Tensors:
    """Return the tensors of the loss in pieces: the hidden states' gradients and a piece of the logits."""
    float32 = 4
    # Of each token: the gradient of its hidden state, and the row of its label, which is converted at the end.
    hidden = [(tokens * shape.hidden * float32, 1), (tokens * shape.hidden * itemsize, 1)]
    at_end = [(tokens * shape.hidden * float32, 1)]
    height = min(shape.vocabulary, block_rows(shape.hidden, itemsize))
    piece = min(tokens * height, device_piece_elements(tokens, shape.hidden))
    # As the product gives it, in float32, and as the derivative; then a product with the weights.
    of_piece = [
        (piece * itemsize, 2),
        (piece * float32, 1),
        (-(-piece // height) * shape.hidden * itemsize, 1),
    ]
    return [*hidden, *max(at_end, of_piece, key=_nbytes)]


def _nbytes(tensors: Tensors) -> int:
    return sum(nbytes * count for nbytes, count in tensors)


def _fused_loss(shape: Shape, tokens: int, itemsize: int) -> Tensors:
    """Return the tensors of Liger-Kernel's fused linear cross entropy: gradients of hidden states and logits."""
    # It takes as many tokens at a time as make logits of about the size of the hidden
    # states, and makes the gradients of both at once. Shapes: logits (piece, vocabulary), hidden
    # states (tokens, hidden).
    pieces = -(-shape.vocabulary // shape.hidden)
    piece = 1 << (-(-tokens // pieces) - 1).bit_length()
    return [(piece * shape.vocabulary * itemsize, 2), (tokens * shape.hidden * itemsize, 1)]


def _too_small(plan: DevicePlan, tokens: int | None, most: int | None, computing: Estimate) -> BudgetError:
    activations = computing.activations
    knobs = []
    consumers = {line.consumer for line in plan.rest if line.count}
    if "activations" in consumers:
        knobs.append("batch_tokens, if a batch has few tokens: its memory is estimated then")
    if consumers & {"inputs of layers", "one layer, recomputed", "logits", "activations of layers"}:
        fitting = f"; {most} fit" if most else ""
        knobs.append(f"fewer than {tokens} tokens at a time (a smaller batch, or shorter sequences{fitting})")
        if computing.tile_tokens is None:
            knobs.append("tile_tokens='auto', with which MLPs and norms compute a part of a long sequence at a time")
    if activations == "keep":
        knobs.append("recomputed layers (recompute=True)")
    if activations == "recompute" and "inputs of layers" in consumers:
        knobs.append("activations='host' or 'ssd'")
    if "logits" in consumers and not computing.fused_loss:
        knobs.append("a loss that makes the logits in pieces (Liger-Kernel's fused linear cross entropy)")
    if plan.units:
        largest = max(plan.units, key=lambda line: line.nbytes).consumer.removeprefix("weights of ")
        knobs.append(f"a smaller model: its largest part ({largest}) must fit there as a whole")
    return BudgetError(
        f"a device memory budget (device_memory) of {format_size(plan.budget)} is too small: the least is "
        f"{format_least(plan.smallest_bytes)} ({plan.smallest_bytes} bytes); from {format_size(plan.overlap_bytes)} "
        f"on, copying overlaps computing. The least plan:\n{table_of(plan.lines)}\nTo lower it: {'; '.join(knobs)}",
        plan.smallest_bytes,
    )
