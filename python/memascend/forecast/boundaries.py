"""Whether a model keeps the documents of a packed sequence apart, if their positions begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.forecast.simulation import simulate_step
from memascend.forecast.workload import Workload
from memascend.formats.packed_masks import is_stateful
from memascend.formats.weights import empty_model_of

if TYPE_CHECKING:
    from pathlib import Path

#: Tokens of the step that is tried.
TOKENS = 8


def why_without_boundaries(config: Any, directory: Path) -> str | None:
    """Return why a model of a configuration lets packed documents see each other, or None where it keeps them apart.

    Its code is run on tensors without memory: it keeps them apart where it has transformers derive masks from position
    ids, and where no token reaches another but by attention. tests/forecast/test_boundaries.py compares this with the
    logits of the models.
    """
    model = empty_model_of(config, directory, torch.float32)
    kind = f"a {config.model_type} model"
    if is_stateful(model):
        return f"{kind} has a state that passes from each token to the next"
    if any(isinstance(module, (nn.Conv1d, nn.RNNBase)) for module in model.modules()):
        return f"{kind} has convolutions over tokens"
    step = simulate_step(config, directory, torch.float32, Workload(TOKENS, 1, 1, boundaries=True), in_memory=True)
    if step is None or not step.has_boundaries:
        return f"the attention of {kind} takes no boundaries from position ids"
    return None
