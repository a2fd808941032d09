"""Text to token ids: the tokenizer of a model directory, or on purpose one token per byte."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from memascend.cli.data.chat import Conversations
from memascend.errors import CheckpointError
from memascend.formats.side_files import has_tokenizer
from memascend.formats.tokenizers import load_tokenizer as load

END_OF_DOCUMENT, PADDING = 256, 257  # the ids after the 256 bytes, in a byte-level vocabulary
BYTE_VOCABULARY = 258


class Tokenizer(Protocol):
    """The methods of a tokenizer that training needs: text to ids, ids to text, and the ids around a document."""

    end_of_document: int | None
    beginning: Sequence[int]  # ids that the tokenizer puts before a text by itself
    chat: Conversations | None  # None without a chat template

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a piece of text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with those that have a meaning of their own."""


class ByteTokenizer:
    """One token per UTF-8 byte, for a model that brings no tokenizer."""

    end_of_document: int | None = END_OF_DOCUMENT
    beginning: Sequence[int] = ()
    chat: Conversations | None = None

    def encode(self, text: str) -> Sequence[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that are bytes; others are dropped."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; ids that are no bytes have names."""
        names = {END_OF_DOCUMENT: "<end>", PADDING: "<pad>"}
        parts = groupby(ids, key=lambda token: token if token in names else None)
        return "".join(
            self.decode(list(part)) if name is None else names[name] * len(list(part)) for name, part in parts
        )


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face model directory."""

    def __init__(self, tokenizer: Any, clock: datetime) -> None:
        """Wrap a tokenizer that transformers loaded; `clock` is the time that chat templates write."""
        self._tokenizer = tokenizer
        separator = tokenizer.eos_token_id
        self.end_of_document: int | None = separator if separator is not None else tokenizer.sep_token_id
        first = tokenizer.bos_token_id
        begins = first is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [first]
        self.beginning: Sequence[int] = (first,) if begins else ()
        self.chat = Conversations(tokenizer, clock) if tokenizer.chat_template else None

    def encode(self, text: str) -> Sequence[int]:
        """Token ids without special tokens."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def shown(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(
    directory: Path, vocab_size: int, *, as_bytes: bool = False, clock: datetime | None = None
) -> Tokenizer:
    """Return the tokenizer in a directory, as transformers loads it, or with `as_bytes` one token per byte.

    `clock` is the time that its chat template writes, if it asks for it; None is now.

    A model over bytes alone, of `BYTE_VOCABULARY` tokens, needs no tokenizer. Raises CheckpointError where there is
    none, and for one that gives no tokens for text: of files with other names transformers makes an empty one.
    """
    is_bytes = vocab_size == BYTE_VOCABULARY and not has_tokenizer(directory)
    if as_bytes or is_bytes:
        if vocab_size < BYTE_VOCABULARY:
            raise CheckpointError(
                f"--bytes needs a vocabulary of {BYTE_VOCABULARY} tokens, and that of the model has {vocab_size}"
            )
        return ByteTokenizer()
    tokenizer = load(directory, "give --tokenizer DIR with its files, or --bytes to train on the bytes of the text")
    return HuggingFaceTokenizer(tokenizer, clock or datetime.now())
