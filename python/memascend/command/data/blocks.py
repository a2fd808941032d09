"""Documents to batches: tokenised into a file, and read from there in seeded orders."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memascend.command.data.documents import Documents
from memascend.command.data.order import shuffled
from memascend.command.data.scratch import close_quietly
from memascend.command.data.tokens import Tokenizer
from memascend.common.outputs import writing
from memascend.errors import CheckpointError, DataError

TOKEN_BYTES = 4


class Blocks:
    """Documents in a seeded order, end to end, cut into blocks of `seq_len` tokens on disk."""

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
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Tokenise into a file in `scratch` until `tokens_max`; `progress` gets (documents done, of all)."""
        self.seq_len, self.tokens_max = seq_len, tokens_max
        self._seed = seed
        self.tokens = 0
        self._scratch = scratch
        with writing(scratch):
            self._file = open(scratch / "tokens", "wb+")  # noqa: SIM115 (closed by close)
        try:
            for position in range(len(documents)):
                if tokens_max is not None and self.tokens >= tokens_max:
                    break
                for piece in documents.text(shuffled(position, len(documents), f"{seed}/documents")):
                    self._write(tokenizer.encode(piece), vocab_size)
                if tokenizer.end_of_document is not None:
                    self._write([tokenizer.end_of_document], vocab_size)
                if progress is not None:
                    progress(position + 1, len(documents))
            with writing(scratch):
                self._file.flush()
        except BaseException:
            self.close()
            raise
        self._count = self.tokens // seq_len
        if not self._count:
            self.close()
            raise DataError(
                f"the data has {self.tokens} tokens, fewer than one sequence of {seq_len}: "
                "give more data or lower --seq-len"
            )

    def close(self) -> None:
        """Close the token file."""
        close_quietly(self._file)

    def __len__(self) -> int:
        return self._count

    def block(self, index: int) -> torch.Tensor:
        """Block `index` in stored order: shape (seq_len,), int64."""
        size = self.seq_len * TOKEN_BYTES
        raw = os.pread(self._file.fileno(), size, index * size)
        return torch.frombuffer(bytearray(raw), dtype=torch.int32).long()

    def batch(self, index: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Batch `index` of endless epochs, each in its own order: ids and labels, (batch_size, seq_len)."""
        return self.rows(index * batch_size, batch_size)

    def rows(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The `count` sequences from number `first` of endless epochs on: ids and labels, (count, seq_len)."""
        rows = []
        for position in range(first, first + count):
            epoch, place = divmod(position, self._count)
            rows.append(self.block(shuffled(place, self._count, f"{self._seed}/epoch {epoch}")))
        input_ids = torch.stack(rows)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def _write(self, ids: Sequence[int], vocab_size: int) -> None:
        if not len(ids):
            return
        if max(ids) >= vocab_size:
            raise CheckpointError(
                f"the tokenizer gives token {max(ids)}, but the model's vocabulary ends at {vocab_size - 1}: "
                "the tokenizer in MODEL_DIR belongs to another model"
            )
        with writing(self._scratch):
            self._file.write(array("i", ids))
        self.tokens += len(ids)
