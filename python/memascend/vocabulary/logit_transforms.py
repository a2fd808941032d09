"""Operations of a model on its logits before the loss: scaling, caps, conversion.

Each step runs on a piece of the logits in the dtype in which the model runs it on all of them, forward and backward, so
that every value is rounded as often as it is in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiplication by a number (Cohere's `logit_scale`)."""

    number: float


@dataclass(frozen=True, slots=True)
class Divide:
    """Division by a number (Granite's `logits_scaling`)."""

    number: float


@dataclass(frozen=True, slots=True)
class Tanh:
    """The hyperbolic tangent, between a division and a multiplication: a soft cap (Gemma 2)."""


@dataclass(frozen=True, slots=True)
class Convert:
    """Conversion to another dtype."""

    source: torch.dtype
    target: torch.dtype


Step = Multiply | Divide | Tanh | Convert


def steps_of(scale: float, soft_cap: float | None, source: torch.dtype, target: torch.dtype) -> tuple[Step, ...]:
    """Return the steps of scaling, then capping (c * tanh(logits / c)), then conversion to `target`."""
    steps: list[Step] = []
    if scale != 1:
        steps.append(Multiply(scale))
    if soft_cap is not None:
        steps += [Divide(soft_cap), Tanh(), Multiply(soft_cap)]
    if source != target:
        steps.append(Convert(source, target))
    return tuple(steps)


def dtype_after(steps: Sequence[Step], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits of `dtype` after the steps."""
    for step in steps:
        if isinstance(step, Convert):
            dtype = step.target
    return dtype


def is_linear(steps: Sequence[Step]) -> bool:
    """Return whether the derivative of the steps is the same number for all logits."""
    return not any(isinstance(step, Tanh) for step in steps)


def apply_steps(logits: torch.Tensor, steps: Sequence[Step]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the steps on logits that may be overwritten; also return each tanh, which its derivative needs."""
    saved: list[torch.Tensor] = []
    for step in steps:
        if isinstance(step, Multiply):
            logits = logits * step.number if saved and saved[-1] is logits else logits.mul_(step.number)
        elif isinstance(step, Divide):
            logits = logits / step.number if saved and saved[-1] is logits else logits.div_(step.number)
        elif isinstance(step, Tanh):
            logits = logits.tanh()
            saved.append(logits)
        else:
            logits = logits.to(step.target)
    return (logits.clone() if saved and saved[-1] is logits else logits), saved


def step_back(gradient: torch.Tensor, steps: Sequence[Step], saved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the logits before the steps from that after them, which may be overwritten."""
    remaining = list(saved)
    for step in reversed(steps):
        if isinstance(step, Multiply):
            gradient = gradient.mul_(step.number)
        elif isinstance(step, Divide):
            gradient = gradient.div_(step.number)
        elif isinstance(step, Tanh):
            gradient = torch.ops.aten.tanh_backward(gradient, remaining.pop())
        else:
            gradient = gradient.to(step.source)
    return gradient


def slope(steps: Sequence[Step], saved: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the steps where they gave `saved`, without rounding between them."""
    derivative = torch.ones_like(like)
    remaining = list(saved)
    for step in reversed(steps):
        if isinstance(step, Multiply):
            derivative = derivative * step.number
        elif isinstance(step, Divide):
            derivative = derivative / step.number
        elif isinstance(step, Tanh):
            tanh = remaining.pop().to(like.dtype)
            derivative = derivative * (1 - tanh * tanh)
    return derivative
