"""Frozen weights that are quantised as the model is opened: the choice of them.

As in QLoRA they are the weights of linear layers within repeated layers, and there also experts that lie in one
parameter. Embeddings, heads, norms, biases and routers stay as they are. A unit that has such weights lies in no store:
its bytes are in a file beside it (`memascend.session.quantised_files`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from memascend.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend.layout.units import ParameterEntry, Unit


def quantise_units(model: nn.Module, units: Sequence[Unit], bits: int) -> None:
    """Mark the units, and their entries, whose weights are quantised to `bits`.

    Raises DataError for a model that has none.
    """
    weights = set(_weights(model))
    for unit in units:
        if not unit.repeated:
            continue
        places = [place for place in unit.places if place.parameter in weights and _can_be(place)]
        if places:
            unit.bits, unit.quantised = bits, frozenset(places)
    if not any(unit.bits for unit in units):
        linear = [place for unit in units if unit.repeated for place in unit.places if place.parameter in weights]
        lacks, remedy = "no linear weights in repeated layers", ""
        if linear:
            lacks, remedy = f"no such weights in bfloat16 ({linear[0].name})", "give dtype='bfloat16', or "
        raise DataError(
            f"{type(model).__name__} has {lacks}, which are what frozen_bits={bits} (--base-bits) quantises: {remedy}"
            "leave it out"
        )


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of linear layers but the head, and experts that lie in one parameter."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = set(output.parameters()) if isinstance(output, nn.Module) else set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight not in heads:
            yield module.weight
        elif "experts" in name:
            yield from (value for value in module._parameters.values() if value is not None and value.ndim == 3)


def _can_be(place: ParameterEntry) -> bool:
    """Return whether the kernels dequantise a weight: to bfloat16, two numbers of four bits at a time."""
    return place.dtype == torch.bfloat16 and place.numel % 2 == 0
