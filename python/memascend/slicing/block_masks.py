"""Block masks of PyTorch's flex attention, of some rows of a batch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: By mask: its parts by their first row and the one behind their last. Layers share them, since each part has tensors
#: of its own, which wait for the backward pass.
_parts: WeakKeyDictionary[Any, dict[tuple[int, int], Any]] = WeakKeyDictionary()


def is_block_mask(value: Any) -> bool:
    """Return whether `value` is a block mask of flex attention."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def rows_of_mask(mask: Any) -> int:
    """Return how many rows of a batch a block mask has; one holds for all rows."""
    return len(mask.kv_num_blocks)


def part_of_mask(mask: Any, begin: int, end: int) -> Any:
    """Return the block mask of the rows from `begin` to `end`."""
    parts = _parts.setdefault(mask, {})
    if (begin, end) not in parts:
        part = mask[begin:end]
        part.mask_mod = _from_row(mask.mask_mod, begin, mask.kv_num_blocks.device)
        parts[begin, end] = part
    return parts[begin, end]


def _from_row(mask_mod: Callable[..., Any], begin: int, device: torch.device) -> Callable[..., Any]:
    # Attention that is compiled would be compiled anew for each number, and not for each tensor.
    first = torch.full((), begin, dtype=torch.int32, device=device)

    def of_rows(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_mod(batch + first, head, query, key)

    return of_rows
