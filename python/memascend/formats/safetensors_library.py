"""The library safetensors, given tensors that are on SSD: it reads at their addresses, so it is met by name.

Tested with safetensors 0.8. Of a version without these functions nothing is changed, and tensors on SSD are refused.
"""

from __future__ import annotations

from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.autograd.proxies import copy_of, is_proxy, locate
from memascend.formats.safetensors import NAMES, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Functions of `safetensors.torch` that are replaced.
_REPLACED = ("_flatten_as_ptr", "serialize", "serialize_file", "_evaluate_tensors_for_save")
#: The order of dtypes in a file: the widest first, so that all are aligned.
_ORDER = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.float32, torch.float64, torch.int64),
)


class _OnStore(dict):
    """Tensors to be saved, some on SSD. They are read when they are written."""


@lru_cache(maxsize=1)
def meet_safetensors() -> None:
    """Have `safetensors.torch.save_file` and its like write tensors on SSD, one at a time, from now on."""
    try:
        import safetensors.torch
    except ImportError:
        return
    library: Any = safetensors.torch
    if any(not hasattr(library, name) for name in _REPLACED):
        return
    flatten, serialize, serialize_file = library._flatten_as_ptr, library.serialize, library.serialize_file

    @wraps(flatten)
    def flatten_or_wait(tensors: Any, keep_alive_buffer: list[Any]) -> Any:
        if not isinstance(tensors, dict) or not any(map(is_proxy, tensors.values())):
            return flatten(tensors, keep_alive_buffer)
        library._evaluate_tensors_for_save(tensors)
        return _OnStore(tensors)

    @wraps(serialize)
    def serialize_copies(tensors: Any, metadata: Any = None) -> Any:
        if not isinstance(tensors, _OnStore):
            return serialize(tensors, metadata=metadata)
        alive: list[Any] = []
        return serialize(flatten(_copies(tensors), alive), metadata=metadata)

    @wraps(serialize_file)
    def serialize_one_by_one(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        if not isinstance(tensors, _OnStore):
            return serialize_file(tensors, filename, metadata=metadata)
        if any(tensor.dtype not in _ORDER for tensor in tensors.values()):
            alive: list[Any] = []
            return serialize_file(flatten(_copies(tensors), alive), filename, metadata=metadata)
        return _write(tensors, Path(filename), metadata)

    library._flatten_as_ptr = flatten_or_wait
    library.serialize, library.serialize_file = serialize_copies, serialize_one_by_one


def _copies(tensors: _OnStore) -> dict[str, torch.Tensor]:
    return {name: copy_of(tensor) if is_proxy(tensor) else tensor for name, tensor in tensors.items()}


def _write(tensors: _OnStore, path: Path, metadata: dict[str, str] | None) -> None:
    """Write a file as the library does, with the same bytes."""
    names = sorted(tensors, key=lambda name: (-_ORDER.index(tensors[name].dtype), name))
    for name in names:
        if not tensors[name].is_contiguous():
            raise ValueError(f"tensor {name} is not contiguous: call .contiguous() on it before it is saved")
    entries = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
    assert all(dtype in NAMES for dtype, _ in entries.values())
    write_safetensors(path, entries, _values(tensors), metadata)


def _values(tensors: _OnStore) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of every tensor, unit by unit, so that a unit is read once."""

    def unit_of(name: str) -> int:
        return locate(tensors[name])[1].tensor.unit.index if is_proxy(tensors[name]) else -1

    for name in sorted(tensors, key=unit_of):
        yield name, copy_of(tensors[name])
