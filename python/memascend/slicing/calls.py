"""One call of a layer, cut along the rows of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memascend.autograd.kv_caches import copies_of, is_cache, is_state

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Call:
    """The arguments of one call of a layer. Tensors with as many rows as the batch are cut."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], rows: int) -> None:
        """Find the tensors to cut in the arguments of a batch of `rows`."""
        self.rows = rows
        self.leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=is_state)
        self.cut = [
            index
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)
        ]
        self._states = [index for index, leaf in enumerate(self.leaves) if is_state(leaf)]

    @property
    def has_cache(self) -> bool:
        """Whether a cache of transformers is among the arguments."""
        return any(is_cache(self.leaves[index]) for index in self._states)

    @property
    def times(self) -> int:
        """How many rows the first tensor, the hidden states, has for each of the batch's; 0 if it is cut otherwise."""
        first = next((leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)), None)
        rows = 0 if first is None or not first.ndim else first.shape[0]
        return 0 if rows % self.rows else rows // self.rows

    def kind(self) -> Hashable:
        """Return a key that calls which are cut alike share, whatever the sizes of their tensors."""
        cut = set(self.cut)
        described = (
            ("cut" if index in cut else "tensor")
            if isinstance(leaf, torch.Tensor)
            else leaf
            if isinstance(leaf, bool | str)
            else type(leaf)
            for index, leaf in enumerate(self.leaves)
        )
        return repr(self._structure), tuple(described)

    def split(self, rows: int) -> list[list[Any]]:
        """Return the leaves of each slice of at most `rows`, in the order of the batch.

        A split is one node of the graph, which puts the gradients of the slices side by side.
        """
        parts = {index: self.leaves[index].split(rows) for index in self.cut}
        count = -(-self.rows // rows)
        return [
            [parts[index][number] if index in parts else leaf for index, leaf in enumerate(self.leaves)]
            for number in range(count)
        ]

    def some(self, begin: int, end: int) -> list[Any]:
        """Return the leaves of the rows from `begin` to `end`."""
        cut = set(self.cut)
        return [leaf[begin:end] if index in cut else leaf for index, leaf in enumerate(self.leaves)]

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Return (args, kwargs) of leaves. Each slice has caches of its own, as each micro-batch would have."""
        leaves = list(leaves)
        copied = copies_of([leaves[index] for index in self._states])
        for index, state in zip(self._states, copied, strict=True):
            leaves[index] = state
        return pytree.tree_unflatten(leaves, self._structure)


class Outputs(NamedTuple):
    """The result of one call of a layer, and the values that transformers has collected of it."""

    leaves: list[Any]
    structure: Any

    @staticmethod
    def of(result: Any, collected: list[Any]) -> Outputs:
        """Flatten a result, and append the collected values."""
        leaves, structure = pytree.tree_flatten(result, is_leaf=_is_whole)
        return Outputs([*leaves, *collected], structure)


def _is_whole(value: Any) -> bool:
    return is_state(value) and not isinstance(value, dict)  # transformers' outputs are dictionaries
