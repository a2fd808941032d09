"""Models of the Hugging Face hub by their id, in the place of a directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from memascend.command.exits import note
from memascend.errors import CheckpointError, first_line
from memascend.formats.side_files import SIDE_FILE_SUFFIXES

#: What a run needs of a repository: safetensors, configuration and tokenizer, without code and other formats.
MODEL_FILES = ("*.safetensors", *(f"*{suffix}" for suffix in SIDE_FILE_SUFFIXES))
CONFIG_FILES = ("config.json",)
_LEFT_OUT = ("*/*", "consolidated*")  # folders, and the same weights in another layout
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_directory(given: Path, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return `given`, or where the `files` of the model with that id are, downloaded unless they are there already.

    Raises CheckpointError where it is an id, and cannot be downloaded.
    """
    if given.exists() or not _ID.fullmatch(str(given)):
        return given
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(f"{given} is no directory; as an id of the hub it needs huggingface_hub") from error
    note(f"{given} is no directory: taking it from the Hugging Face hub")
    try:
        return Path(snapshot_download(str(given), allow_patterns=list(files), ignore_patterns=list(_LEFT_OUT)))
    except Exception as error:  # of the network, the hub, its cache or the name
        raise CheckpointError(
            f"{given} is no directory, and cannot be downloaded from the Hugging Face hub: {first_line(error)}"
        ) from error
