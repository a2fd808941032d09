"""One call of a layer, cut along the rows of the batch."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from memascend.autograd.kv_caches import copies_of, is_cache, is_state
from memascend.slicing.block_masks import is_block_mask, part_of_mask, rows_of_mask

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

#: Arguments that are the same for each row, beside tensors, states and block masks.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Generator, Enum, slice)


class Call:
    """The arguments of one call of a layer. Tensors and block masks with as many rows as the batch are cut."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], rows: int) -> None:
        """Find the tensors to cut in the arguments of a batch of `rows`."""
        self.rows = rows
        self.leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_one)
        self.cut = [
            index
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)
        ]
        self._masks = [
            index for index, leaf in enumerate(self.leaves) if is_block_mask(leaf) and rows_of_mask(leaf) == rows
        ]
        self._states = [index for index, leaf in enumerate(self.leaves) if is_state(leaf)]
        values = pytree.tree_leaves([*args, *kwargs.values()], is_leaf=lambda v: _is_one(v) or self._lists(v))
        self._has_list = any(map(self._lists, values))

    def _lists(self, value: Any) -> bool:
        """Return whether a value is a list with a constant for each row, which are not all alike."""
        return (
            isinstance(value, list | tuple)
            and len(value) == self.rows
            and _is_constant(value)
            and any(entry != value[0] for entry in value)
        )

    @property
    def uncut(self) -> str | None:
        """Why slices cannot be made of the arguments: objects that may have a value for each row; None if they can.

        A trial would not find these out: the first rows may have the same values.
        """
        if self._has_list:
            return f"it is called with a list of {self.rows} entries, which may be one for each row"
        for leaf in self.leaves:
            if is_block_mask(leaf):
                if rows_of_mask(leaf) not in (1, self.rows):
                    return f"it is called with a block mask of {rows_of_mask(leaf)} rows"
            elif not (isinstance(leaf, torch.Tensor) or is_state(leaf) or callable(leaf) or _is_constant(leaf)):
                return f"it is called with a {type(leaf).__name__}, which may have a value for each row"
        return None

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
        cut = {*self.cut, *self._masks}
        described = (
            ("cut" if index in cut else "tensor")
            if isinstance(leaf, torch.Tensor) or is_block_mask(leaf)
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
        begins = range(0, self.rows, rows)
        for index in self._masks:
            mask = self.leaves[index]
            parts[index] = [part_of_mask(mask, begin, min(begin + rows, self.rows)) for begin in begins]
        return [
            [parts[index][number] if index in parts else leaf for index, leaf in enumerate(self.leaves)]
            for number in range(len(begins))
        ]

    def some(self, begin: int, end: int) -> list[Any]:
        """Return the leaves of the rows from `begin` to `end`."""
        leaves = list(self.leaves)
        for index in self.cut:
            leaves[index] = leaves[index][begin:end]
        for index in self._masks:
            leaves[index] = part_of_mask(leaves[index], begin, end)
        return leaves

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


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, list | tuple) and all(map(_is_constant, value)))


def _is_one(value: Any) -> bool:
    return is_state(value) or is_block_mask(value)


def _is_whole(value: Any) -> bool:
    return is_state(value) and not isinstance(value, dict)  # transformers' outputs are dictionaries
