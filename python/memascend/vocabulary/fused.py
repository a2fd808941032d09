"""The loss in pieces for a model in memory: the bits of the offloaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from memascend.layout.tables import find_tables
from memascend.vocabulary.logits import deferred_linear, is_answered_elsewhere
from memascend.vocabulary.tables import MemoryTable

if TYPE_CHECKING:
    from collections.abc import Callable


class HeadWeight(nn.Parameter):
    """The weight of a head in memory: its logits are computed when they are asked for."""

    #: Logits that were deferred run functions on both.
    answers_last = True

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Defer the product with hidden states; run everything else as for an ordinary parameter."""
        if is_answered_elsewhere(cls, types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(weight, HeadWeight):
        return deferred_linear(input, weight, bias, MemoryTable(weight))
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(input, weight, bias)


def fuse_loss(model: nn.Module, fused_loss: bool | str = "auto") -> nn.Module:
    """Have a model in memory compute its loss in pieces, as the offloaded model does by itself, and return it.

    Losses, gradients and weights then have the same bits in memory and offloaded. `fused_loss` chooses the heads, as in
    `memascend.offload`; heads below 16 MiB stay as they are. See `memascend.linear_cross_entropy`.
    """
    # An embedding may be multiplied by, too: by code that ties it, or by an adapter around a tied head.
    for weight in find_tables(model, fused_loss) if fused_loss is not False else ():
        weight.__class__ = HeadWeight
    return model
