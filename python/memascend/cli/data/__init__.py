"""Data in, batches out: files, source trees and records become sequences of token ids with labels.

Host memory does not grow with the corpus. Documents are indexed into a file (`documents`, `index`), read in a seeded
order (`order`), tokenised piece by piece into a second file (`chat_masking`, `sequences`), and batches are read from
there (`blocks`). Orders are computed, not stored.
"""

from memascend.cli.data.blocks import TokenBlocks
from memascend.cli.data.documents import Documents
from memascend.cli.data.order import shuffled, split
from memascend.cli.data.pieces import PIECE_BYTES
from memascend.cli.data.tokens import (
    BYTE_VOCABULARY,
    END_OF_DOCUMENT,
    PADDING,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "BYTE_VOCABULARY",
    "END_OF_DOCUMENT",
    "PADDING",
    "PIECE_BYTES",
    "ByteTokenizer",
    "Documents",
    "TokenBlocks",
    "Tokenizer",
    "load_tokenizer",
    "shuffled",
    "split",
]
