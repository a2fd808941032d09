"""The tokenizer of a model directory, as transformers loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, first_line
from memascend.formats.transformers_models import explained_code

if TYPE_CHECKING:
    from pathlib import Path


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a directory that has one.

    Raises CheckpointError where transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise CheckpointError(
            explained_code(error, f"the tokenizer in {directory}")
            or f"{directory}: its tokenizer cannot be loaded: {first_line(error)}"
        ) from error
