"""How many tokens there are in data, from some of its documents: for the plan of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.cli.data import Documents, TokenBlocks, load_tokenizer
from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Documents that are tokenised, of the seeded order; and bytes of a token where there is no tokenizer.
DOCUMENTS, BYTES_PER_TOKEN = 256, 4


def count_tokens(paths: Sequence[Path], tokenizer_dir: Path, vocab_size: int) -> tuple[int, bool]:
    """Return the tokens in files and directories, and whether that is an estimate.

    Raises DataError for data that a run cannot read.
    """
    with tempfile.TemporaryDirectory() as folder:
        documents = Documents(paths, scratch=Path(folder))
        try:
            try:
                tokenizer = load_tokenizer(tokenizer_dir, vocab_size)
            except CheckpointError:
                return max(1, documents.nbytes // BYTES_PER_TOKEN), True
            part = range(min(DOCUMENTS, len(documents)))
            sample = TokenBlocks(
                documents,
                tokenizer,
                scratch=Path(folder),
                seq_len=2,
                seed=0,
                vocab_size=vocab_size,
                loss_on_all=True,
                part=part,
            )
            tokens = sample.tokens
            sample.close()
            return tokens * len(documents) // len(part), len(part) < len(documents)
        finally:
            documents.close()
