"""How transformers finds the documents of a packed sequence: one function of its module `masking_utils`.

With `position_ids` that begin anew, without an attention mask and without a cache, the masks that a model's code asks
for keep documents apart. The function decides by the positions' values, so on tensors without values it is replaced.
Tested with transformers 5.20 to 5.24; where a later version has no such function, no model is said to have boundaries.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = "find_packed_sequence_indices"
#: Types of layers that have a state. MiniMax has them without saying so of its class.
_WITH_STATES = {"linear_attention", "hybrid", "hybrid_sliding"}


@dataclass
class MaskCount:
    """The number of masks that were made from the positions of packed documents."""

    masks: int = 0


@contextmanager
def assumed(positions: torch.Tensor | None) -> Iterator[MaskCount]:
    """Take `positions` for several documents' positions, and count the masks that are made from them; None: no mask."""
    asked = MaskCount()
    try:
        from transformers import masking_utils
    except ImportError:
        masking_utils = None
    replaced: Any = getattr(masking_utils, _NAME, None)
    if positions is None or replaced is None:
        yield asked
        return
    storage = positions.untyped_storage()._cdata

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        # A model may make masks from positions of its own.
        if position_ids.untyped_storage()._cdata != storage:
            return replaced(position_ids)
        asked.masks += 1
        return torch.zeros_like(position_ids).cumsum(-1)

    setattr(masking_utils, _NAME, find)
    try:
        yield asked
    finally:
        setattr(masking_utils, _NAME, replaced)


def is_stateful(model: Any) -> bool:
    """Return whether a model of transformers passes a state from token to token, as Mamba does."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return not _WITH_STATES.isdisjoint(types) or any(
        getattr(module, "_is_stateful", False) for module in model.modules()
    )
