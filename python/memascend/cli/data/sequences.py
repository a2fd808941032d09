"""Sequences of marked token ids in a file: blocks of documents end to end, or one for each document."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

import torch

from memascend.cli.data.chat_masking import begun
from memascend.common.outputs import close_quietly, writing

TOKEN_BYTES = 4
_END = struct.Struct("<Q")


class Sequences:
    """Sequences of at most `seq_len` marked ids, in order; those without an id to train on are left out."""

    def __init__(self, scratch: Path, seq_len: int, *, packing: bool, boundaries: bool = False) -> None:
        """Begin with none, in files in the directory `scratch`; `boundaries` marks where packed documents begin."""
        self._scratch, self._seq_len, self._packing = scratch, seq_len, packing
        self._boundaries = self._begins = packing and boundaries
        self._held: array[int] = array("i")
        self._count = self._written = 0
        #: Ids that were added; without packing, only those that were not cut off.
        self.tokens = 0
        #: Documents that were cut off, and sequences without a token to train on.
        self.cut_off = self.untrained = 0
        self._is_cut_off = False
        with writing(scratch):
            self._ids = open(scratch / "tokens", "wb+")  # noqa: SIM115 (closed by close)
            self._ends = open(scratch / "ends", "wb+")  # noqa: SIM115

    def __len__(self) -> int:
        return self._count

    def add(self, ids: array[int]) -> None:
        """Add marked ids of a document."""
        if not self._packing and len(self._held) + len(ids) > self._seq_len:
            ids = ids[: self._seq_len - len(self._held)]
            self._is_cut_off = True
        if self._begins and ids:
            ids = array("i", ids)
            ids[0], self._begins = begun(ids[0]), False
        self.tokens += len(ids)
        self._held.extend(ids)
        while self._packing and len(self._held) >= self._seq_len:
            self._write(self._held[: self._seq_len])
            del self._held[: self._seq_len]

    def end_document(self) -> None:
        """End a document. Packed ones go on in the same sequence."""
        self._begins = self._boundaries
        if not self._packing:
            self._write(self._held)
            self.cut_off += self._is_cut_off
            self._held, self._is_cut_off = array("i"), False

    def flush(self) -> None:
        """Have `row` see the ids that were added."""
        with writing(self._scratch):
            self._ids.flush()
            self._ends.flush()

    def row(self, index: int) -> torch.Tensor:
        """Sequence `index`: marked ids, int32, shape (up to seq_len,)."""
        begin, end = index * self._seq_len, (index + 1) * self._seq_len
        if not self._packing:
            begin, end = self._end(index - 1), self._end(index)
        raw = os.pread(self._ids.fileno(), (end - begin) * TOKEN_BYTES, begin * TOKEN_BYTES)
        return torch.frombuffer(bytearray(raw), dtype=torch.int32)

    def close(self) -> None:
        """Close the files."""
        close_quietly(self._ids)
        close_quietly(self._ends)

    def _end(self, index: int) -> int:
        """Return the end of a sequence, in ids."""
        return _END.unpack(os.pread(self._ends.fileno(), _END.size, index * _END.size))[0] if index >= 0 else 0

    def _write(self, sequence: array[int]) -> None:
        if all(marked < 0 for marked in sequence[1:]):  # the first one is predicted from nothing
            self.untrained += 1
            return
        with writing(self._scratch):
            self._ids.write(sequence)
            self._written += len(sequence)
            if not self._packing:
                self._ends.write(_END.pack(self._written))
        self._count += 1
