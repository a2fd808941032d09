"""FP8 with scales for blocks or tensors, as DeepSeek and Qwen publish it, and MXFP8: bits of transformers' own.

A scale belongs to a block of `weight_block_size`, and blocks at the end of a tensor may be smaller. transformers (5.24)
takes blocks of equal size instead and refuses tensors that have none, among them DeepSeek-V3's `kv_a_proj_with_mqa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend._memascend import Packing
from memascend.errors import CheckpointError
from memascend.formats.quantised.tensors import E2M1, Packed, StoredTensor, unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from memascend._memascend import ExternalFile
    from memascend.formats.safetensors import SafetensorsReader

_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Scales that are read in place: DeepSeek's, Qwen's, MXFP8's.
_SCALE_FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "e8m0"}
#: Names of the scales of a module's `weight`: of DeepSeek and Qwen, of DeepSeek-V4, of Mistral.
_SCALES = ("weight_scale_inv", "scale", "qscale_weight")


class Float8(Packed):
    """Weights in FP8, or two numbers of four bits in a byte, with a grid of scales: (..., rows, width)."""

    def __init__(self, weight: StoredTensor, scales: StoredTensor, blocks: tuple[int, int] | None) -> None:
        """Take the tensors, and the size of blocks that the configuration names.

        Raises CheckpointError where the grid fits no size of blocks.
        """
        self._weight, self._scales = weight, scales
        self._is_packed = weight.dtype == torch.int8
        *outer, rows, width = weight.shape
        super().__init__((*outer, rows, 2 * width if self._is_packed else width))
        grid = scales.shape if len(scales.shape) >= 2 else (1, 1)
        if len(scales.shape) < 2 and scales.shape not in ((), (1,)):
            raise CheckpointError(f"{scales} has shape {scales.shape}, which fits no blocks of {weight.shape}")
        sizes = self.stored_shape[-2:]
        named = blocks or (None, None)
        found = [_block(size, count, name) for size, count, name in zip(sizes, grid[-2:], named, strict=True)]
        if None in found or tuple(grid[:-2]) not in (tuple(outer), ()):
            raise CheckpointError(f"{scales} has shape {scales.shape}, which fits no blocks of {weight.shape}")
        self._grid = grid
        self._block_rows, self._block_width = (size or 1 for size in found)
        #: Scales that all matrices share are stored once.
        self._grids_differ = len(grid) > 2

    def rows(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows in float32: the weight times its scale, as transformers computes it."""
        weight = self._weight.rows(first, count)
        numbers = torch.arange(first, first + count)
        rows = self.stored_shape[-2]
        at = numbers % rows // self._block_rows
        if self._grids_differ:
            at = at + numbers // rows * self._grid[-2]
        begin, end = int(at.min()), int(at.max()) + 1
        scales = _as_float(self._scales.part(begin * self._grid[-1], (end - begin) * self._grid[-1]))
        scales = scales.view(end - begin, self._grid[-1])[at - begin]
        if self._grid[-1] > 1:
            scales = scales.repeat_interleave(self._block_width, dim=1)[:, : self.stored_shape[-1]]
        if self._is_packed:
            return torch.tensor(E2M1)[unpack_nibbles(weight.view(torch.uint8))] * scales
        return weight.to(torch.float32).mul_(scales)

    def in_place(
        self, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing] | None:
        """Return where it lies and how, if it is of e4m3, for weights in bfloat16."""
        *outer, rows, width = self.stored_shape
        # Of several matrices as one: no block may be of two of them.
        as_one = not outer or (self._grids_differ and rows % self._block_rows == 0)
        scales = _SCALE_FORMATS.get(self._scales.dtype)
        if (self._weight.dtype, dtype) != (torch.float8_e4m3fn, torch.bfloat16) or scales is None or not as_one:
            return None
        blocks = self._block_rows, self._block_width
        packing = Packing.rows("e4m3", width, blocks, self._scales.located(externals), scales)
        return *self._weight.located(externals), packing


def _block(size: int, count: int, named: int | None) -> int | None:
    """Return how many of `size` rows or columns each of `count` scales is for; None where that is not clear."""
    if named is not None and -(-size // named) == count:
        return named
    return size // count if count and size % count == 0 else None


def _as_float(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents of two."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.float32) - 127.0).exp2()
    return scales.to(torch.float32)


def find(stored: Mapping[str, StoredTensor], described: Mapping[str, Any]) -> dict[str, tuple[Packed, list[str]]]:
    """Return the tensors of this form by their names in the model, each with the names of its stored tensors.

    Raises CheckpointError for a weight in FP8 that has no scales, ValueError for blocks of no size.
    """
    blocks = described.get("weight_block_size")
    sizes = (int(blocks[0]), int(blocks[1])) if isinstance(blocks, list) and len(blocks) == 2 else None
    if sizes is not None and not all(0 < size < 1 << 31 for size in sizes):
        raise ValueError(f"weight_block_size {blocks} of the configuration is no size of blocks")
    found: dict[str, tuple[Packed, list[str]]] = {}
    for name, tensor in stored.items():
        if tensor.dtype not in (*_FLOATS, torch.int8):
            continue
        module, _, kind = name.rpartition(".")
        names = [f"{module}.{end}" for end in _SCALES] if kind == "weight" else [f"{name}_scale_inv"]
        scales = next((scales for scales in names if scales in stored), None)
        if scales is not None and len(tensor.shape) >= 2:
            found[name] = Float8(tensor, stored[scales], sizes), [name, scales]
        elif tensor.dtype in _FLOATS:
            raise CheckpointError(f"{tensor} is in FP8 without scales ({name}_scale_inv), which only the form's do")
    return found
