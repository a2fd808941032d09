"""Values that transformers collects within layers while a model runs: attentions, the logits of routers."""

from __future__ import annotations

import sys
from typing import Any


def _lists() -> dict[str, list[Any]]:
    """Return the lists that the present call of a model fills, by their names."""
    module: Any = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(module, "_active_collector", None)
    lists = (active.get() if active is not None else None) or {}
    return {name: values for name, values in lists.items() if isinstance(values, list)}


def collected_kinds() -> tuple[str, ...]:
    """Return the names of the values that are collected now."""
    return tuple(_lists())


class Collected:
    """Collects the values of a layer that runs several times where the model means one call."""

    def __init__(self) -> None:
        """Begin before the layer's first call."""
        self._lists = list(_lists().values())
        self._before = [len(values) for values in self._lists]
        #: For each value that a call has added, the list that it was added to.
        self._targets: list[list[Any]] = []

    def take(self) -> list[Any]:
        """Remove the values that one call has added from the lists, and return them."""
        taken: list[Any] = []
        self._targets = []
        for values, before in zip(self._lists, self._before, strict=True):
            taken += values[before:]
            self._targets += [values] * (len(values) - before)
            del values[before:]
        return taken

    def add(self, joined: list[Any]) -> None:
        """Add, for each value that the last call had added, one value made from all calls."""
        for values, value in zip(self._targets, joined, strict=True):
            values.append(value)
