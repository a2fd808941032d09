"""The division of a model whose experts are to be read one by one, where that takes less memory than whole layers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from memascend.common.sizes import format_size
from memascend.layout.units import CPU, partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from memascend.layout.units import Unit

_log = logging.getLogger("memascend")


def partition_by_plan(
    model: nn.Module,
    device: torch.device = CPU,
    fused_loss: bool | str | None = "auto",
    gradients: str = "auto",
    uploaded: bool = False,
    experts: str = "whole",
    update: str = "forward",
) -> list[Unit]:
    """Divide a model as `partition` does, with experts in pieces only where their least plan is the smaller one.

    Where experts are many and small, what pieces need (two buffers for each size, blocks in which they are written, and
    bookkeeping for each tensor) is more than a layer with all of them. That is read as a whole then: the store and the
    results are the same. `update` is as in `memascend.offload`; the other options and errors are those of `partition`.
    """
    options = device, fused_loss, gradients, uploaded
    units = partition(model, *options, experts)
    if experts == "whole":
        return units
    whole = partition(model, *options, "whole")
    return units if take_less(units, whole, update) else whole


def take_less(pieces: Sequence[Unit], whole: Sequence[Unit], update: str) -> bool:
    """Return whether a model that is divided into pieces has a smaller least plan than with whole layers."""
    of_pieces, of_whole = (smallest_plan(units, update=update).total for units in (pieces, whole))
    if of_pieces < of_whole:
        return True
    _log.info(
        "experts are read with their layers, which takes %s at least; one by one it would be %s",
        format_size(of_whole),
        format_size(of_pieces),
    )
    return False
