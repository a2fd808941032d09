"""One document of the data: a text, a prompt with its completion, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from memascend.errors import first_line

#: Fields that are read of a record, beside that of its text.
FIELDS = ("messages", "prompt", "completion", "tools")


class NotARecord(ValueError):
    """Bytes hold no object with something to train on; `is_object` says whether it is one without."""

    def __init__(self, message: str, *, is_object: bool = False) -> None:
        """Take what is said after the place of the record."""
        super().__init__(message)
        self.is_object = is_object


@dataclass(frozen=True)
class Text:
    """A text, all of which is trained on."""

    pieces: Iterator[str]


@dataclass(frozen=True)
class Completion:
    """A prompt, and what is to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation: turns with `role` and `content`. Those of the assistant are trained on, from `first` on."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    first: int = 0


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` holds.

    Raises NotARecord for anything else.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # the latter for what is nested too deeply
        raise NotARecord(f"is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise NotARecord("is no object, so it has no text")
    return value


def read_record(fields: dict[str, Any], text_field: str) -> str | Completion | Chat:
    """Return what a record has: a text, or else a conversation, or else a prompt with its completion.

    Raises NotARecord where it has none of them.
    """
    text, messages = fields.get(text_field), fields.get("messages")
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(text, str):
        return text
    tools = fields.get("tools") or None
    if _is_chat(messages):
        return Chat(messages, tools)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if _is_chat(prompt) and _is_chat(completion):
        return Chat(prompt + completion, tools, first=len(prompt))
    raise NotARecord(
        f"has no text in field {text_field!r}: name it with --text-field; nor messages, nor prompt and completion",
        is_object=True,
    )


def other_fields(fields: dict[str, Any], text_field: str) -> str | None:
    """Return the fields of a record with a text that could be meant instead, or None."""
    if not isinstance(fields.get(text_field), str):
        return None
    if _is_chat(fields.get("messages")):
        return "messages"
    return "prompt and completion" if {"prompt", "completion"} <= fields.keys() - {text_field} else None


def is_blank(record: str | Completion | Chat) -> bool:
    """Whether there is nothing to train on."""
    if isinstance(record, Chat):
        return False
    return not (record if isinstance(record, str) else record.completion).strip()


def _is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value)
    )
