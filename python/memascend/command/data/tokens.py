"""Text to token ids: the tokenizer of a model directory, or one token per byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from memascend.command.data.chat import Conversations
from memascend.errors import CheckpointError, first_line
from memascend.formats.side_files import has_tokenizer
from memascend.formats.transformers_models import explained_code

END_OF_DOCUMENT, PADDING = 256, 257  # the ids after the 256 bytes, in a byte-level vocabulary
BYTE_VOCABULARY = 258


class Tokenizer(Protocol):
    """What training needs of a tokenizer: text to ids, ids to text, and the ids around a document."""

    end_of_document: int | None
    beginning: Sequence[int]  # what the tokenizer puts before a text by itself
    chat: Conversations | None  # None without a chat template

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a piece of text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class ByteTokenizer:
    """One token per UTF-8 byte, for a model that brings no tokenizer."""

    end_of_document: int | None = END_OF_DOCUMENT
    beginning: Sequence[int] = ()
    chat: Conversations | None = None

    def encode(self, text: str) -> Sequence[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids that are bytes; others are dropped."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face model directory."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer that transformers loaded."""
        self._tokenizer = tokenizer
        separator = tokenizer.eos_token_id
        self.end_of_document: int | None = separator if separator is not None else tokenizer.sep_token_id
        first = tokenizer.bos_token_id
        begins = first is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [first]
        self.beginning: Sequence[int] = (first,) if begins else ()
        self.chat = Conversations(tokenizer) if tokenizer.chat_template else None

    def encode(self, text: str) -> Sequence[int]:
        """Token ids without special tokens."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(model_dir: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in `model_dir`, or one token per byte where it has none."""
    if not has_tokenizer(model_dir):
        if vocab_size < BYTE_VOCABULARY:
            raise CheckpointError(
                f"{model_dir} has no tokenizer, and its vocabulary of {vocab_size} is too small for bytes "
                f"(needs {BYTE_VOCABULARY}): put the model's tokenizer files beside config.json"
            )
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise CheckpointError(
            explained_code(error, f"the tokenizer in {model_dir}")
            or f"{model_dir}: its tokenizer cannot be loaded: {first_line(error)}"
        ) from error
    return HuggingFaceTokenizer(tokenizer)
