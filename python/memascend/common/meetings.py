"""Preparations of other libraries for tensors on SSD, to be made before there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_meetings: list[Callable[[], None]] = []


def meet_libraries_by(meet: Callable[[], None]) -> None:
    """Have `meet` called before a model is offloaded."""
    _meetings.append(meet)


def meet_libraries() -> None:
    """Prepare the libraries that read at the addresses of tensors."""
    for meet in _meetings:
        meet()
