"""Loss scaling for gradients that are kept on SSD."""

from __future__ import annotations

from typing import Any, cast

import torch

from memascend.optim import OffloadedOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients on SSD: scale, unscale_, step, update and state_dict are PyTorch's own.

    Each gradient was checked for overflow when it was captured, so unscaling reads nothing: the factor is applied
    inside the update, in fp32. A step that overflowed is skipped: weights, states and step numbers stay unchanged, and
    no state is read or written. Gradients of ordinary parameters are unscaled in place, as PyTorch does it; float16
    gradients, which PyTorch refuses to unscale, inside the update too.

    With a scale that is a power of two (as by default, with the default growth and backoff) unscaling inside the update
    and in place give the same bits, unless a gradient is so small that its dtype rounds it.

    Args: as of `torch.amp.GradScaler`; `device` is "cpu" unless given.
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
        unscaled_in_place = cast(torch.optim.Optimizer, _UnscaledInPlace(optimizer))
        flags = super()._unscale_grads_(unscaled_in_place, inv_scale, found_inf, allow_fp16)
        if optimizer.unscale_in_step(float(inv_scale)):
            found_inf.fill_(1.0)
        flags.setdefault(found_inf.device, found_inf)
        return flags


class _UnscaledInPlace:
    """The part of an optimizer that PyTorch's scaler reads, with only the parameters that it unscales itself."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self.param_groups = [{"params": optimizer.unscaled_by_torch()}]
