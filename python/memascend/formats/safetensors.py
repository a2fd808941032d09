"""Safetensors files read and written tensor by tensor, never mapped and never whole in memory."""

from __future__ import annotations

import json
import math
import os
import stat
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from memascend._memascend import ExternalFile
from memascend.errors import CheckpointError, MemascendError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

#: Dtype names of the format (https://huggingface.co/docs/safetensors).
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    # Of quantised weights: numbers, and scales that are powers of two.
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Tensors are converted to another dtype in pieces of this many bytes.
PIECE_BYTES = 8 * 1024 * 1024
HEADER_BYTES_MAX = 100 * 1000 * 1000
#: How the text begins that Git LFS leaves in the place of a large file.
_LFS_POINTER = b"version https://git-lfs"
#: The most dimensions of a tensor in PyTorch, and more than any number of elements or bytes.
DIMENSIONS_MAX, COUNT_MAX = 64, 1 << 63
#: Metadata that transformers expects in a file.
_METADATA = {"format": "pt"}


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype, its shape and its bytes `start .. end` in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsReader:
    """An open safetensors file. Its header is checked against the file's size before anything is read."""

    def __init__(self, path: Path) -> None:
        """Open `path` and read its header.

        Raises CheckpointError if the file cannot be read, is truncated or is not a safetensors file.
        """
        self.path = path
        try:
            # A pipe in the file's place does not have the opening wait for its other end.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, TensorEntry]:
        self._stat = os.fstat(self._fd)
        size = self._stat.st_size
        if not stat.S_ISREG(self._stat.st_mode):
            raise CheckpointError(f"{self.path} is not a file")
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > HEADER_BYTES_MAX:
            remedy = "download it again"
            if os.pread(self._fd, len(_LFS_POINTER), 0) == _LFS_POINTER:
                remedy = "it is a pointer of Git LFS: run `git lfs pull` in its directory"
            raise CheckpointError(f"{self.path} is not a safetensors file: {remedy}")
        if 8 + length > size:
            raise CheckpointError(
                f"{self.path} is truncated: its header needs {8 + length} bytes, the file has {size}; download it again"
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            header.pop("__metadata__", None)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged safetensors header: {error}; download it again") from None
        base = 8 + length
        entries = {name: self._entry(name, value, base) for name, value in header.items()}
        end = max((entry.end for entry in entries.values()), default=base)
        if end > size:
            raise CheckpointError(
                f"{self.path} is truncated: its tensors end at byte {end}, the file has {size}; download it again"
            )
        # The format allows neither gaps nor overlaps.
        expected = base
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != expected:
                raise CheckpointError(
                    f"{self.path} has a damaged header: {name} does not begin where the one before ends; "
                    "download it again"
                )
            expected = entry.end
        if end != size:
            raise CheckpointError(
                f"{self.path} is damaged: {size - end} bytes follow its last tensor; download it again"
            )
        return entries

    def _entry(self, name: str, value: Any, base: int) -> TensorEntry:
        """Check the header's description of one tensor."""
        fields: dict[str, Any] = value if isinstance(value, dict) else {}
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
            raise CheckpointError(f"{self.path} has a damaged header: it does not describe {name}; download it again")
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.path} holds {name} in the unsupported dtype {dtype}")
        entry = TensorEntry(DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])
        if entry.end - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise CheckpointError(
                f"{self.path} has a damaged header: the length of {name} does not fit its shape; download it again"
            )
        return entry

    def read_into(self, name: str, target: torch.Tensor, first: int = 0) -> None:
        """Read a tensor into `target` (contiguous CPU tensor of its shape), converting to its dtype piece by piece.

        A `target` with fewer elements gets those from number `first` on.
        """
        entry = self.entries[name]
        start = entry.start + first * entry.dtype.itemsize
        flat = target.reshape(-1)
        if entry.dtype == target.dtype:
            self._read(flat.view(torch.uint8).numpy().data, start)
            return
        step = PIECE_BYTES // entry.dtype.itemsize
        piece = torch.empty(min(step, max(flat.numel(), 1)), dtype=entry.dtype)
        for begin in range(0, flat.numel(), step):
            part = piece[: min(step, flat.numel() - begin)]
            self._read(part.view(torch.uint8).numpy().data, start + begin * entry.dtype.itemsize)
            flat[begin : begin + part.numel()].copy_(part)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype of the file."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def external(self, direct: bool) -> ExternalFile:
        """Return the file for reading weights in place; it must not change from then on."""
        return ExternalFile(self.path, self._stat.st_size, self._stat.st_mtime_ns, direct)

    def _read(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path} at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} ended early at byte {offset + done}: it changed while it was read")
            done += count

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= DIMENSIONS_MAX
        and all(type(item) is int and 0 <= item < COUNT_MAX for item in value)
    )


def write_safetensors(
    path: Path,
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor | Generator[torch.Tensor, None, None]]],
    metadata: dict[str, str] | None = _METADATA,
) -> None:
    """Write a file with `entries` in its header, and the data of `tensors`, which come in any order.

    A tensor may come as a generator of its rows, in order: some rows at a time. A tensor of three dimensions has the
    rows of its matrices.

    The file appears under its name only when it is complete and on the medium.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offsets: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in entries.items():
        nbytes = dtype.itemsize
        for dimension in shape:
            nbytes *= dimension
        offsets[name] = position
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    # Left by a killed process, or a link that leads elsewhere: it goes, and is not written through.
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            _write(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
            unwritten = set(entries)
            for name, tensor in tensors:
                dtype, shape = entries[name]
                position, elements = 8 + len(text) + offsets[name], 0
                # After an error its traceback holds the generator, which must not hold its target.
                with nullcontext([tensor]) if isinstance(tensor, torch.Tensor) else closing(tensor) as parts:
                    for part in parts:
                        assert part.dtype == dtype and part.shape[1:][-1:] == shape[1:][-1:], name
                        flat = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                        with flat.numpy().data as view:
                            del flat
                            _write(fd, view, position)
                        position += part.nbytes
                        elements += part.numel()
                        del part  # a view of a buffer that the next tensor may need
                assert elements == math.prod(shape), name
                unwritten.remove(name)
                del tensor, parts
            assert not unwritten, f"never written: {sorted(unwritten)}"
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, MemascendError) and error.filename is None:
            error.filename = str(path)  # for an open file the system gives no path
        raise


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
