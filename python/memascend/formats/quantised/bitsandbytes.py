"""bitsandbytes' NF4, FP4 and int8: bits of its own functions, on the CPU."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch

from memascend._memascend import Packing
from memascend.errors import CheckpointError
from memascend.formats.quantised.tensors import Packed, StoredTensor, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from memascend._memascend import ExternalFile
    from memascend.formats.safetensors import SafetensorsReader

_STATE = ".quant_state.bitsandbytes__"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
#: 1 / 127, as bitsandbytes rounds it.
_PER_STEP = 7.874015718698502e-3


class FourBits(Packed):
    """NF4 or FP4: numbers of a code, times the largest of a block of elements; that may be quantised once more."""

    def __init__(self, stored: Mapping[str, StoredTensor], name: str, state: StoredTensor) -> None:
        """Take the tensors of the weight `name`. Raises CheckpointError where they do not fit."""
        try:
            values = json.loads(bytes(state.whole().tolist()))
            self._block, self._dtype = int(values["blocksize"]), _DTYPES[values["dtype"]]
            shape = tuple(int(size) for size in values["shape"])
            self._weight, self._largest = stored[name], stored[f"{name}.absmax"]
            self._code = stored[f"{name}.quant_map"].whole().float()
            self._nested = f"{name}.nested_absmax" in stored
            if self._nested:
                self._nested_block, self._offset = int(values["nested_blocksize"]), float(values["nested_offset"])
                self._nested_factors = stored[f"{name}.nested_absmax"]
                self._nested_largest = self._nested_factors.whole().float()
                self._nested_code = stored[f"{name}.nested_quant_map"].whole().float()
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{state} does not describe a weight of bitsandbytes: {error!r}") from None
        nbytes = math.prod(self._weight.shape) * self._weight.dtype.itemsize
        blocks = -(-math.prod(shape) // self._block) if self._block > 0 else 0
        if len(shape) < 2 or nbytes != -(-math.prod(shape) // 2) or math.prod(self._largest.shape) != blocks:
            raise CheckpointError(f"{state} does not fit {self._weight}, of shape {self._weight.shape}")
        super().__init__(shape)

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in the dtype that the weight had before."""
        width = self.stored_shape[-1]
        begin, end = first * width, (first + count) * width
        # From the beginning of a block, which begins at a byte.
        block = begin // self._block
        at = block * self._block
        itemsize = self._weight.dtype.itemsize
        first_byte = at // 2 // itemsize * itemsize
        units = -(-(-(-end // 2) - first_byte) // itemsize)
        packed = self._weight.part(first_byte // itemsize, units).view(torch.uint8)[at // 2 - first_byte :]
        codes = unpack_nibbles(packed[: -(-end // 2) - at // 2], high_first=True)
        largest = self._scales(block, -(-end // self._block))
        values = self._code[codes].mul_(largest.repeat_interleave(self._block)[: len(codes)])
        return values[begin - at : end - at].to(self._dtype).view(count, width)

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, if it was quantised from bfloat16, for weights in that."""
        largest = torch.uint8 if self._nested else torch.float32
        plain = self._dtype == dtype == torch.bfloat16 and self._largest.dtype == largest
        if not plain or 4096 % self._block or math.prod(self.stored_shape) % 2:
            return None
        nested = None
        if self._nested:
            if self._nested_factors.dtype != torch.float32:
                return None
            factors = self._nested_factors.located(externals)
            nested = self._nested_block, factors, self._nested_code.tolist(), self._offset
        packing = Packing.four_bits(self._block, self._code.tolist(), self._largest.located(externals), nested)
        return *self._weight.located(externals), packing

    def _scales(self, begin: int, end: int) -> torch.Tensor:
        """Return the factors of blocks `begin .. end`, in float32."""
        largest = self._largest.part(begin, end - begin)
        if not self._nested:
            return largest.float()
        outer = self._nested_largest[torch.arange(begin, end) // self._nested_block]
        return self._nested_code[largest.int()].mul_(outer).add_(self._offset)


class EightBits(Packed):
    """int8 of LLM.int8(): whole numbers, times the largest of the row."""

    def __init__(self, weight: StoredTensor, largest: StoredTensor) -> None:
        """Take the weight and the largest of each row. Raises CheckpointError where they do not fit."""
        if len(weight.shape) != 2 or math.prod(largest.shape) != weight.shape[0]:
            raise CheckpointError(f"{largest} has shape {largest.shape}, which does not fit {weight.shape}")
        super().__init__(weight.shape)
        self._weight, self._largest = weight, largest

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in float32."""
        return self._weight.rows(first, count) * self._largest.part(first, count).view(-1, 1) * _PER_STEP

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, for weights in bfloat16."""
        if (self._weight.dtype, self._largest.dtype, dtype) != (torch.int8, torch.float32, torch.bfloat16):
            return None
        width = self.stored_shape[1]
        scales = self._largest.located(externals)
        packing = Packing.rows("int8", width, (1, width), scales, step=_PER_STEP)
        return *self._weight.located(externals), packing


def find(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of these forms by their names in the model, each with the names of its stored tensors.

    Raises CheckpointError for int8 in an order of elements that is of a GPU.
    """
    found: dict[str, tuple[Packed, list[str]]] = {}
    for key, tensor in stored.items():
        name, state, _ = key.partition(_STATE)
        if state and name in stored:
            found[name] = FourBits(stored, name, tensor), [name, key, *(f"{name}.{part}" for part in _PARTS)]
        elif key.endswith(".SCB") and (name := key.removesuffix("SCB") + "weight") in stored:
            order = key.removesuffix("SCB") + "weight_format"
            if order in stored and int(stored[order].whole()) != 0:
                raise CheckpointError(f"{stored[order]} names an order of elements that is not by rows")
            found[name] = EightBits(stored[name], tensor), [name, key, order]
    return found
