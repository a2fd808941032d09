"""Conversations as data sets write them: turns with `role` and `content`, or ShareGPT's `from` and `value`."""

from __future__ import annotations

import json
from typing import Any

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
