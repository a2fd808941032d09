"""The file: its tensors in the order of the model's, converted and written in pieces."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError
from memascend.formats.gguf.architectures import INSTEAD, Described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import gguf

    from memascend.formats.weight_files import WeightFiles

#: Elements that are converted at once: 16 MiB of float32, and as much again for the result.
_PIECE = 4 << 20
#: Buffers that old checkpoints hold, and llama.cpp computes.
_COMPUTED = (".rotary_emb.inv_freq",)
_LAYER = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    #: Its name in the model directory, or its values where it is in none.
    source: str | torch.Tensor
    #: Added to each element.
    offset: float = 0.0
    #: Rows of a head, whose first half is to alternate with the second; 0 for rows that stay in their order.
    head_rows: int = 0

    @property
    def is_vector(self) -> bool:
        """Whether it is float32 in the file, whatever the matrices are."""
        return len(self.shape) == 1 or self.name.endswith("_norm.weight")

    def type_for(self, kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
        """Return the type that it is written in, in a file of the type `kind`."""
        import gguf

        if self.is_vector:
            return gguf.GGMLQuantizationType.F32
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        return gguf.GGMLQuantizationType.F16 if self.shape[-1] % block else kind


class Weights:
    """The tensors of a model directory under their names in the file."""

    def __init__(self, files: WeightFiles, described: Described, *, tied: bool) -> None:
        """Name the tensors of `files`. Where the head is `tied` to the embedding, it is not written.

        Raises CheckpointError for a tensor that the architecture has no name for.
        """
        import gguf

        self._files = files
        #: The architecture's name in the file.
        self.architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[described.architecture.name]]
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[described.architecture.name], described.layers)
        self.tensors = [Tensor(name, tuple(values.shape), values) for name, values in described.tensors.items()]
        for key, reader in files.where.items():
            if key.endswith(_COMPUTED) or (tied and key == "lm_head.weight"):
                continue
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise CheckpointError(f"{reader.path} holds {key}, which GGUF has no name for: {INSTEAD}")
            architecture = described.architecture
            turned = architecture.interleaves and _LAYER.fullmatch(key)
            offset = architecture.norm_offset if key.endswith("norm.weight") else 0.0
            shape = reader.entries[key].shape
            self.tensors.append(Tensor(name, shape, key, offset, described.head_dim if turned else 0))

    @property
    def vocabulary(self) -> int:
        """The rows of the embedding."""
        return next(tensor.shape[0] for tensor in self.tensors if tensor.name == "token_embd.weight")

    def pieces(self, tensor: Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor, some rows at a time, as float32."""
        if isinstance(tensor.source, torch.Tensor):
            yield tensor.source
            return
        rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
        step = max(1, _PIECE // max(width, 1))
        if tensor.head_rows:
            step = -(-step // tensor.head_rows) * tensor.head_rows
        for first in range(0, rows, step):
            piece = torch.empty((min(step, rows - first), *tensor.shape[1:]), dtype=torch.float32)
            self._files.where[tensor.source].read_into(tensor.source, piece, first * width)
            if tensor.offset:
                piece += tensor.offset
            yield _interleaved(piece, tensor.head_rows) if tensor.head_rows else piece


def _interleaved(rows: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Return the rows of each head interleaved: a row of the first half, then one of the second.

    Args:
        rows: shape (heads * head_rows, ...).
    """
    halves = rows.view(-1, 2, head_rows // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_file(
    path: Path, weights: Weights, entries: list[tuple[str, Any]], kind: str, tell: Callable[[str], None]
) -> None:
    """Write a GGUF file of `weights`, whose matrices are of the type `kind`, and of `entries` about the model.

    Raises CheckpointError for a weight that is no finite number, or beyond the range of float16.
    """
    import gguf

    wanted = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, weights.architecture)
    for name, value in [*entries, ("file_type", _file_type(wanted))]:
        if name == "rope_scaling_type":
            value = gguf.RopeScalingType(value)
        getattr(writer, f"add_{name}")(value)
    if kind == "Q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = {tensor.name: tensor.type_for(wanted) for tensor in weights.tensors}
    for tensor in weights.tensors:
        nbytes = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, types[tensor.name]))
        writer.add_tensor_info(tensor.name, tensor.shape, torch.zeros(0).numpy().dtype, nbytes, types[tensor.name])
    others = sum(not tensor.is_vector and types[tensor.name] != wanted for tensor in weights.tensors)
    if others:
        tell(f"{others} matrices are written in float16: their rows cannot be divided into blocks of {kind}")
    try:
        _write(writer, weights, types)
    finally:
        writer.close()


def _file_type(kind: gguf.GGMLQuantizationType) -> int:
    import gguf

    name = "ALL_F32" if kind is gguf.GGMLQuantizationType.F32 else f"MOSTLY_{kind.name}"
    return gguf.LlamaFileType[name].value


def _write(writer: gguf.GGUFWriter, weights: Weights, types: dict[str, gguf.GGMLQuantizationType]) -> None:
    import gguf

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (out,) = writer.fout
    writer.write_padding(out, out.tell())
    for tensor in weights.tensors:
        begin, kind = out.tell(), types[tensor.name]
        for piece in weights.pieces(tensor):
            _check_values(tensor.name, piece, kind is gguf.GGMLQuantizationType.F16)
            gguf.quantize(piece.numpy(), kind).tofile(out)
        written = out.tell() - begin
        assert written == math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, kind)), tensor.name
        writer.write_padding(out, written)


def _check_values(name: str, piece: torch.Tensor, in_float16: bool) -> None:
    """Raise CheckpointError for values that the file cannot hold, or that make every answer nonsense."""
    low, high = (bound.item() for bound in piece.aminmax()) if piece.numel() else (0.0, 0.0)
    largest = max(-low, high)
    if not math.isfinite(largest):
        raise CheckpointError(
            f"{name} has weights that are infinite or no numbers: the model is damaged, or its training went wrong"
        )
    if in_float16 and largest > torch.finfo(torch.float16).max:
        raise CheckpointError(f"{name} has a weight beyond 65504, which float16 cannot hold: give --dtype bfloat16")
