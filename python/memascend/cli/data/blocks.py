"""Documents to batches: tokenised into a file, and read from there in seeded orders."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.functional import pad

from memascend.cli.data.chat import ChatError
from memascend.cli.data.chat_masking import IGNORED, largest, marked, positions, unmarked
from memascend.cli.data.documents import Documents
from memascend.cli.data.order import shuffled
from memascend.cli.data.sequences import Sequences
from memascend.cli.data.tokens import Tokenizer
from memascend.errors import CheckpointError, DataError

#: Sequences are padded to multiples of so many tokens: oneDNN compiles products for each length, and keeps them all.
PADDED_TO = 64


class TokenBlocks:
    """Documents in a seeded order as sequences of at most `seq_len` tokens on disk, with the labels of each token.

    Packed, documents lie end to end, and the sequences are blocks of `seq_len`. With `boundaries` the positions begin
    anew at each document, and its first token, which nothing of it predicts, is not trained on. Else each document is a
    sequence of its own, cut off where it is longer, and padded in its batch. A sequence without a token to train on has
    no loss, and is left out.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        scratch: Path,
        seq_len: int,
        seed: int,
        vocab_size: int,
        tokens_max: int | None = None,
        packing: bool = True,
        boundaries: bool = False,
        loss_on_all: bool = False,
        part: range | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Tokenise into files in `scratch` until `tokens_max`; `progress` gets (documents done, of all).

        `part` are the positions of documents in the seeded order, of `order.split`; None is all of them.
        `loss_on_all` trains on prompts and on every turn too, not only on completions and the assistant's turns.
        """
        self.seq_len, self.tokens_max = seq_len, tokens_max
        self._seed = seed
        self._padding = max(0, tokenizer.end_of_document or 0)  # any id: it is neither seen by others nor trained on
        self._boundaries = packing and boundaries
        self._sequences = Sequences(scratch, seq_len, packing=packing, boundaries=boundaries)
        try:
            part = range(len(documents)) if part is None else part
            for done, position in enumerate(part, start=1):
                if tokens_max is not None and self.tokens >= tokens_max:
                    break
                number = shuffled(position, len(documents), f"{seed}/documents")
                try:
                    for ids in marked(documents.document(number), tokenizer, loss_on_all=loss_on_all):
                        _check(ids, vocab_size)
                        self._sequences.add(ids)
                except ChatError as error:
                    raise DataError(f"{documents.where(number)}: {error}") from error
                self._sequences.end_document()
                if progress is not None:
                    progress(done, len(part))
            self._sequences.flush()
            if not len(self):
                raise DataError(self._nothing())
        except BaseException:
            self.close()
            raise

    @property
    def tokens(self) -> int:
        """Tokens of the documents that were read."""
        return self._sequences.tokens

    def close(self) -> None:
        """Close the files."""
        self._sequences.close()

    def __len__(self) -> int:
        return len(self._sequences)

    def notes(self) -> list[str]:
        """Return a line for each kind of documents and sequences that are not trained on as they are."""
        notes = []
        if cut_off := self._sequences.cut_off:
            notes.append(f"documents longer than --seq-len {self.seq_len}, which were cut off there: {cut_off}")
        if untrained := self._sequences.untrained:
            notes.append(f"sequences left out, since they hold prompts alone and nothing to train on: {untrained}")
        return notes

    def batch(self, index: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Batch `index` of endless epochs, each in its own order: see `number` and `padded`."""
        positions = range(index * batch_size, (index + 1) * batch_size)
        return self.padded([self.row(self.number(position)) for position in positions])

    def number(self, position: int) -> int:
        """Return which sequence comes at a position of endless epochs, each in its own order."""
        epoch, place = divmod(position, len(self))
        return shuffled(place, len(self), f"{self._seed}/epoch {epoch}")

    def row(self, number: int) -> dict[str, torch.Tensor]:
        """Sequence `number` in stored order: `input_ids` and `labels`, of shape (up to seq_len,), int64.

        With boundaries `position_ids` too, from which transformers makes the masks of packed sequences.
        """
        stored = self._sequences.row(number)
        ids, labels = unmarked(stored)
        row = {"input_ids": ids, "labels": labels}
        return row | {"position_ids": positions(stored)} if self._boundaries else row

    def padded(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return rows as a batch, of shape (count, length); -100 labels tokens that are not trained on.

        The length is the longest row's, rounded up to a multiple of `PADDED_TO`, and at most `seq_len`.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        length = min(self.seq_len, -(-longest // PADDED_TO) * PADDED_TO)
        batch = {}
        for name in rows[0]:
            value = {"input_ids": self._padding, "labels": IGNORED}.get(name, 0)
            padded = [pad(row[name], (0, length - len(row[name])), value=value) for row in rows]
            batch[name] = torch.stack(padded)
        return batch

    def _nothing(self) -> str:
        if self._sequences.untrained:
            return f"within --seq-len {self.seq_len}, no document has a token to train on: raise it"
        return (
            f"the data has {self.tokens} tokens, fewer than one sequence of {self.seq_len}: "
            "give more data or lower --seq-len"
        )


def _check(ids: array[int], vocab_size: int) -> None:
    if (last := largest(ids)) >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token {last}, but the model's vocabulary ends at {vocab_size - 1}: "
            "the tokenizer belongs to another model"
        )
