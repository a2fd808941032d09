"""Checks of optimizer options. Errors have the same type and words as in `torch.optim`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def number(name: str, value: float | torch.Tensor) -> float:
    """Return an option that may be a tensor of one element as a number."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element")
    return float(value)


def check_learning_rate(lr: float | torch.Tensor, foreach: bool | None = None) -> None:
    """Raise ValueError unless `lr` is a number from 0 up, or a tensor of one."""
    if isinstance(lr, torch.Tensor) and foreach:
        raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True")
    if not 0.0 <= number("lr", lr) < math.inf:
        raise ValueError(f"Invalid learning rate: {lr} (lr must be a number from 0 up)")


def check_from_zero(label: str, name: str, value: float) -> None:
    """Raise ValueError unless `value` is a number from 0 up; `label` is the option's name in PyTorch's message."""
    if not 0.0 <= float(value) < math.inf:
        raise ValueError(f"Invalid {label} value: {value} ({name} must be a number from 0 up)")


def check_betas(betas: Sequence[float | torch.Tensor], foreach: bool | None = None) -> None:
    """Raise ValueError unless both are numbers from 0 to below 1, or tensors of one."""
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {tuple(betas)}: there are two")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) and foreach:
            raise ValueError(f"betas[{index}] as a Tensor is not supported for capturable=False and foreach=True")
        if not 0.0 <= number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta} (betas must be from 0 to below 1)")
    if len({isinstance(beta, torch.Tensor) for beta in betas}) != 1:
        raise ValueError("betas must be either both floats or both Tensors")
