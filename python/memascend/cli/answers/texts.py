"""Prompts to token ids, and tokens to text, for a model with a tokenizer or one over bytes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from memascend.cli.data import ByteTokenizer
from memascend.cli.data.turns import turns_of, with_texts
from memascend.errors import DataError, first_line
from memascend.formats.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Files whose lines are parts of other things.
_TABLES = (".json", ".csv", ".tsv", ".parquet", ".arrow")
#: A text, or the messages of a conversation so far.
Prompt = str | list[dict[str, Any]]


class Texts:
    """The input and output of a model, as text."""

    def __init__(self, directory: Path | None, vocabulary: int) -> None:
        """Take the tokenizer in `directory`, and the tokens of the model; None is one token for each byte."""
        self._vocabulary = vocabulary
        self._bytes = ByteTokenizer() if directory is None else None
        self._tokenizer = None if directory is None else load_tokenizer(directory)
        #: Whether prompts can be turns of a conversation.
        self.chats = self._tokenizer is not None and bool(self._tokenizer.chat_template)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, as far as the tokenizer says."""
        end = self._tokenizer.eos_token_id if self._bytes is None else self._bytes.end_of_document  # type: ignore[union-attr]
        return [] if end is None else [end]

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt: of a text as it is, of messages with the beginning of the model's turn.

        Raises DataError for messages that cannot be rendered.
        """
        if isinstance(prompt, str):
            if self._bytes is not None:
                return list(self._bytes.encode(prompt))
            return self._known(self._tokenizer(prompt)["input_ids"])  # type: ignore[misc]
        if not self.chats:
            raise DataError("a prompt has messages, but the model's tokenizer has no chat template: give texts")
        try:
            applied = self._tokenizer.apply_chat_template(  # type: ignore[union-attr]
                prompt, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # templates raise errors of any kind
            raise DataError(f"the chat template cannot render a prompt: {first_line(error)}") from error
        return self._known(applied["input_ids"])

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of a text.

        Raises DataError for one that the model does not have.
        """
        if (last := max(ids, default=0)) >= self._vocabulary:
            raise DataError(
                f"the tokenizer gives token {last}, but the model's vocabulary ends at {self._vocabulary - 1}: give "
                "--tokenizer DIR with the one that the model was trained with"
            )
        return list(ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, without those that have a meaning of their own."""
        if self._bytes is not None:
            return self._bytes.decode(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)  # type: ignore[union-attr]


def read_prompts(path: Path, *, as_messages: bool) -> list[Prompt]:
    """Return the prompts of a file: its lines, or in a .jsonl file `prompt` or `messages` of each record.

    Args:
        path: the file; "-" is standard input.
        as_messages: whether a text is a user's turn in a conversation, instead of one that the model continues.

    Raises DataError for a file that cannot be read, or has no prompts.
    """
    kind = path.suffix.lower()
    if kind in _TABLES:
        raise DataError(
            f"--prompts {path} is a table, whose lines are no prompts: write it as records in a .jsonl file"
        )
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
        text.encode()  # Standard input may have let bytes through that are no text.
    except (OSError, UnicodeError) as error:
        raise DataError(f"--prompts {path} cannot be read as text in UTF-8: {first_line(error)}") from error
    # Not splitlines(): a text, and a string in JSON, may hold other separators.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise DataError(f"--prompts {path} holds no prompts: write one a line")
    prompts: list[Prompt] = [line for _, line in lines]
    if kind == ".jsonl":
        prompts = [_of_record(path, number, line) for number, line in lines]
    if not as_messages:
        return prompts
    return [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]


def _of_record(path: Path, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
        found = record if isinstance(record, str) else record.get("messages", record.get("prompt"))
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"--prompts {path}, line {number} has half of a character (\\ud800 to \\udfff)") from error
    except (ValueError, AttributeError, RecursionError):
        found = None
    if isinstance(found, str):
        return found
    if turns := turns_of(found):
        try:
            return with_texts(turns)
        except ValueError as error:
            raise DataError(f"--prompts {path}, line {number} {error}: write a text, or leave the line out") from error
    raise DataError(f'--prompts {path}, line {number}: neither {{"prompt": "..."}} nor {{"messages": [...]}}')
