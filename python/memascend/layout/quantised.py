"""Models in memory whose weights are quantised, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def check_not_quantised(model: nn.Module) -> None:
    """Raise ValueError for a model with a quantised weight: integers, or floating point of one byte."""
    weights: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    weights += [(name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "qweight"]
    for name, weight in weights:
        if weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
            continue
        described = getattr(getattr(model, "config", None), "quantization_config", None)
        method = (
            described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", "")
        )
        form = f" of {getattr(method, 'value', method)}" if method else ""
        raise ValueError(
            f"{name} has dtype {str(weight.dtype).removeprefix('torch.')}: it is a quantised weight{form}, and "
            "memascend trains floating point of 16 and 32 bits. Give the model's directory to "
            "memascend.from_pretrained(..., dequantize=True), or call model.dequantize() first"
        )
