"""Model directories for a run without a store: one loaded whole, its gradients rounded as in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memascend.errors import CheckpointError, first_line
from memascend.formats.json_files import read_json
from memascend.formats.transformers_models import explained_code
from memascend.formats.weight_files import INDEX_NAME


def load_in_memory(model_dir: Path, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Load a model whole into memory, for a run without a store."""
    import transformers
    from safetensors import SafetensorError

    for name in (INDEX_NAME, "generation_config.json"):
        if (model_dir / name).exists():
            read_json(model_dir / name)
    named = (config.architectures or [""])[0]
    model_class = getattr(transformers, named, transformers.AutoModelForCausalLM)
    try:
        model, loading = model_class.from_pretrained(
            model_dir,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the error below names them
            trust_remote_code=False,
        )
    except (SafetensorError, RuntimeError, ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        files = ", ".join(sorted(file.name for file in model_dir.glob("*.safetensors")))
        raise CheckpointError(
            explained_code(error, model_dir) or f"{model_dir} ({files}) cannot be loaded: {first_line(error)}"
        ) from error
    lacking = sorted(loading["missing_keys"]) + sorted(str(key[0]) for key in loading["mismatched_keys"])
    if lacking:
        raise CheckpointError(
            f"{model_dir}: {len(lacking)} tensors are missing or of another shape than config.json says: "
            f"{', '.join(lacking[:3])}"
        )
    return model


def round_gradients(model: torch.nn.Module) -> None:
    """Have a model in memory round its gradients to bfloat16 after each backward pass, as an offloaded one does."""

    def round_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(round_gradient)
