"""One document of the data: a text, a prompt with its completion, an instruction with its answer, or a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from memascend.cli.data.turns import listed, turns_of, with_system, with_texts
from memascend.errors import first_line

_TURNS = ("messages", "conversations", "conversation")
#: Fields that are read of a record, beside its text.
FIELDS = (*_TURNS, "prompt", "completion", "tools", "system", "instruction", "input", "output", "history")
#: Fields that tell the use of a record without a text.
PREFERENCE = ("chosen", "rejected")
#: Half a pair of surrogates, as JSON may hold it: an escape, or bytes that Python's parser takes.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
NAMES_SHOWN = 8


class NotARecord(ValueError):
    """Bytes hold no object with something to train on; `is_object` says whether it is one without."""

    def __init__(self, message: str, *, is_object: bool = False) -> None:
        """Take the text that follows the place of the record."""
        super().__init__(message)
        self.is_object = is_object


class Damaged(NotARecord):
    """A record whose text no tokenizer takes."""


@dataclass(frozen=True)
class Text:
    """A text that is trained on as a whole."""

    pieces: Iterator[str]


@dataclass(frozen=True)
class Completion:
    """A prompt, and the text that is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation: turns with `role` and `content`. The assistant's are trained on, from `first` on."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    first: int = 0


@dataclass(frozen=True)
class Instruction:
    """An instruction, its input ("" for none), and the answer, which is trained on: a record of Alpaca."""

    instruction: str
    input: str
    output: str
    system: str | None = None

    def chat(self) -> Chat:
        """Return it as a conversation, for a tokenizer with a chat template."""
        asked = f"{self.instruction}\n{self.input}" if self.input else self.instruction
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": self.output}]
        return Chat(with_system(turns, self.system))

    def completion(self) -> Completion:
        """Return it in Alpaca's own prompt, for a tokenizer without one."""
        about = ", paired with an input that provides further context" if self.input else ""
        begin = self.system or (
            f"Below is an instruction that describes a task{about}. "
            "Write a response that appropriately completes the request."
        )
        parts = [begin, f"### Instruction:\n{self.instruction}"]
        if self.input:
            parts.append(f"### Input:\n{self.input}")
        return Completion("\n\n".join([*parts, "### Response:\n"]), self.output)


#: The result of `read_record`; a text as it is.
Record = str | Completion | Chat | Instruction


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` holds.

    Raises NotARecord for anything else.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # the latter for values that are nested too deeply
        raise NotARecord(f"is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise NotARecord("is no object, so it has no text")
    return value


def read_record(fields: dict[str, Any], text_field: str) -> Record:
    """Return the document of a record: a text, a conversation, a prompt with its completion, or an instruction.

    Raises NotARecord where it has none of them.
    """
    text = fields.get(text_field)
    if isinstance(text, str):
        return text
    turns = turns_of(text)
    tools = listed(fields.get("tools")) or None
    for name in () if turns else _TURNS:
        turns = turns or turns_of(fields.get(name))
    if turns:
        return Chat(_checked(with_system(turns, fields.get("system"))), tools)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    asked, answered = turns_of(prompt), turns_of(completion)
    if asked and answered:
        return Chat(_checked(asked + answered), tools, first=len(asked))
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    return _instruction(fields, text_field)


def _checked(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        return with_texts(turns)
    except ValueError as error:
        raise NotARecord(f"{error}: write a text, or leave the record out", is_object=True) from error


def _instruction(fields: dict[str, Any], text_field: str) -> Instruction:
    instruction, output = fields.get("instruction"), fields.get("output")
    if isinstance(instruction, str) and isinstance(output, str):
        if fields.get("history"):
            raise NotARecord("has a history, which is not read: write its turns as messages", is_object=True)
        about, system = fields.get("input"), fields.get("system")
        return Instruction(instruction, about if isinstance(about, str) else "", output, system or None)
    if set(PREFERENCE) <= fields.keys():
        raise NotARecord(
            "is a preference (chosen, rejected), from which DPOTrainer of memascend.integrations.trl trains; "
            "--text-field chosen trains on that field alone",
            is_object=True,
        )
    if isinstance(fields.get(text_field), (dict, list)):
        kind = "an object" if isinstance(fields[text_field], dict) else "a list"
        raise NotARecord(
            f"has {kind} in field {text_field!r}, and no text: name another with --text-field", is_object=True
        )
    names = ", ".join(map(repr, list(fields)[:NAMES_SHOWN])) + ", ..." * (len(fields) > NAMES_SHOWN)
    raise NotARecord(
        f"has no text in field {text_field!r}: name it with --text-field; nor messages, conversations, prompt and "
        f"completion, or instruction and output. Its fields: {names or 'none'}",
        is_object=True,
    )


def check_characters(raw: bytes, record: Record) -> None:
    """Raise Damaged where a record has half a pair of surrogates, which is no character."""
    if not _HALF.search(raw):
        return
    try:
        for text in _strings(record if isinstance(record, str) else vars(record)):
            text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Damaged(
            f"holds {half}, half a pair of surrogates, which is no character: its text was cut in two there. Remove "
            "it, or write \\ufffd in its place",
            is_object=True,
        ) from error


def other_fields(fields: dict[str, Any], text_field: str) -> str | None:
    """Return the fields of a record with a text that could be meant instead, or None."""
    others = {name: value for name, value in fields.items() if name != text_field}
    if not isinstance(fields.get(text_field), str):
        return None
    for name in _TURNS:
        if turns_of(others.get(name)):
            return name
    for pair in (("prompt", "completion"), ("instruction", "output")):
        if others.keys() >= set(pair):
            return " and ".join(pair)
    return None


def is_blank(record: Record) -> bool:
    """Return whether there is nothing to train on."""
    if isinstance(record, Chat):
        return False
    if isinstance(record, Instruction):
        return not record.output.strip()
    return not (record if isinstance(record, str) else record.completion).strip()


def _strings(value: Any) -> Iterator[str]:
    """Yield every string within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inner: Iterable[Any] = [*value, *value.values()] if isinstance(value, dict) else value
        for one in inner:
            yield from _strings(one)
