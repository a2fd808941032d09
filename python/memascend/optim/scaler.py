"""Loss scaling for gradients that are kept on SSD."""

from __future__ import annotations

from typing import Any

import torch

from memascend.optim import OffloadedOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients on SSD: scale, unscale_, step, update and state_dict are PyTorch's own.

    Whether a gradient overflowed is known since it was captured, so that unscaling reads nothing: the factor is applied
    inside the update, in fp32. A step that overflowed is left out: weights, states and step numbers stay as they are,
    and no state moves. Gradients of ordinary parameters are unscaled in place, as PyTorch does it; those in float16,
    which PyTorch refuses, inside the update too.

    With a scale that is a power of two (the default, its growth and its backoff are) both give the same bits, unless
    a gradient is so small that its dtype rounds it.

    Args: those of `torch.amp.GradScaler`; `device` is "cpu" unless given.
    """

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        """Take the options of `torch.amp.GradScaler`."""
        super().__init__(device, **options)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, OffloadedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = super()._unscale_grads_(_Rest(optimizer), inv_scale, found_inf, allow_fp16)
        if optimizer.unscale_in_step(float(inv_scale)):
            found_inf.fill_(1.0)
        found.setdefault(found_inf.device, found_inf)
        return found


class _Rest:
    """What PyTorch reads of an optimizer, without the parameters that it must leave alone."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self.param_groups = [{"params": optimizer.unscaled_by_torch()}]
