"""Tables of tokens that begin with another number of rows, with the values that transformers gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable


def resize(model: Any, rows: int, read: Callable[[str, torch.Tensor], None]) -> dict[str, torch.Tensor]:
    """Resize the tables of tokens of a model on the meta device by its own `resize_token_embeddings`.

    Returns the values that the input's and the output's tables, and a bias of the latter, begin with, by the first
    names of the parameters: after the same seed they have the bits of transformers. They are whole in host memory, and
    transformers makes a copy in float32 of one at a time on its way.

    Args:
        model: the model, whose configuration has the new number too afterwards.
        rows: the rows that the tables are to have.
        read: called as `read(name, target)` to fill `target` with the values that the model directory has for a
            parameter.

    Raises ValueError for a number of rows or a model that cannot be resized.
    """
    if rows < 1:
        raise ValueError(f"resize_token_embeddings={rows}: a table has at least one row")
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    try:
        tables = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
        for parameter in {id(p): p for module in tables for p in module.parameters()}.values():
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            read(names[id(parameter)], values)
            _replace(model, parameter, values)
        model.resize_token_embeddings(rows)
    except CheckpointError:
        raise
    except Exception as error:  # models raise several kinds, as does one without tables
        raise ValueError(
            f"resize_token_embeddings={rows}: transformers cannot resize the tables of a {type(model).__name__}: "
            f"{error}"
        ) from error
    made = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    for parameter in made.values():
        _replace(model, parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    return {name: parameter.detach() for name, parameter in made.items()}


def _replace(model: nn.Module, old: nn.Parameter, values: torch.Tensor) -> None:
    """Put a parameter of `values` in the place of another, under all of its names."""
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
