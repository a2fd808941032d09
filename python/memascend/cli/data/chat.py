"""Conversations to token ids by a tokenizer's chat template, and which of them the assistant says."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from memascend.cli.data.bounds import SECONDS_MAX, TooSlow, bounded
from memascend.cli.data.records import Chat
from memascend.cli.data.templates import refuse_powers, stop_clock
from memascend.errors import first_line

#: The marks of a template around the turns of the assistant, by which transformers tells their tokens.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

#: A string of a template.
_LITERAL = re.compile(r"""'[^'\n]*'|"[^"\n]*\"""")

#: The longest conversation: far longer than any that a model can take.
CHARACTERS_MAX = 16 << 20


class ChatError(ValueError):
    """A conversation that a template cannot turn into tokens, or without telling whose turn each token is."""


class Conversations:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, clock: datetime) -> None:
        """Take a tokenizer that has one, and the time that it is for the template."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._templates = [template] if isinstance(template, str) else list(dict(template).values())
        refuse_powers(self._templates)
        stop_clock(self._templates, clock)
        self._marks_turns = isinstance(template, str) and bool(_GENERATION.search(template))

    def unnamed(self, roles: Collection[str]) -> list[str]:
        """Return the ones among `roles` that the template has no words for, which it may leave out without an error."""
        literals = (literal[1:-1] for template in self._templates for literal in _LITERAL.findall(template))
        named = {"user", "assistant", *literals}
        return sorted(role for role in roles if role not in named)

    def encode(self, chat: Chat, *, loss_on_all: bool) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the ids of a conversation, and for each whether it is trained on.

        Raises ChatError where the template refuses the conversation, or does not tell whose turns they are.
        """
        if loss_on_all:
            ids = self._ids(chat, len(chat.messages))
            return ids, [True] * len(ids)
        if self._marks_turns and not chat.first:
            found = self._applied(chat.messages, chat.tools, return_assistant_tokens_mask=True)
            return found["input_ids"], [bool(mark) for mark in found["assistant_masks"]]
        return self._by_prefixes(chat)

    def _by_prefixes(self, chat: Chat) -> tuple[Sequence[int], Sequence[bool]]:
        """Tell each turn by its addition to the conversation before it."""
        ids = self._ids(chat, len(chat.messages))
        trained = [False] * len(ids)
        for turn in range(chat.first, len(chat.messages)):
            if chat.messages[turn]["role"] != "assistant":
                continue
            before, after = self._ids(chat, turn, add_generation_prompt=True), self._ids(chat, turn + 1)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise ChatError(
                    f"the chat template renders turn {turn + 1} otherwise alone than within the conversation, so what "
                    "the assistant says cannot be told: give a template with {% generation %}, or --loss-on all"
                )
            trained[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, trained

    def _ids(self, chat: Chat, turns: int, **options: Any) -> list[int]:
        return self._applied(chat.messages[:turns], chat.tools, **options)["input_ids"]

    def _applied(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        prompt = options.get("add_generation_prompt", False)
        try:
            with bounded(SECONDS_MAX):  # The tokenizer's own code ends the process where memory is lacking.
                text = self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=prompt
                )
            if len(text) > CHARACTERS_MAX:
                raise ChatError(f"the chat template makes {len(text):,} characters of it, more than {CHARACTERS_MAX:,}")
            return self._tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, **options)
        except ChatError:
            raise
        except TooSlow as error:
            raise ChatError(f"the chat template did not render it within {SECONDS_MAX:.0f} s") from error
        except MemoryError as error:
            raise ChatError("the chat template takes more memory than any conversation needs") from error
        except Exception as error:  # templates raise errors of any kind
            raise ChatError(f"the chat template cannot render it: {first_line(error)}") from error
