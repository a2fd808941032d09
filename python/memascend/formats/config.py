"""The configuration of a Hugging Face model: of a causal language model, or a CheckpointError that names its kind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError
from memascend.formats.adapters import is_adapter
from memascend.formats.json_files import read_json
from memascend.formats.quantised.forms import check_form, form_of
from memascend.formats.transformers_models import is_causal, read_config, why_not_trained_causally
from memascend.formats.weight_files import weights_dtype

if TYPE_CHECKING:
    from pathlib import Path

#: A model's address, as a path, which has no double slashes.
_ADDRESS = re.compile(r"(?:https?:/(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/)(?P<id>[\w.-]+/[\w.-]+)")

#: The remedy for a model of another kind.
INSTEAD = (
    "memascend finetune, chat and generate take causal language models; for others write the loop with the Python API "
    "(memascend.from_pretrained takes any model)"
)


def load_config(model_dir: Path, dequantize: bool = False) -> Any:
    """Return the transformers configuration of the causal language model in `model_dir`, which holds weights too.

    Raises CheckpointError where there is none, or the weights are quantised, unless they can be read with `dequantize`.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"MODEL_DIR {model_dir} is not a directory{_of_hub(model_dir)}")
    config_file = _config_in(model_dir)
    _check_is_config(config_file)
    check_form(form_of(model_dir), model_dir, dequantize)
    if not any(model_dir.glob("*.safetensors")):
        raise CheckpointError(f"{model_dir} has no *.safetensors: only safetensors weights are read")
    config = _causal_config(config_file, named=model_dir)
    problem = why_not_trained_causally(config)
    if problem is not None:
        raise CheckpointError(f"{model_dir} holds {problem}: {INSTEAD}")
    return config


def load_bare_config(path: Path) -> Any:
    """Return the same without weights: of a model directory, or of a configuration file by itself.

    Weights may be quantised, in a form that is read.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist: give a model directory, or the path of a config.json{_of_hub(path)}"
        )
    config_file = _config_in(path) if path.is_dir() else path
    _check_is_config(config_file)
    check_form(form_of(path), path, dequantize=True)
    return _causal_config(config_file, named=path)


def _config_in(model_dir: Path) -> Path:
    config_file = model_dir / "config.json"
    if is_adapter(model_dir):
        raise CheckpointError(
            f"{model_dir} holds adapters, and no model: `memascend export {model_dir} --out OUT` merges them into "
            "theirs, and memascend chat and generate take them as they are"
        )
    if not config_file.is_file():
        raise CheckpointError(f"{model_dir} has no config.json: MODEL_DIR is a Hugging Face model directory")
    return config_file


def _of_hub(path: Path) -> str:
    """Return a hint for a name without a directory, which may have been meant as a model of the hub."""
    if address := _ADDRESS.match(str(path)):
        return f"; a model of the hub is named without its address: {address['id']}"
    return "" if len(path.parts) > 1 else f"; a model of the hub is named with its organisation, as in ORG/{path.name}"


def _check_is_config(config_file: Path) -> None:
    described = read_json(config_file)
    if not isinstance(described, dict) or "model_type" not in described:
        raise CheckpointError(f"{config_file} names no model_type: it is not a transformers configuration")


def _causal_config(config_file: Path, named: Path) -> Any:
    config = read_config(config_file, named)
    if not is_causal(config):
        raise CheckpointError(
            f"{named} holds a {config.model_type} model, which is no causal language model: {INSTEAD}"
        )
    return config


def limits(config: Any) -> tuple[int, int | None]:
    """Vocabulary size, and the number of positions where the model has a limit."""
    text_config = config.get_text_config()
    return text_config.vocab_size, getattr(text_config, "max_position_embeddings", None)


def checkpoint_dtype(path: Path, config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint: that which its configuration names, or else most of its weights are in.

    A configuration that names none, without weights beside it, is of float32, as transformers takes it, or of bfloat16
    where it says that weights are quantised.
    """
    for described in (config, config.get_text_config()):
        if isinstance(named := getattr(described, "dtype", None), torch.dtype):
            return named
    if form_of(path) is not None:
        return torch.bfloat16
    return (weights_dtype(path) if path.is_dir() else None) or torch.float32
