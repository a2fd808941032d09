"""`frozen_bits`: frozen weights that are quantised as a model is opened, and what it does not go together with."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from memascend.errors import DataError
from memascend.hardware.drives import is_device
from memascend.layout.bits import BITS, PUBLISHED
from memascend.session.runtime import store_paths

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memascend.layout.units import ParameterEntry
    from memascend.options import OffloadOptions, StorePaths
    from memascend.ranks.group import Ranks


def check_bits(frozen_bits: int | str | None, durability: str, keep_store: bool | str | None) -> None:
    """Raise ValueError for bits that there are none of, or for a store that would keep such weights."""
    if frozen_bits not in (None, *BITS, PUBLISHED):
        raise ValueError(f"frozen_bits={frozen_bits!r} is not one of None, {', '.join(map(repr, (*BITS, PUBLISHED)))}")
    if frozen_bits is not None and (keep_store is True or durability not in ("auto", "none")):
        raise ValueError(
            "with frozen_bits the layers do not lie in the store, which has nothing that could be kept: leave out "
            "durability and keep_store, or frozen_bits"
        )


def check_beside(options: OffloadOptions, ranks: Ranks | None, frozen_bits: int | str) -> None:
    """Raise DataError, a ValueError, where quantised weights cannot lie beside the store."""
    if ranks is not None:
        raise DataError("frozen_bits does not work yet where a store is divided over ranks: leave it out")
    if options.experts == "pieces":
        raise DataError("frozen_bits does not work yet with experts='pieces': leave one of them out")
    for path in store_paths(cast("StorePaths", options.store)) if frozen_bits != PUBLISHED else ():
        if is_device(path):
            raise DataError(
                f"frozen_bits puts the weights in files, and {path} is a raw block device: give a directory as store"
            )


def check_all_frozen(model: nn.Module, frozen_bits: int) -> None:
    """Raise ValueError where a parameter of the model is trained."""
    trained = next((name for name, parameter in model.named_parameters() if parameter.requires_grad), None)
    if trained is not None:
        raise ValueError(
            f"frozen_bits={frozen_bits} quantises a model that is not trained, and {trained} is: give "
            "model.requires_grad_(False) before memascend.offload, and add adapters after it"
        )


def read_part(place: ParameterEntry, target: torch.Tensor, first: int) -> None:
    """Fill `target`, of one dimension, with the elements of a parameter in memory from number `first` on."""
    target.copy_(place.parameter.data.view(-1)[first : first + target.numel()])
