"""compressed-tensors' FP8, int8, packed integers, NVFP4 and MXFP4: bits of its own decompression, on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memascend._memascend import Packing
from memascend.errors import CheckpointError
from memascend.formats.quantised.tensors import E2M1, Packed, StoredTensor, unpack_nibbles, unpack_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from memascend._memascend import ExternalFile
    from memascend.formats.safetensors import SafetensorsReader

_PLAIN = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
#: Bits that packed integers may have here, so that a word of 32 has a whole number of them.
_BITS = (2, 4, 8)
#: Numbers and scales that are read in place.
_NUMBERS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
_SCALE_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Scaled(Packed):
    """A weight (rows, width) whose scales are of the tensor, its rows, groups within a row, or blocks of rows."""

    def __init__(
        self, shape: tuple[int, ...], scales: StoredTensor, zeros: StoredTensor | None, blocks: tuple[int, int] | None
    ) -> None:
        super().__init__(shape)
        self._scales, self._zeros = scales, zeros
        rows, width = shape
        if scales.shape in ((), (1,), (1, 1)):
            self._grid, self._block = (1, 1), (rows, width)
        elif scales.shape in ((rows,), (rows, 1)):
            self._grid, self._block = (rows, 1), (1, width)
        elif len(scales.shape) == 2 and scales.shape[0] == rows and width % scales.shape[1] == 0:
            self._grid, self._block = (rows, scales.shape[1]), (1, width // scales.shape[1])
        elif blocks is not None and scales.shape == (-(-rows // blocks[0]), -(-width // blocks[1])):
            self._grid, self._block = (scales.shape[0], scales.shape[1]), blocks
        else:
            raise CheckpointError(f"{scales} has shape {scales.shape}, which fits no groups of {shape}")

    def _scaled(self, values: torch.Tensor, first: int, scales: torch.Tensor) -> torch.Tensor:
        """Return rows of numbers from `first` on, less their zeros, times `scales`, of `_scale_rows`."""
        values = values.to(scales.dtype)
        if self._zeros is not None:
            at = self._rows_of(first, len(values))
            begin, end = int(at[0]), int(at[-1]) + 1
            zeros = self._zero_rows(self._zeros, begin, end)[at - begin]
            values = values - self._spread(zeros.to(scales.dtype))
        return values * self._spread(scales)

    def _zero_rows(self, zeros: StoredTensor, begin: int, end: int) -> torch.Tensor:
        """Return the zeros of rows of blocks: (end - begin, groups)."""
        width = self._grid[1]
        return zeros.part(begin * width, (end - begin) * width).view(end - begin, width)

    def _rows_in_place(
        self, weight: StoredTensor, numbers: str, per_byte: int, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where numbers lie, `per_byte` to a byte, with scales and zeros of blocks; None if none is read so."""
        scales, width = _SCALE_FORMATS.get(self._scales.dtype), self.stored_shape[1]
        begins_with_a_byte = self._block[1] % per_byte == 0 or self._block[1] >= width
        if scales is None or width % per_byte or not begins_with_a_byte:
            return None
        zeros = None if self._zeros is None else self._zeros.located(externals)
        beside = self._scales.located(externals)
        packing = Packing.rows(numbers, width, self._block, beside, scales, zeros=zeros)
        return *weight.located(externals), packing

    def _four_bits_in_place(
        self,
        weight: StoredTensor,
        code: Sequence[float],
        scales: str,
        externals: Mapping[SafetensorsReader, ExternalFile],
        divisor: float = 1.0,
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where two numbers in a byte lie, with scales of groups of a row; None for groups of other sizes."""
        rows, group = self._block
        if rows != 1 or group < 2 or 4096 % group or self.stored_shape[1] % group:
            return None
        packing = Packing.four_bits(
            group, code, self._scales.located(externals), format=scales, divisor=divisor, low_first=True
        )
        return *weight.located(externals), packing

    def _rows_of(self, first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count) // self._block[0]

    def _scale_rows(self, first: int, count: int) -> torch.Tensor:
        """Return the scales of each of `count` rows: (count, groups)."""
        at, width = self._rows_of(first, count), self._grid[1]
        begin, end = int(at[0]), int(at[-1]) + 1
        return self._scales.part(begin * width, (end - begin) * width).view(end - begin, width)[at - begin]

    def _spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Repeat values of groups for their elements: (count, width), or (count, 1) for one value a row."""
        if self._grid[1] == 1:
            return scales
        return scales.repeat_interleave(self._block[1], dim=1)[:, : self.stored_shape[1]]


class Plain(_Scaled):
    """FP8 or int8, a byte for each number."""

    def __init__(
        self, weight: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, blocks: tuple[int, int] | None
    ) -> None:
        """Take the tensors. Raises CheckpointError where their shapes do not fit."""
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight} has shape {weight.shape}, which is no matrix")
        super().__init__(weight.shape, scales, zeros, blocks)
        if zeros is not None and math.prod(zeros.shape) != math.prod(self._grid):
            raise CheckpointError(f"{zeros} has shape {zeros.shape}, and the scales {scales.shape}")
        self._weight = weight

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in the dtype of the scales."""
        return self._scaled(self._weight.rows(first, count), first, self._scale_rows(first, count))

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, for weights in bfloat16; zeros have to be bytes as the numbers are."""
        numbers = _NUMBERS.get(self._weight.dtype)
        if dtype != torch.bfloat16 or numbers is None:
            return None
        if self._zeros is not None and (self._weight.dtype, self._zeros.dtype) != (torch.int8, torch.int8):
            return None
        return self._rows_in_place(self._weight, numbers, 1, externals)


