"""Conversations as data sets write them: turns with `role` and `content`, or ShareGPT's `from` and `value`."""

from __future__ import annotations

import json
from typing import Any

#: Roles whose content may be any value: templates write the result of a tool as JSON.
_TOOLS = ("tool", "ipython", "function")
#: ShareGPT's names of those whom chat templates call otherwise.
_ROLES = {"human": "user", "gpt": "assistant"}


def turns_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the turns of a conversation, with `role` and `content`; None where `value` is none."""
    turns = listed(value)
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        return None
    if all(isinstance(turn.get("role"), str) for turn in turns):
        return turns
    if all(isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str) for turn in turns):
        return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    return None


def with_texts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns whose contents are texts, with the parts of a content that has several texts as one.

    A turn without content has to have something else, such as `tool_calls`. Raises ValueError for another content,
    which a template would write as Python does: "None", "[{'type': ...".
    """
    checked = []
    for number, turn in enumerate(turns, start=1):
        content = turn.get("content")
        if isinstance(content, list) and all(map(_is_text_part, content)):
            content = "".join(part["text"] for part in content)
            turn = turn | {"content": content}
        others = any(value for name, value in turn.items() if name not in ("role", "content"))
        if not isinstance(content, str) and turn["role"] not in _TOOLS and not (content is None and others):
            kinds = {type(None): "missing", list: "a list with other parts than text"}
            kind = kinds.get(type(content), "no text")
            raise ValueError(f"has turn {number} ({turn['role']!r}), whose content is {kind}")
        checked.append(turn)
    return checked


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def with_system(turns: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Return the turns behind a record's own `system` text, if it has one and they do not begin with another."""
    if not isinstance(system, str) or not system.strip() or turns[0]["role"] == "system":
        return turns
    return [{"role": "system", "content": system}, *turns]


def listed(value: Any) -> list[Any] | None:
    """Return a list, also one that a cell of a table holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None
