"""Models of the Hugging Face hub: downloads the files that a run needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Files of a repository: safetensors, configuration and tokenizer, without code and other formats.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CONFIG_FILES = ("config.json",)
_LEFT_OUT = ("*/*", "consolidated*")  # folders, and the same weights in another layout
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_id(name: str) -> bool:
    """Return whether `name` has the form of a repository's id, organisation/name."""
    return _ID.fullmatch(name) is not None


def download(name: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return the directory with the `files` of a model of the hub, downloaded unless they are there already.

    Raises CheckpointError where they cannot be downloaded, or huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(f"{name} is no directory; as an id of the hub it needs huggingface_hub") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=list(_LEFT_OUT)))
    except Exception as error:  # of the network, the hub, its cache or the name
        raise CheckpointError(
            f"{name} is no directory, and cannot be downloaded from the Hugging Face hub: {first_line(error)}"
        ) from error
