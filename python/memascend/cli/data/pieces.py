"""Text in pieces small enough for a tokenizer, which takes some hundred bytes per token while it works."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 64 << 10


class NotUtf8(ValueError):
    """Bytes are no UTF-8; `offset` says which, in the file."""

    def __init__(self, offset: int) -> None:
        """Take the place of the first such byte."""
        super().__init__(f"byte {offset} is no UTF-8")
        self.offset = offset


def decoded_pieces(file: BinaryIO) -> Iterator[str]:
    """Yield the rest of a binary file as text, in pieces that end at a line where one is near.

    Raises NotUtf8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    while raw := file.read(PIECE_BYTES):
        held += _decoded(decoder, raw, file)
        cut = held.rfind("\n") + 1
        if not cut and len(held) >= PIECE_BYTES:  # one very long line: cut it anywhere
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    held += _decoded(decoder, b"", file)
    if held:
        yield held


def _decoded(decoder: codecs.IncrementalDecoder, raw: bytes, file: BinaryIO) -> str:
    try:
        return decoder.decode(raw, final=not raw)
    except UnicodeDecodeError as error:  # It counts from the bytes that the decoder holds of the piece before.
        raise NotUtf8(file.tell() - len(error.object) + error.start) from error