class PackedIntegers(_Scaled):
    """Whole numbers of a few bits in words of 32, each less half of their range."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], module: str, bits: set[int], blocks: tuple[int, int] | None
    ) -> None:
        """Take the tensors of a module. Raises CheckpointError where they do not fit, or `bits` has no one size."""
        self._weight, scales = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
        shape = tuple(stored[f"{module}.weight_shape"].whole().tolist())
        fitting = [
            n for n in sorted(bits) if len(shape) == 2 and self._weight.shape == (shape[0], -(-shape[1] * n // 32))
        ]
        if len(fitting) != 1 or fitting[0] not in _BITS:
            raise CheckpointError(
                f"{self._weight} has shape {self._weight.shape} for {shape} numbers of {sorted(bits)} bits: memascend "
                f"reads matrices with {', '.join(map(str, _BITS))} bits"
            )
        self._bits, self._half = fitting[0], 1 << (fitting[0] - 1)
        zeros = stored.get(f"{module}.weight_zero_point")
        super().__init__(shape, scales, zeros, blocks)
        if zeros is not None and zeros.shape != (-(-shape[0] * self._bits // 32), self._grid[1]):
            raise CheckpointError(f"{zeros} has shape {zeros.shape}, and the scales {scales.shape}")

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in the dtype of the scales."""
        numbers = unpack_words(self._weight.rows(first, count), self._bits)[:, : self.stored_shape[1]] - self._half
        return self._scaled(numbers, first, self._scale_rows(first, count))

    def _zero_rows(self, zeros: StoredTensor, begin: int, end: int) -> torch.Tensor:
        """Return the zeros of rows of blocks, which are packed along the rows: (end - begin, groups)."""
        per_word = 32 // self._bits
        top = begin // per_word
        packed = zeros.rows(top, -(-end // per_word) - top)
        unpacked = unpack_words(packed.t().contiguous(), self._bits).t() - self._half
        return unpacked[begin - top * per_word :][: end - begin]

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, if its rows are whole words, for weights in bfloat16."""
        by_rows = self._zeros is None or self._block[0] == 1
        if dtype != torch.bfloat16 or self.stored_shape[1] * self._bits % 32 or not by_rows:
            return None
        return self._rows_in_place(self._weight, f"packed {self._bits}", 8 // self._bits, externals)


class FourBitFloats(_Scaled):
    """NVFP4 (scales in FP8, and one for the tensor) and MXFP4 (scales that are powers of two): in bfloat16."""

    def __init__(self, weight: StoredTensor, scales: StoredTensor, of_all: StoredTensor | None) -> None:
        """Take the tensors. Raises CheckpointError where their shapes do not fit."""
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight} has shape {weight.shape}, which is no matrix")
        super().__init__((weight.shape[0], 2 * weight.shape[1]), scales, None, None)
        self._weight = weight
        self._of_all = None if of_all is None else of_all.whole()

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in bfloat16."""
        scales = self._scale_rows(first, count)
        if scales.dtype == torch.uint8:
            scales = 2.0 ** (scales.to(torch.int32) - 127).to(torch.bfloat16)
        scales = scales.to(torch.bfloat16)
        if self._of_all is not None:
            scales = scales / self._of_all
        values = torch.tensor(E2M1, dtype=torch.bfloat16)[unpack_nibbles(self._weight.rows(first, count))]
        return self._scaled(values, first, scales).to(torch.bfloat16)

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, for weights in bfloat16."""
        if dtype != torch.bfloat16:
            return None
        if self._of_all is None:
            if self._scales.dtype != torch.uint8:
                return None
            return self._four_bits_in_place(self._weight, E2M1, "e8m0", externals)
        if (self._scales.dtype, self._of_all.dtype) != (torch.float8_e4m3fn, torch.float32):
            return None
        if self._of_all.shape != (1,):
            return None
        return self._four_bits_in_place(self._weight, E2M1, "e4m3", externals, float(self._of_all))


def find(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of these forms by their names in the model, each with the names of its stored tensors.

    Raises CheckpointError for options that the supported formats do not have.
    """
    groups = described.get("config_groups")
    of_weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    bits = {int(weights.get("num_bits", 8)) for weights in of_weights}
    blocks = next((tuple(weights["block_structure"]) for weights in of_weights if weights.get("block_structure")), None)
    found: dict[str, tuple[Packed, list[str]]] = {}
    for key in stored:
        module, _, kind = key.rpartition(".")
        if kind == "weight_g_idx":
            raise CheckpointError(f"{stored[key]} orders columns by activations, which memascend does not read")
        if kind != "weight_scale":
            continue
        name = f"{module}.weight"
        parts = [f"{name}{end}" for end in ("_packed", "_scale", "_zero_point", "_shape", "_global_scale")]
        if parts[0] not in stored:
            parts.append(name)
        found[name] = _weight_of(stored, module, bits, blocks), parts
    return found


def _weight_of(
    stored: Mapping[str, StoredTensor], module: str, bits: set[int], blocks: tuple[int, int] | None
) -> Packed:
    """Return the weight of a module that has scales.

    Raises CheckpointError where it is in none of the forms.
    """
    name = f"{module}.weight"
    scales, packed = stored[f"{name}_scale"], stored.get(f"{name}_packed")
    if packed is None and name in stored and stored[name].dtype in _PLAIN:
        return Plain(stored[name], scales, stored.get(f"{name}_zero_point"), blocks)
    if packed is not None and packed.dtype == torch.uint8:
        return FourBitFloats(packed, scales, stored.get(f"{name}_global_scale"))
    if packed is not None and f"{name}_shape" in stored:
        return PackedIntegers(stored, module, bits, blocks)
    raise CheckpointError(f"{scales} belongs to no weight that memascend reads")
