"""Text in, batches out: files, source trees and JSONL become fixed-length blocks of token ids.

Host memory does not grow with the corpus. Documents are indexed into a file, read in a seeded order,
tokenised piece by piece into a second file, and batches are read from there. Orders are computed, not stored.
"""

from memascend.command.data.blocks import Blocks
from memascend.command.data.documents import PIECE_BYTES, Documents
from memascend.command.data.order import shuffled
from memascend.command.data.tokens import (
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
    "Blocks",
    "ByteTokenizer",
    "Documents",
    "Tokenizer",
    "load_tokenizer",
    "shuffled",
]
