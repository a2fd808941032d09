"""Text in pieces small enough for a tokenizer, which takes some hundred bytes per token while it works."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 64 << 10


def decoded_pieces(file: BinaryIO) -> Iterator[str]:
    """The rest of a binary file as text, in pieces that end at a line where one is near."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    while raw := file.read(PIECE_BYTES):
        held += decoder.decode(raw)
        cut = held.rfind("\n") + 1
        if not cut and len(held) >= PIECE_BYTES:  # one very long line: cut it anywhere
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    held += decoder.decode(b"", final=True)
    if held:
        yield held
