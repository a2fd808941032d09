"""The configuration of a Hugging Face model: of a causal language model, or a CheckpointError that says what it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from pathlib import Path


def load_config(model_dir: Path) -> Any:
    """The transformers configuration of the causal language model in `model_dir`, which holds weights too."""
    if not model_dir.is_dir():
        raise CheckpointError(f"MODEL_DIR {model_dir} is not a directory")
    config_file = _config_in(model_dir)
    model_type = _model_type(config_file)
    if not any(model_dir.glob("*.safetensors")):
        raise CheckpointError(f"{model_dir} has no *.safetensors: only safetensors weights are read")
    return _causal_config(config_file, model_type, named=model_dir)


def load_bare_config(path: Path) -> Any:
    """The same without weights: of a model directory, or of a configuration file by itself."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a model directory, or the path of a config.json")
    config_file = _config_in(path) if path.is_dir() else path
    return _causal_config(config_file, _model_type(config_file), named=path)


def _config_in(model_dir: Path) -> Path:
    config_file = model_dir / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{model_dir} has no config.json: MODEL_DIR is a Hugging Face model directory")
    return config_file


def _model_type(config_file: Path) -> str:
    try:
        config = json.loads(config_file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config_file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError(f"{config_file} names no model_type: it is not a transformers configuration")
    return config["model_type"]


def _causal_config(config_file: Path, model_type: str, named: Path) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(named, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a configuration it does not know
        raise CheckpointError(
            f"{config_file}: transformers cannot use it (model_type {model_type!r}): {first_line(error)}"
        ) from error
    if loaded.is_encoder_decoder or type(loaded) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{named} holds a {model_type} model, which is no causal language model: "
            "memascend finetune trains those; for others write the loop with the Python API"
        )
    return loaded


def limits(config: Any) -> tuple[int, int | None]:
    """Vocabulary size, and the number of positions where the model has a limit."""
    text_config = config.get_text_config()
    return text_config.vocab_size, getattr(text_config, "max_position_embeddings", None)
