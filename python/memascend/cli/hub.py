"""Models of the Hugging Face hub by their id, in the place of a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.cli.errors import note
from memascend.formats.hub import CONFIG_FILES, MODEL_FILES, download, is_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["CONFIG_FILES", "model_directory"]


def model_directory(given: Path, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return `given`, or where the `files` of the model with that id are, downloaded unless they are there already.

    Raises CheckpointError where it is an id, and cannot be downloaded.
    """
    if given.exists() or not is_id(str(given)):
        return given
    note(f"{given} is no directory: taking it from the Hugging Face hub")
    return download(str(given), files)
