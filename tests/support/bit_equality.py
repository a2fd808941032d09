"""Comparing the results of two runs, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether both are the same bits of the same shape and dtype; a NaN is the same as another, -0 is not 0."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        integers = _INTEGERS[one.element_size()]
        if torch.equal(one.view(integers), other.view(integers)):
            return True  # the usual case, in a fraction of the time
    return not _unlike(one, other).any()


def differing(actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Return the names that only one has, or whose values are not the same bits."""
    return [
        *(actual.keys() ^ expected.keys()),
        *(name for name in expected.keys() & actual.keys() if not same(actual[name], expected[name])),
    ]


def difference(ours: Any, theirs: Any, what: str = "") -> str | None:
    """Say where two structures of tensors and other values differ first, or return None."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return None if same(ours, theirs) else f"{what}{_told(ours, theirs)}"
    if type(ours) is not type(theirs):
        return f"{what}: {ours!r:.80} is not {theirs!r:.80}"
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{what}: keys {sorted(map(str, ours.keys() ^ theirs.keys()))[:4]} are in one of them only"
        return _first(difference(ours[key], theirs[key], f"{what}[{key}]") for key in ours)
    if isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return f"{what}: {len(ours)} values are not {len(theirs)}"
        return _first(
            difference(one, other, f"{what}[{index}]")
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True))
        )
    alike = ours == theirs or (ours != ours and theirs != theirs)
    return None if alike else f"{what}: {ours!r:.80} is not {theirs!r:.80}"


def _unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where tensors of the same shape and dtype are not the same bits."""
    if not one.is_floating_point():
        return one != other
    return ~(((one == other) & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan()))


def _told(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f": {ours.dtype} {tuple(ours.shape)} is not {theirs.dtype} {tuple(theirs.shape)}"
    places = _unlike(ours, theirs).nonzero()
    first = tuple(places[0].tolist())
    return f"{list(first)}: {ours[first].item()} is not {theirs[first].item()} ({len(places)} differ)"


def _first(differences: Iterator[str | None]) -> str | None:
    return next((found for found in differences if found is not None), None)
