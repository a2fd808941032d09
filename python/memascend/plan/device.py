"""The device memory plan: what memascend and PyTorch hold there, a line per consumer, checked before anything starts.

What memascend reserves itself (buffers of weights, gradients on their way to the host) is exact. What PyTorch holds
beside it is estimated (`estimates.py`) where the tokens of a batch are known, and is what remains where they are not.
CUDA's context and the code of kernels (a few hundred MB) are neither's: they are outside the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend._memascend import PAGE_BYTES
from memascend.common.sizes import format_size
from memascend.errors import BudgetError
from memascend.layout.units import round_up
from memascend.plan.estimates import Shape
from memascend.plan.host import Line, classes_apart, classes_by_turns, table_of, why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.layout.units import Unit
    from memascend.plan.host import BufferClass

#: Inputs of recomputed layers that are on the device although they are put aside elsewhere: two on their way and one
#: that is used just now (`activations.LEAVING_INPUTS`).
PASSING_INPUTS = 3
#: Where a budget is not given: the share of what is free that is left to kernels' code and to the allocator's holes.
MARGIN_SHARE = 1 / 16
#: While nobody knows how many tokens a batch has, the share of a budget that buffers leave to activations: those that
#: spare the device a wait, and those that merely keep weights.
AHEAD_LEAVES, CACHE_LEAVES = 1 / 4, 1 / 2
#: What estimates may be short by: buffers that merely keep weights leave so much more than estimated.
ESTIMATES_OFF = 1 / 4
#: What PyTorch gives cuBLAS and cuBLASLt to work in, 32 MiB for each on Hopper (8 and 1 before), once for the thread
#: that computes forward and once for autograd's.
WORKSPACE_BYTES = 4 * 32 * 2**20
#: What PyTorch's allocator loses in holes, of all that it is estimated to hand out.
HOLES_SHARE = 1 / 32
#: The allocator's smallest block; a parameter that is not there has one for its stand-in and one for its gradient's.
BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Device memory of one run."""

    budget: int
    #: Buffers of weights, by size.
    units: tuple[Line, ...]
    #: What is on its way to the host, and what autograd is making meanwhile.
    gradients: tuple[Line, ...]
    #: What else memascend has there, and what PyTorch holds.
    rest: tuple[Line, ...]
    #: The least budget that works, and one with which weights come while the device computes.
    smallest_bytes: int
    overlap_bytes: int

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every consumer."""
        return (*self.units, *self.gradients, *self.rest)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(line.total for line in self.lines)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the buffers of weights."""
        return sum(line.total for line in self.units)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of gradients that may be on their way to the host while another is made."""
        return self.gradients[0].nbytes

    def table(self) -> str:
        """Write the plan with a line per consumer, their sum and the budget."""
        return f"{table_of(self.lines)}\n  of a budget of {format_size(self.budget)}, without CUDA's own context"


def make_device_plan(
    units: Sequence[Unit],
    budget: int | None,
    *,
    tokens: int | None = None,
    config: Any = None,
    activations: str = "recompute",
    fused_loss: bool = False,
    free: int | None = None,
) -> DevicePlan:
    """Divide the memory of a device: what is needed first, then what a spare byte saves most with.

    Args:
        units: all units of the model.
        budget: bytes that may be taken; None takes `free` less a margin of 1/16.
        tokens: tokens of one forward pass (sequences x length), if known.
        config: the model's Hugging Face configuration, if it has one. Without it or without `tokens` nothing is
            estimated, and buffers beyond the least leave room for activations.
        activations: where the inputs of recomputed layers wait ("recompute": on the device, "host", "ssd"), or "keep",
            where layers are not recomputed.
        fused_loss: whether the loss makes the logits in pieces, as Liger-Kernel's fused linear cross entropy does.
        free: bytes that the device has free.

    Raises:
        BudgetError: the budget does not hold what is needed; the message says what would lower that.
    """
    if budget is None:
        if free is None:
            raise ValueError("without a budget for device memory it takes `free`, what the device has free")
        budget = int(free * (1 - MARGIN_SHARE))
    trained = [[place.nbytes for place in unit.places if place.parameter.requires_grad] for unit in units]
    largest = max((nbytes for gradients in trained for nbytes in gradients), default=0)
    # A gradient is on its way while autograd makes the next, which may be as large.
    leaving = Line("gradients on their way", largest, 1, "to host memory")
    made = Line("gradient being made", largest, 1, "whole, by autograd")
    parameters = sum(1 for unit in units for _ in unit.places)
    stand_ins = Line("absent parameters", 2 * BLOCK_BYTES * parameters, 1, "what stands for them and their gradients")
    estimated = _estimates(units, tokens, config, activations, fused_loss, leaving.total + made.total)
    needed = leaving.total + made.total + stand_ins.total + sum(line.total for line in estimated or ())

    classes, in_turns = classes_apart(units), classes_by_turns(units)
    apart, together = (sum(each.line.total for each in planned) for planned in (classes, in_turns))
    smallest, overlap = needed + min(apart, together), needed + apart
    if together < apart and budget < overlap:
        classes = in_turns
    lines = tuple(each.line for each in classes)
    plan = DevicePlan(budget, lines, (leaving, made), (stand_ins, *(estimated or ())), smallest, overlap)
    if plan.total > budget:
        raise _too_small(plan, tokens, activations, fused_loss)

    if estimated is None:
        ahead_leaves, cache_leaves = int(budget * AHEAD_LEAVES), int(budget * CACHE_LEAVES)
    else:
        ahead_leaves, cache_leaves = 0, int(sum(line.total for line in estimated) * ESTIMATES_OFF)

    def add(each: BufferClass, wanted: int, leave: int) -> None:
        room = (budget - plan.total - leave) // max(round_up(each.line.nbytes, PAGE_BYTES), 1)
        each.line.count += max(0, min(wanted, each.members - each.line.count, room))

    # Of repeated units there are two: one in use and the next, and `DeviceStreamer` copies two ahead.
    for each in classes:
        if each.repeated:
            add(each, 1, ahead_leaves)
    # With a whole unit's on their way, what one layer leaves behind is copied while the one before it computes.
    more = max((sum(gradients) for gradients in trained), default=0) - largest
    leaving.nbytes += max(0, min(more, (budget - plan.total - ahead_leaves) // PAGE_BYTES * PAGE_BYTES))
    # The layers first: what is used where the passes turn round is used again at once.
    for each in sorted(classes, key=lambda each: not each.repeated):
        add(each, each.members, cache_leaves)
        each.line.note = why(each)
    if estimated is None:
        remains = (budget - plan.total) // PAGE_BYTES * PAGE_BYTES
        rest = Line("activations and workspace", remains, 1, "what remains, for PyTorch")
        plan = replace(plan, rest=(*plan.rest, rest))
    return plan


def _estimates(
    units: Sequence[Unit], tokens: int | None, config: Any, activations: str, fused_loss: bool, gradients: int
) -> list[Line] | None:
    """Return what PyTorch holds at the worst moment, or None where nothing is known of it."""
    shape = Shape.of(config)
    layers = sum(unit.repeated for unit in units)
    if tokens is None or shape is None or not layers:
        return None
    itemsize = next(unit for unit in units if unit.repeated).tensors[0].dtype.itemsize
    estimate = "estimate: "
    lines = []
    if activations == "keep":
        kept = shape.kept_bytes(tokens, itemsize)
        lines.append(Line("activations of layers", kept, layers, f"{estimate}all that is not recomputed"))
    else:
        here = layers if activations == "recompute" else min(layers, PASSING_INPUTS)
        note = "each waits here" if activations == "recompute" else "on their way"
        lines.append(Line("inputs of layers", tokens * shape.hidden * itemsize, here, estimate + note))
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        # Autograd adds to the head's gradient that of the embedding, which comes last.
        nbytes = shape.vocabulary * shape.hidden * itemsize
        lines.append(Line("gradient of the tied embedding", nbytes, 1, f"{estimate}there until the pass is through"))
    layer, logits = shape.layer_bytes(tokens, itemsize), _loss_bytes(shape, tokens, itemsize, fused_loss)
    # At the loss no gradient of a weight is there yet, unless the loss makes it: their room serves the logits.
    beyond = logits if fused_loss else logits - gradients
    if beyond > layer:
        note = "with gradients" if fused_loss else f"{format_size(logits)} in all, before weights' gradients"
        lines.append(Line("logits", beyond, 1, estimate + note))
    else:
        note = f"{estimate}with gradients (logits, before: {format_size(logits)})"
        lines.append(Line("one layer, recomputed", layer, 1, note))
    holes = int(HOLES_SHARE * (sum(line.total for line in lines) + gradients))
    lines.append(Line("workspace and holes", WORKSPACE_BYTES + holes, 1, "allowance: cuBLAS, PyTorch's allocator"))
    return lines


def _loss_bytes(shape: Shape, tokens: int, itemsize: int, fused: bool) -> int:
    """Bytes of the logits and their gradients at once; whoever calls the model keeps the logits themselves too."""
    if not fused:
        return shape.logits_bytes(tokens) + tokens * shape.vocabulary * itemsize
    # Liger-Kernel takes so many tokens at a time that their logits are about as large as the hidden states, and makes
    # the gradients of both at once.
    pieces = -(-shape.vocabulary // shape.hidden)
    piece = 1 << (-(-tokens // pieces) - 1).bit_length()
    return 2 * piece * shape.vocabulary * itemsize + tokens * shape.hidden * itemsize


def _too_small(plan: DevicePlan, tokens: int | None, activations: str, fused_loss: bool) -> BudgetError:
    knobs = []
    consumers = {line.consumer for line in plan.rest if line.count}
    if consumers & {"inputs of layers", "one layer, recomputed", "logits", "activations of layers"}:
        knobs.append(f"fewer than {tokens} tokens at a time (a smaller batch, or shorter sequences)")
    if activations == "keep":
        knobs.append("recomputed layers (recompute=True)")
    if activations == "recompute" and "inputs of layers" in consumers:
        knobs.append("activations='host' or 'ssd'")
    if "logits" in consumers and not fused_loss:
        knobs.append("a loss that makes the logits in pieces (Liger-Kernel's fused linear cross entropy)")
    if plan.units:
        largest = max(plan.units, key=lambda line: line.nbytes).consumer.removeprefix("weights of ")
        knobs.append(f"a model whose {largest} is smaller: the largest piece is there whole")
    return BudgetError(
        f"a device memory budget (device_memory) of {format_size(plan.budget)} is too small: the least is "
        f"{format_size(plan.smallest_bytes)} ({plan.smallest_bytes} bytes); from {format_size(plan.overlap_bytes)} on, "
        f"copying overlaps computing. Asked for by\n{table_of(plan.lines)}\nWhat would lower it: {'; '.join(knobs)}",
        plan.smallest_bytes,
    )
