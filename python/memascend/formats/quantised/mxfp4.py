"""MXFP4 as gpt-oss is published: experts in four bits with a power of two for each 32: bits of transformers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend._memascend import FILE_WINDOW_BYTES, Packing
from memascend.errors import CheckpointError
from memascend.formats.quantised.tensors import E2M1, Packed, StoredTensor, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from memascend._memascend import ExternalFile
    from memascend.formats.safetensors import SafetensorsReader

#: Elements that share a power of two, as they are published.
_BLOCK = 32


class Mxfp4(Packed):
    """Experts' weights: blocks (experts, out, groups, 16) and scales (experts, out, groups), of (experts, in, out)."""

    transposed = True

    def __init__(self, blocks: StoredTensor, scales: StoredTensor) -> None:
        """Take the tensors. Raises CheckpointError where their shapes do not fit."""
        if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
            raise CheckpointError(f"{blocks} has shape {blocks.shape}, and its scales {scales.shape}")
        self._blocks, self._scales = blocks, scales
        experts, rows, self._groups, nbytes = blocks.shape
        super().__init__((experts, rows, self._groups * nbytes * 2))

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in `dtype`, in which the powers of two are multiplied too."""
        groups = self._groups
        blocks = self._blocks.rows(first * groups, count * groups)
        exponents = self._scales.part(first * groups, count * groups).to(torch.int32).sub_(127).view(-1, 1)
        values = torch.tensor(E2M1, dtype=dtype)[unpack_nibbles(blocks)]
        return torch.ldexp(values, exponents, out=values).view(count, -1)

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, for weights in bfloat16."""
        _, rows, width = self.stored_shape
        dtypes = self._blocks.dtype, self._scales.dtype, dtype
        fits = width == self._groups * _BLOCK and width <= FILE_WINDOW_BYTES // 2
        if dtypes != (torch.uint8, torch.uint8, torch.bfloat16) or not fits:
            return None
        return *self._blocks.located(externals), Packing.mxfp4(rows, width, self._scales.located(externals))


def find(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of this form by their names in the model, each with the names of its stored tensors."""
    found: dict[str, tuple[Packed, list[str]]] = {}
    for key, tensor in stored.items():
        name = key.removesuffix("_blocks")
        if name != key and f"{name}_scales" in stored:
            found[name] = Mxfp4(tensor, stored[f"{name}_scales"]), [key, f"{name}_scales"]
    return found
