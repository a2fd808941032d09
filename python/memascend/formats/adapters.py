"""Directories of adapters, as PEFT writes them: recognised, and the model that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import CheckpointError
from memascend.formats.hub import download, is_id
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

#: PEFT's name for the file that describes a directory's adapters.
CONFIG_NAME = "adapter_config.json"


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds adapters and no model."""
    return (directory / CONFIG_NAME).is_file() and not (directory / "config.json").is_file()


def model_of(directory: Path, tell: Callable[[str], None]) -> Path:
    """Return the directory of the model that adapters belong to, which is downloaded where it is a model of the hub.

    Raises CheckpointError where it is not known, is gone or cannot be downloaded.
    """
    config = read_json(directory / CONFIG_NAME)
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{directory / CONFIG_NAME} names no model (base_model_name_or_path)")
    if Path(named).is_dir():
        return Path(named)
    if not Path(named).is_absolute() and is_id(named):
        tell(f"{directory} holds adapters of {named}: taking it from the Hugging Face hub")
        return download(named)
    raise CheckpointError(
        f"{directory} holds adapters of {named}, which is gone: put the model there, or its present place into "
        f"base_model_name_or_path of {CONFIG_NAME}"
    )
