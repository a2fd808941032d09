"""Parameters with one value: tied by the configuration, or views of the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def check_shared_memory(model: nn.Module) -> None:
    """Check that no trained parameter shares memory with another parameter or a buffer.

    In memory a step of one changes the other; on the store each has bytes of its own, and they would drift apart. A
    tied parameter, which is one object with several names, is no such case.

    Raises ValueError that names both and says how to tie them.
    """
    #: The end and the name of the last range so far: among all, and among trained parameters.
    last, last_trained = (0, ""), (0, "")
    for first, end, name, trained in sorted(_spans(model)):
        before = last if trained else last_trained
        if first < before[0]:
            raise ValueError(
                f"{before[1]} and {name} share memory without being one parameter: in memory a step of one changes the "
                f"other, on the store it would not. Tie them (module.weight = other.weight assigns the parameter "
                "itself, not its data), or give one a copy (weight.data = weight.data.clone())"
            )
        last = max(last, (end, name))
        last_trained = max(last_trained, (end, name)) if trained else last_trained


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str, bool]]:
    """Yield for each parameter and buffer its first address, the address behind it, its name, and whether it trains."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0:
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                yield (
                    tensor.data_ptr(),
                    tensor.data_ptr() + (last + 1) * tensor.element_size(),
                    name,
                    tensor.requires_grad,
                )


def ties_of(model: Any) -> dict[str, str]:
    """Return the ties of a model's configuration: parameter name -> name of the parameter that it is tied to.

    Both are ordered as transformers ties them. A model that is not transformers' has none.
    """
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    return dict(expanded(all_submodels=True)) if expanded is not None else {}


def untied_names(model: nn.Module) -> list[str]:
    """Return the names of parameters that the configuration ties and that have values of their own all the same."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        target
        for target, source in ties_of(model).items()
        if target in parameters and parameters.get(source) is not parameters[target]
    ]
