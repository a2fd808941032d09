"""Comparing what two runs have computed, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are the same bits of the same shape and dtype; a NaN is the same as another, -0 is not 0."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    alike = (one == other) & (one.signbit() == other.signbit())
    return bool((alike | (one.isnan() & other.isnan())).all())


def differing(actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> list[str]:
    """The names that only one has, or whose values are not the same bits."""
    return [
        *(actual.keys() ^ expected.keys()),
        *(name for name in expected.keys() & actual.keys() if not same(actual[name], expected[name])),
    ]
