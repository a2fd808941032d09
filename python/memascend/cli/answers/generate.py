"""`memascend generate`: a file of prompts answered, as many at once as the budget has room for."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from memascend.cli.answers.generating import Sampling
from memascend.cli.answers.room import DividedBudget, cache_bytes, divide, speed_text
from memascend.cli.answers.sources import ModelSource, Opening, opened, source_of
from memascend.cli.answers.texts import Prompt, Texts, read_prompts
from memascend.cli.errors import note, tell
from memascend.common.outputs import writing
from memascend.common.progress import Progress
from memascend.common.sizes import AUTO
from memascend.errors import DataError, OutputError, system_line
from memascend.formats.config import checkpoint_dtype, limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memascend.options import Experts


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The prompts, and how they are answered."""

    model: Sequence[Path]
    host_memory: int | str = AUTO
    #: Where a copy of the weights goes that cannot be read from the model's files; None is the cache directory.
    store: Path | None = None
    tokenizer: Path | None = None
    #: The model was trained on bytes, without a tokenizer.
    as_bytes: bool = False
    new_tokens: int = 256
    temperature: float | None = None
    seed: int = 0
    #: Texts are continued, instead of answered as a user's message.
    raw: bool = False
    #: How the experts of a mixture are read; None is with their layer, where the memory holds one.
    experts: Experts | None = None
    #: Quantise the linear weights of a model directory to these bits.
    base_bits: int | None = None

    @property
    def opening(self) -> Opening:
        """How the model is opened."""
        return Opening(self.store, self.experts, self.base_bits)


def generate(asked: GenerateOptions, prompts_file: Path, out: Path | None, sequences: int | None) -> None:
    """Answer the prompts of a file, and write a JSON line for each, in their order, to `out` or standard output.

    Until all are there, the lines are in a file beside `out`. Raises DataError for prompts that the model cannot
    answer, OutputError where `out` exists, and the errors of `memascend.from_pretrained` and `memascend.resume`.
    """
    source = source_of(asked.model, asked.tokenizer, as_bytes=asked.as_bytes)
    texts = Texts(source.tokenizer, limits(source.config)[0])
    prompts = read_prompts(prompts_file, as_messages=texts.chats and not asked.raw)
    ids = [texts.ids(prompt) for prompt in prompts]
    check_lengths(source, [len(one) for one in ids], asked.new_tokens)
    room = divide(asked.host_memory, [len(one) for one in ids], asked.new_tokens, token_bytes(source), sequences)
    with ExitStack() as stack:
        lines = sys.stdout if out is None else stack.enter_context(_new_file(out, len(prompts)))
        model = stack.enter_context(opened(source, room, asked.opening))
        tell(speed_text(model, source.weights, room, -(-len(ids) // room.sequences) * asked.new_tokens))
        torch.manual_seed(asked.seed)
        _answer(model, texts, prompts, ids, room, asked, lines)


def token_bytes(source: ModelSource) -> int:
    """Return the bytes of keys and values for a token."""
    return cache_bytes(source.config, checkpoint_dtype(source.weights, source.config).itemsize)


def check_lengths(source: ModelSource, lengths: Sequence[int], new_tokens: int) -> None:
    """Raise DataError for a prompt without tokens, or one that leaves no room for an answer."""
    _, positions = limits(source.config)
    for number, length in enumerate(lengths, start=1):
        if length == 0:
            raise DataError(f"prompt {number} has no tokens: write a text, or leave the line out")
        if positions is not None and length + new_tokens > positions:
            fewer = f", or give --max-new-tokens {positions - length}" if length < positions else ""
            raise DataError(
                f"prompt {number} has {length:,} tokens, and with {new_tokens:,} more would pass the model's "
                f"{positions:,} positions: shorten it{fewer}"
            )


@contextmanager
def _new_file(out: Path, prompts: int) -> Iterator[TextIO]:
    """Yield a new file beside `out`, which gets this name once it has a line for each of so many `prompts`.

    Where the block ends by an exception, the file stays if it has lines, and a note says so.
    """
    if os.path.lexists(out):
        raise OutputError(f"--out {out} exists: name a new file, or move it away")
    partial = out.with_name(f"{out.name}.partial")
    try:
        # Not truncated before it is known that no other process writes there.
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(f"--out {out} cannot be written: {system_line(error, out.parent)}") from error
    file = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115  # Closing may fail where writing has.
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"--out {out} is being written by another process: name another file") from error
        except OSError:  # A filesystem without locks.
            pass
        try:
            with writing(f"--out {partial}"):
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
            if os.path.lexists(out):
                raise OutputError(f"--out {out} was made by another process: the answers are in {partial}")
            os.rename(partial, out)
        except BaseException:
            with suppress(OSError):
                lines = partial.read_bytes().count(b"\n")
                if lines:
                    note(f"{lines:,} of {prompts:,} answers are in {partial}, which the same command begins anew")
                else:
                    partial.unlink()
            raise
    finally:
        with suppress(OSError):
            file.close()


def _answer(
    model: Any,
    texts: Texts,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    room: DividedBudget,
    asked: GenerateOptions,
    lines: TextIO,
) -> None:
    """Answer prompts of about the same length together, and write each line as soon as those before it are there."""
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    passes = -(-len(order) // room.sequences)
    bar = Progress("answering", passes * asked.new_tokens, unit="step")
    tokens, begin = 0, time.perf_counter()

    def told(_: Sequence[int]) -> None:
        nonlocal tokens
        tokens += 1
        bar.update(tokens, [f"{(time.perf_counter() - begin) / tokens:.2g} s/token", f"{room.sequences} at once"])

    sampling = Sampling(asked.new_tokens, asked.temperature, texts.ends, told)
    found: dict[int, list[int]] = {}
    written = 0
    try:
        for number in range(passes):
            chosen = order[number * room.sequences : (number + 1) * room.sequences]
            answers = sampling.answers(model, [ids[index] for index in chosen])
            found |= dict(zip(chosen, answers, strict=True))
            tokens = (number + 1) * asked.new_tokens  # Answers may end before.
            while written in found:
                lines.write(json.dumps(_line(texts, prompts[written], found.pop(written)), ensure_ascii=False) + "\n")
                lines.flush()
                written += 1
    finally:
        bar.close()


def _line(texts: Texts, prompt: Prompt, answer: Sequence[int]) -> dict[str, Any]:
    name = "prompt" if isinstance(prompt, str) else "messages"
    return {name: prompt, "answer": texts.text(answer), "tokens": len(answer)}
