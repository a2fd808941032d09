"""A model directory opened as a model of another task: its class, and the weights that the directory does not hold.

The modules of a new head alone are made real, one after the other, and `_init_weights` draws the same numbers from
PyTorch's generator as `from_pretrained` of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.options import OPTION_NAMES, TUNING_NAMES, meant

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

#: Options that any configuration of transformers takes, even without a value.
_ALWAYS = ("num_labels", "id2label", "label2id", "problem_type")


def change_config(config: Any, model_class: str | type | None, changes: Mapping[str, Any]) -> None:
    """Have a configuration make a model of `model_class`, with some of its values changed.

    Args:
        model_class: a class of transformers or its name, an auto class too (`AutoModelForSequenceClassification`).
        changes: values by the names of the configuration, and `attn_implementation`.

    Raises TypeError for a name that the configuration does not have, ValueError for a class that is none for it.
    """
    for name, value in changes.items():
        if name == "attn_implementation":
            if "/" in str(value):
                raise ValueError(f"attn_implementation={value!r} is code of the hub, and memascend runs none")
            config._attn_implementation = value
        elif name in _ALWAYS or hasattr(config, name):
            setattr(config, name, value)
        else:
            raise TypeError(
                f"from_pretrained has no option {name!r}, and neither has the configuration of a {config.model_type} "
                f"model{meant(name, (*OPTION_NAMES, *TUNING_NAMES, *config.to_dict()))}"
            )
    if model_class is not None:
        config.architectures = [_class_of(model_class, config)]


def _class_of(model_class: str | type, config: Any) -> str:
    """Return the name of the class of transformers that `model_class` stands for."""
    import transformers

    named = model_class if isinstance(model_class, str) else model_class.__name__
    found: Any = getattr(transformers, named, None)
    if found is None or (not isinstance(model_class, str) and found is not model_class):
        raise ValueError(f"model_class={named} is no class of transformers: make the model, and call memascend.offload")
    mapping = getattr(found, "_model_mapping", None)
    if mapping is None:
        return named
    if type(config) not in mapping:
        raise ValueError(f"{named} has no class for a {config.model_type} model: give another model_class")
    classes = mapping[type(config)]
    return str((classes[0] if isinstance(classes, tuple) else classes).__name__)


def is_of_head(model: Any, name: str) -> bool:
    """Return whether a parameter belongs to a task's head, and not to the model that all tasks share."""
    prefix = getattr(model, "base_model_prefix", "")
    return bool(prefix) and hasattr(model, prefix) and not name.startswith(f"{prefix}.")


def initial_values(model: Any, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the values that transformers begins the parameters `names` of a model on the meta device with.

    They are drawn from PyTorch's generator, in the order in which `from_pretrained` of transformers draws missing
    weights: the same seed gives the same bits.
    """
    values: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = {name: f"{prefix}.{name}" if prefix else name for name in module._parameters}
        wanted = {name: whole for name, whole in own.items() if whole in names}
        if not wanted:
            continue
        absent = {name: module._parameters[name] for name in wanted}
        for name, parameter in absent.items():
            assert parameter is not None
            module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        with torch.no_grad():
            model._init_weights(module)
        values |= {wanted[name]: module._parameters[name].detach() for name in wanted}
        module._parameters.update(absent)
    return values
