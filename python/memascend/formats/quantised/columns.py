"""AWQ and GPTQ: whole numbers of a few bits in words of 32, of matrices (in, out): bits of their libraries' functions.

Both compute in the dtype of the scales as they are published, which is float16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend._memascend import FILE_WINDOW_BYTES, Packing
from memascend.errors import CheckpointError
from memascend.formats.quantised.tensors import Packed, StoredTensor, unpack_words

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from memascend._memascend import ExternalFile
    from memascend.formats.safetensors import SafetensorsReader

#: Where the columns 0 .. 7 lie in a word of AWQ's.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: Bytes of a row of words that are read in place: a window has room for it.
_ROW_BYTES_MAX = FILE_WINDOW_BYTES // 2


class Awq(Packed):
    """AWQ's packing for GEMM: `qweight` (in, out / 8), `qzeros` (groups, out / 8), `scales` (groups, out)."""

    transposed = True

    def __init__(self, weight: StoredTensor, zeros: StoredTensor, scales: StoredTensor) -> None:
        """Take the tensors. Raises CheckpointError where their shapes do not fit."""
        groups, width = scales.shape if len(scales.shape) == 2 else (0, 0)
        rows = weight.shape[0] if weight.shape else 0
        if not groups or weight.shape != (rows, width // 8) or zeros.shape != (groups, width // 8) or rows % groups:
            raise CheckpointError(f"{weight} has shape {weight.shape}, and its scales {scales.shape}")
        super().__init__((rows, width))
        self._weight, self._zeros, self._scales = weight, zeros, scales
        self._group = rows // groups

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in the dtype of the scales."""
        at = torch.arange(first, first + count) // self._group
        begin, groups = int(at[0]), int(at[-1]) + 1 - int(at[0])
        zeros = _in_order(self._zeros.rows(begin, groups))[at - begin]
        numbers = _in_order(self._weight.rows(first, count)).sub_(zeros)
        return numbers * self._scales.rows(begin, groups)[at - begin]

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, if its scales are in float16, for weights in bfloat16."""
        rows, width = self.stored_shape
        if self._scales.dtype != torch.float16 or dtype != torch.bfloat16 or width % 8:
            return None
        if width // 2 > _ROW_BYTES_MAX:
            return None
        beside = self._zeros.located(externals), self._scales.located(externals)
        return *self._weight.located(externals), Packing.words(rows, width, self._group, *beside, None)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of four bits in words of AWQ's, by their columns."""
    return unpack_words(words, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)


class Gptq(Packed):
    """GPTQ: `qweight` (in bits / 32, out), `qzeros` (groups, out bits / 32), `scales` (groups, out), `g_idx` (in)."""

    transposed = True

    def __init__(self, tensors: Mapping[str, StoredTensor], bits: int, offset: int) -> None:
        """Take the tensors by their kinds, the bits of a number, and the offset of zeros.

        Raises CheckpointError where their shapes do not fit.
        """
        weight, scales, zeros = tensors["qweight"], tensors["scales"], tensors["qzeros"]
        self._per_word = 32 // bits
        groups, width = scales.shape if len(scales.shape) == 2 else (0, 0)
        rows = weight.shape[0] * self._per_word if weight.shape else 0
        if not groups or weight.shape[1:] != (width,) or zeros.shape != (groups, width // self._per_word):
            raise CheckpointError(f"{weight} has shape {weight.shape}, and its scales {scales.shape}")
        super().__init__((rows, width))
        self._weight, self._scales, self._zeros, self._bits = weight, scales, zeros, bits
        # Added to words, as gptqmodel does: a zero with all bits set carries into the next one.
        added = sum(offset << shift for shift in range(0, 32, bits))
        self._added = added - (1 << 32) if added >= 1 << 31 else added
        self._index = order = tensors.get("g_idx")
        self._order = torch.arange(rows) // -(-rows // groups) if order is None else order.whole().long()
        if self._order.shape != (rows,) or int(self._order.min()) < 0 or int(self._order.max()) >= groups:
            raise CheckpointError(f"{order or weight} names groups that {scales} does not have")

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in the dtype of the scales."""
        words = first // self._per_word
        packed = self._weight.rows(words, -(-(first + count) // self._per_word) - words)
        numbers = unpack_words(packed.t().contiguous(), self._bits).t()[first - words * self._per_word :][:count]
        groups, at = self._order[first : first + count].unique(return_inverse=True)
        begin, end = int(groups[0]), int(groups[-1]) + 1
        scales = self._scales.rows(begin, end - begin)[groups - begin][at]
        zeros = unpack_words(self._zeros.rows(begin, end - begin)[groups - begin] + self._added, self._bits)[at]
        return scales * (numbers - zeros)

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, if its scales are in float16, for weights in bfloat16."""
        rows, width = self.stored_shape
        groups = self._scales.shape[0]
        if self._scales.dtype != torch.float16 or dtype != torch.bfloat16 or rows % groups:
            return None
        if width % self._per_word or 4 * width > _ROW_BYTES_MAX:
            return None
        index = None
        if not self._order.equal(torch.arange(rows) // (rows // groups)):
            if self._index is None or self._index.dtype != torch.int32:
                return None
            index = self._index.located(externals)
        beside = self._zeros.located(externals), self._scales.located(externals)
        added = self._added % (1 << 32)
        packing = Packing.words(rows, width, rows // groups, *beside, added, self._bits, index)
        return *self._weight.located(externals), packing


def find_awq(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of AWQ by their names in the model, each with the names of its stored tensors."""
    found: dict[str, tuple[Packed, list[str]]] = {}
    for module, parts in _modules(stored):
        found[f"{module}.weight"] = (
            Awq(*(stored[part] for part in parts)),
            parts,
        )
    return found


def find_gptq(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of GPTQ by their names in the model, each with the names of its stored tensors."""
    bits = int(described.get("bits", 4))
    offset = 0 if str(described.get("checkpoint_format")).lower() == "gptq_v2" else 1
    found: dict[str, tuple[Packed, list[str]]] = {}
    for module, parts in _modules(stored):
        names = [*parts, *([f"{module}.g_idx"] if f"{module}.g_idx" in stored else [])]
        tensors = {name.rpartition(".")[2]: stored[name] for name in names}
        found[f"{module}.weight"] = Gptq(tensors, bits, offset), names
    return found


def _modules(stored: Mapping[str, StoredTensor]) -> list[tuple[str, list[str]]]:
    """Return (module, names of its qweight, qzeros and scales) of every module that is packed.

    Raises CheckpointError where one of them is missing.
    """
    modules = [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]
    found = [(module, [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]) for module in modules]
    missing = next((part for _, parts in found for part in parts if part not in stored), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing beside {missing.rpartition('.')[0]}.qweight")
    return found
