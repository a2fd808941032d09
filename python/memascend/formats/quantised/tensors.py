"""Quantised tensors, dequantised a piece at a time with the operations of the libraries that define their forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from memascend.layout.bits import PIECE_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memascend._memascend import ExternalFile, Packing
    from memascend.formats.safetensors import SafetensorsReader


#: The values of four bits e2m1, as in MXFP4 and NVFP4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class StoredTensor:
    """A tensor of a safetensors file that is read in parts."""

    def __init__(self, reader: SafetensorsReader, key: str) -> None:
        """Take the file and the tensor's name there."""
        self.reader, self.key = reader, key
        entry = reader.entries[key]
        self.dtype, self.shape = entry.dtype, entry.shape

    def __str__(self) -> str:
        """Return where it is, for messages."""
        return f"{self.key} in {self.reader.path}"

    def located(self, externals: Mapping[SafetensorsReader, ExternalFile]) -> tuple[ExternalFile, int]:
        """Return its file as it is read in place, and its offset there in bytes."""
        return externals[self.reader], self.reader.entries[self.key].start

    def whole(self) -> torch.Tensor:
        """Return all of it."""
        return self.reader.read(self.key)

    def part(self, first: int, count: int) -> torch.Tensor:
        """Return the `count` elements from number `first` on."""
        elements = torch.empty(count, dtype=self.dtype)
        self.reader.read_into(self.key, elements, first)
        return elements

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return `count` rows from `first` on, of all its dimensions but the last one as one: (count, width)."""
        width = self.shape[-1]
        return self.part(first * width, count * width).view(count, width)


class Packed(ABC):
    """A tensor as a form stores it: matrices of rows, (..., rows, width), which are dequantised row by row."""

    #: Whether the matrices are the transposes of those that the model has.
    transposed = False

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Take the shape as stored, when dequantised."""
        self.stored_shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model has."""
        *outer, rows, width = self.stored_shape
        return (*outer, width, rows) if self.transposed else self.stored_shape

    @abstractmethod
    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` rows from `first` on, of all matrices one behind the other: (count, width).

        They are of the dtype that the form's library computes in where the parameter is of `dtype`.
        """

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where the tensor lies and how, for weights of `dtype` that are dequantised at each use.

        None where the native side does not read it so.
        """
        return None

    def read_into(self, target: torch.Tensor, first: int = 0) -> None:
        """Fill `target`, contiguous, with the elements of the model's tensor from number `first` on."""
        flat = target.reshape(-1)
        if not self.transposed:
            self._read_rows(flat, first)
            return
        rows, width = self.stored_shape[-2:]
        end, matrix = first + flat.numel(), rows * width
        for number in range(first // matrix, -(-end // matrix)):
            begin, stop = (min(max(at - number * matrix, 0), matrix) for at in (first, end))
            for top, bottom, left, right in _windows(begin, stop, rows):
                at = number * matrix + top * rows + left - first
                window = flat[at : at + (bottom - top) * (right - left)].view(bottom - top, right - left)
                self._read_transposed(window, number * rows, (top, bottom), (left, right))

    def _read_rows(self, flat: torch.Tensor, first: int) -> None:
        width = self.stored_shape[-1]
        end = first + flat.numel()
        for row, count in pieces(first // width, -(-end // width), width):
            values = self.rows(row, count, flat.dtype).reshape(-1)
            begin, stop = max(first, row * width), min(end, (row + count) * width)
            flat[begin - first : stop - first].copy_(values[begin - row * width : stop - row * width])

    def _read_transposed(
        self, window: torch.Tensor, base: int, columns: tuple[int, int], rows: tuple[int, int]
    ) -> None:
        """Fill `window`, (columns, rows), with a part of the matrix whose first row is number `base`."""
        for row, count in pieces(*rows, self.stored_shape[-1]):
            values = self.rows(base + row, count, window.dtype)
            at = row - rows[0]
            window[:, at : at + count].copy_(values[:, columns[0] : columns[1]].t())


def pieces(begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of the pieces that rows `begin .. end` of `width` elements are read in."""
    step = max(PIECE_ELEMENTS // max(width, 1), 1)
    for row in range(begin, end, step):
        yield row, min(step, end - row)


def _windows(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (top, bottom, left, right) of the rectangles that elements `begin .. end` of rows of `width` make."""
    while begin < end:
        top, left = divmod(begin, width)
        if left or end - begin < width:
            right = min(width, left + end - begin)
            yield top, top + 1, left, right
            begin += right - left
        else:
            bottom = end // width
            yield top, bottom, 0, width
            begin = bottom * width


def unpack_nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Return the two numbers of four bits in each byte, the lower four bits first: (..., 2 n) of int32."""
    low, high = (packed & 0xF).int(), (packed >> 4).int()
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of `bits` in each word of int32, the lowest bits first: (..., n 32 / bits) of int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
