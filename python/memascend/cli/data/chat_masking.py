"""Documents to token ids, marked where they are not trained on.

An id that is not trained on is kept as -1 - id, so that a file of tokens has the labels too. The id with which a
document begins has the bit `BEGINS` besides, where packed documents are apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch

from memascend.cli.data.chat import ChatError
from memascend.cli.data.pieces import PIECE_BYTES
from memascend.cli.data.records import Chat, Completion, Instruction, Text
from memascend.cli.data.tokens import Tokenizer

#: The label of a token that is not trained on.
IGNORED = -100
#: Larger than any token id.
BEGINS = 1 << 30
#: A document of any kind.
Document = Text | Completion | Chat | Instruction


def marked(document: Document, tokenizer: Tokenizer, *, loss_on_all: bool) -> Iterator[array[int]]:
    """Yield the marked ids of a document, with its end, in pieces.

    Raises ChatError for a conversation that the tokenizer has no template for, or cannot be rendered.
    """
    if isinstance(document, Instruction):
        document = document.chat() if tokenizer.chat else document.completion()
    if isinstance(document, Chat):
        if tokenizer.chat is None:
            raise ChatError("the tokenizer has no chat template, which conversations need")
        ids, trained = tokenizer.chat.encode(document, loss_on_all=loss_on_all)
        yield array("i", (token if kept else -1 - token for token, kept in zip(ids, trained, strict=True)))
        return  # The template ends it.
    if isinstance(document, Completion):
        prompt, completion = _completed(document, tokenizer)
        untrained = [*tokenizer.beginning, *prompt]
        yield array("i", untrained if loss_on_all else (-1 - token for token in untrained))
        yield array("i", completion)
    else:
        for piece in document.pieces:
            yield array("i", tokenizer.encode(piece))
    if tokenizer.end_of_document is not None:
        yield array("i", [tokenizer.end_of_document])


def largest(ids: Iterable[int]) -> int:
    """Return the largest id among marked ones."""
    return max((token if token >= 0 else -1 - token for token in ids), default=-1)


def unmarked(marked_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, int64, of the shape of the marked ids."""
    wide = marked_ids.long()
    return torch.where(wide < 0, (-1 - wide) % BEGINS, wide), torch.where(wide < 0, IGNORED, wide)


def begun(marked_id: int) -> int:
    """Mark an id as the first of its document. It is not trained on: the tokens before it are another document's."""
    return -1 - ((marked_id if marked_id >= 0 else -1 - marked_id) | BEGINS)


def positions(marked_ids: torch.Tensor) -> torch.Tensor:
    """Return the position of each id in its document, or in the part of it that the sequence has: int64, from 0 on."""
    indices = torch.arange(len(marked_ids))
    begins = torch.where(-1 - marked_ids.long() >= BEGINS, indices, 0)
    return indices - begins.cummax(0).values


def _completed(document: Completion, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of a prompt and its completion: as in one text, if that leaves the prompt's as they are alone."""
    prompt = list(tokenizer.encode(document.prompt))
    if len(document.prompt) + len(document.completion) < PIECE_BYTES:
        both = list(tokenizer.encode(document.prompt + document.completion))
        if both[: len(prompt)] == prompt:
            return prompt, both[len(prompt) :]
    return prompt, tokenizer.encode(document.completion)
