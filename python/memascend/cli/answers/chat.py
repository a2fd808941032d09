"""`memascend chat`: a conversation on the terminal."""

from __future__ import annotations

import io
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.answers.generate import GenerateOptions, token_bytes
from memascend.cli.answers.generating import Sampling
from memascend.cli.answers.room import divide, speed_text
from memascend.cli.answers.sources import opened, source_of
from memascend.cli.answers.texts import Prompt, Texts
from memascend.cli.errors import note, tell
from memascend.errors import DataError
from memascend.formats.config import limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELP = "an empty line or Ctrl-D ends, /new begins a new conversation, Ctrl-C ends an answer"
#: Tokens of a conversation that keys and values are counted for.
CONTEXT_TOKENS = 4096


def chat(asked: GenerateOptions, context: int = CONTEXT_TOKENS) -> None:
    """Answer the lines of standard input until it ends; a model without a chat template continues each line.

    Args:
        context: the most tokens of a conversation, for which keys and values are counted in the budget.
    """
    source = source_of(asked.model, asked.tokenizer, as_bytes=asked.as_bytes)
    texts = Texts(source.tokenizer, limits(source.config)[0])
    _, positions = limits(source.config)
    context = min(context, positions or context)
    new_tokens = min(asked.new_tokens, context // 2)
    room = divide(asked.host_memory, [context - new_tokens], new_tokens, token_bytes(source), 1, "--context")
    conversing = texts.chats and not asked.raw
    with opened(source, room, asked.opening) as model:
        tell(speed_text(model, source.weights, room))
        note(HELP if conversing else f"texts are continued, since there is no chat template or --raw was given; {HELP}")
        torch.manual_seed(asked.seed)
        conversation = _Conversation(model, texts, asked, conversing, new_tokens)
        for line in _lines():
            if line == "/new":
                conversation.begin()
                continue
            try:
                prompt = conversation.prompt(line)
                _check_length(len(texts.ids(prompt)), new_tokens, context)
                conversation.answer(prompt)
            except DataError as error:
                tell(f"{error}; /new begins a new conversation")


def _check_length(tokens: int, new_tokens: int, context: int) -> None:
    """Raise DataError where a conversation and its next answer pass the tokens that memory is counted for."""
    if tokens == 0:
        raise DataError("that has no tokens: write a text")
    if tokens + new_tokens > context:
        raise DataError(
            f"the conversation has {tokens:,} tokens, and with an answer of up to {new_tokens:,} would pass the "
            f"{context:,} of --context (at most the model's positions)"
        )


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until an empty line or the end."""
    if sys.stdin is None:  # It was closed before the command began.
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # A line that is no text must not end the conversation.
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        try:
            line.encode()
        except UnicodeEncodeError:
            tell("that line holds bytes that are no text in this terminal's encoding, and was left out: type it anew")
            continue
        yield line.strip()


class _Conversation:
    """The turns so far, and the next answer."""

    def __init__(self, model: Any, texts: Texts, asked: GenerateOptions, conversing: bool, new_tokens: int) -> None:
        self._model, self._texts, self._asked = model, texts, asked
        self._conversing, self._new_tokens = conversing, new_tokens
        self.begin()

    def begin(self) -> None:
        """Forget the turns so far."""
        self._messages: list[dict[str, Any]] = []

    def prompt(self, line: str) -> Prompt:
        """Return the model's input for a line of the user's."""
        return [*self._messages, {"role": "user", "content": line}] if self._conversing else line

    def answer(self, prompt: Prompt) -> None:
        """Print the answer as it is made, and remember it."""
        stream = _Stream(self._texts)
        with _until_interrupted() as interrupted:
            sampling = Sampling(
                self._new_tokens, self._asked.temperature, self._texts.ends, stream.add, lambda: interrupted[0]
            )
            (answer,) = sampling.answers(self._model, [self._texts.ids(prompt)])
        stream.end(answer)
        if isinstance(prompt, list):
            self._messages = [*prompt, {"role": "assistant", "content": self._texts.text(answer)}]


class _Stream:
    """Prints the text of tokens as far as more tokens cannot change it."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._ids, self._shown = texts, list[int](), ""
        self._begin = time.perf_counter()

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next token."""
        self._ids.append(tokens[0])
        text = self._texts.text(self._ids)
        if not text.endswith("\ufffd"):  # A character whose other bytes are to come.
            self._show(text)

    def end(self, answer: Sequence[int]) -> None:
        """Print the rest, and how long a token took."""
        self._show(self._texts.text(answer))
        seconds = (time.perf_counter() - self._begin) / max(1, len(self._ids))
        print(flush=True)
        if sys.stdin.isatty():
            tell(f"{len(answer)} tokens, {seconds:.2g} s each")

    def _show(self, text: str) -> None:
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


@contextmanager
def _until_interrupted() -> Iterator[list[bool]]:
    """Have Ctrl-C set the first element of the yielded list, for the block; a second one is as usual."""
    interrupted = [False]
    previous = signal.getsignal(signal.SIGINT)

    def note_it(*_: object) -> None:
        interrupted[0] = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note_it)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
