"""The tokenizer of a model directory, as transformers loads it."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, first_line
from memascend.formats.field_kinds import TOKENIZER, check_fields
from memascend.formats.json_files import read_json
from memascend.formats.side_files import has_tokenizer
from memascend.formats.transformers_models import explained_code

if TYPE_CHECKING:
    from pathlib import Path

#: Text that a tokenizer of any language, or of proteins, knows a part of.
_PROBE = f"{string.ascii_letters} {string.digits} и 的 न ا"


def load_tokenizer(directory: Path, remedy: str = "give --tokenizer DIR with its files") -> Any:
    """Return the tokenizer of a directory.

    Raises CheckpointError, with the remedy, where there is none, where transformers cannot load it, and for one that
    gives no tokens for text: of files with other names transformers makes an empty one.
    """
    from transformers import AutoTokenizer

    config_file = directory / "tokenizer_config.json"
    if config_file.exists():
        check_fields(read_json(config_file), config_file, TOKENIZER)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        if not has_tokenizer(directory):
            raise CheckpointError(f"{directory} has no tokenizer: {remedy}") from error
        raise CheckpointError(
            explained_code(error, f"the tokenizer in {directory}")
            or f"{directory}: its tokenizer cannot be loaded: {first_line(error)}; {remedy}"
        ) from error
    if not any(character.isalnum() for character in _round_trip(tokenizer)):
        named = "has no tokenizer" if not has_tokenizer(directory) else "holds a tokenizer without a vocabulary"
        raise CheckpointError(f"{directory} {named}: {remedy}")
    return tokenizer


def _round_trip(tokenizer: Any) -> str:
    """Return the letters and digits that are left when they have been tokens."""
    ids = tokenizer(_PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
