"""PyTorch Distributed Checkpoints read and written tensor by tensor, and read without trusting their pickles.

Importing this imports torch.distributed.checkpoint, which takes half a second: nothing else here does.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import warnings
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memascend.errors import CheckpointError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator, Mapping

METADATA_NAME = ".metadata"
#: The bytes of each piece of a tensor that tell one checkpoint from another.
_BEGINNING_BYTES = 4096

#: The names that the pickle `.metadata` may contain, beside sizes and dtypes. Only the attributes
#: of each are taken.
_ADMITTED = {
    *(
        (metadata.__name__, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (filesystem.__name__, "_StorageInfo"),
    # The directory of the writer, which is not used; its class has another name in Python 3.13.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    ("torch.serialization", "_get_layout"),
}
#: These classes are taken as they are: no pickle can change them.
_VALUES = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}


class _Record:
    """One object of a pickle. A pickle may set attributes of classes too, so it never gets the real classes."""

    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`, and makes only records of it."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._path = file.name
        self._kinds: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        asked = module, name
        if asked in _ADMITTED:
            return self._kinds.setdefault(asked, type(name, (_Record,), {}))
        if asked in _VALUES:
            return _VALUES[asked]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which the description of a checkpoint has no use for: nothing of it "
            "was loaded"
        )


def _entry(described: Any) -> metadata.TensorStorageMetadata | metadata.BytesStorageMetadata:
    if type(described).__name__ == "BytesStorageMetadata":
        return metadata.BytesStorageMetadata()
    dtype = described.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} is no dtype")
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in described.chunks
    ]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), torch.Size(described.size), chunks)


def _read_metadata(file: Path) -> metadata.Metadata:
    with open(file, "rb") as stream:
        record = _MetadataUnpickler(stream).load()
    if type(record).__name__ != "Metadata":
        raise CheckpointError(f"{file} does not describe a checkpoint")
    entries = {str(key): _entry(described) for key, described in record.state_dict_metadata.items()}
    storage = {
        metadata.MetadataIndex(index.fqn, getattr(index, "offset", None)): filesystem._StorageInfo(
            info.relative_path, info.offset, info.length, getattr(info, "transform_descriptors", None)
        )
        for index, info in record.storage_data.items()
    }
    return metadata.Metadata(entries, storage_data=storage)


class _Reader(FileSystemReader):
    """DCP's reader, with metadata that were read and checked before."""

    def __init__(self, path: Path, checked: metadata.Metadata) -> None:
        super().__init__(path)
        self._checked = checked

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._checked


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, restricted to `weights_only`: by itself it loads any pickle as a value that is not a tensor."""

    def __init__(self, elements: range | None) -> None:
        """Read the pieces of a tensor that have some of `elements`, counted from its first; None is all."""
        super().__init__()
        self._elements = elements

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if self._elements is None:
            return plan
        return replace(plan, items=[item for item in plan.items if self._is_wanted(item)])

    def _is_wanted(self, item: Any) -> bool:
        assert self._elements is not None
        strides = self.state_dict[item.dest_index.fqn].stride()
        places = zip(item.dest_offsets, item.lengths, strides, strict=True)
        first = last = 0
        for offset, length, stride in places:
            first, last = first + offset * stride, last + (offset + length - 1) * stride
        return first < self._elements.stop and last >= self._elements.start

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class DistributedReader:
    """An open checkpoint: its metadata were read, its tensors were not."""

    def __init__(self, path: Path) -> None:
        """Read the metadata of the checkpoint in `path`.

        Raises CheckpointError if there is none, or it is damaged, or its pickle names something unexpected.
        """
        self.path = path
        file = path / METADATA_NAME
        try:
            checked = _read_metadata(file)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{path} has no {METADATA_NAME}: it is not a PyTorch Distributed Checkpoint"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise any kind
            raise CheckpointError(f"{file} is damaged: {error}") from None
        self.entries = checked.state_dict_metadata
        self._storage = checked.storage_data
        self._reader = _Reader(path, checked)
        self._sizes: dict[str, int] = {}

    def shown(self, key: str) -> torch.Tensor | None:
        """Return a tensor without contents of the shape and dtype of `key`; None if that is no tensor."""
        entry = self.entries[key]
        if isinstance(entry, metadata.BytesStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def problem(self, key: str) -> str | None:
        """Return the fault of the files that hold `key`, as metadata and file sizes show it, or None."""
        try:
            return self._problem(key)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
            return f"{METADATA_NAME} is damaged where it describes {key}"

    def _problem(self, key: str) -> str | None:
        entry = self.entries[key]
        self.shown(key)
        indices = [metadata.MetadataIndex(key)]
        if isinstance(entry, metadata.TensorStorageMetadata):
            indices = [metadata.MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
            inside = all(
                len(chunk.sizes) == len(chunk.offsets) == len(entry.size)
                and all(
                    min(start, length) >= 0 and start + length <= size
                    for start, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
                )
                for chunk in entry.chunks
            )
            parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if not inside or parts != math.prod(entry.size) or len(set(indices)) != len(indices):
                return f"{key} is not there in full"
        for index in indices:
            info = self._storage.get(index)
            if info is None:
                return f"{key} is in no file"
            name = info.relative_path
            if Path(name).name != name:
                return f"{key} is said to be outside of it, in {name}"
            if name not in self._sizes:
                file = self.path / name
                self._sizes[name] = file.stat().st_size if file.is_file() else -1
            if not 0 <= info.offset <= info.offset + info.length <= self._sizes[name]:
                state = "missing" if self._sizes[name] < 0 else "truncated"
                return f"{name}, which holds {key}, is {state}"
        return None

    def fingerprint(self) -> bytes:
        """Return a digest of the metadata, and of the beginning of every piece of a tensor."""
        digest = hashlib.blake2b((self.path / METADATA_NAME).read_bytes())
        pieces = sorted({(info.relative_path, info.offset, info.length) for info in self._storage.values()})
        for name, offset, length in pieces:
            with suppress(OSError), open(self.path / name, "rb") as file:  # Missing entries are not read here.
                file.seek(offset)
                digest.update(file.read(min(length, _BEGINNING_BYTES)))
        return digest.digest()

    def read_into(self, key: str, target: torch.Tensor, elements: range | None = None) -> None:
        """Read a tensor into one of its shape, converting to its dtype.

        Only pieces of the files that have some of `elements`, counted from the tensor's first, are read; None is all.
        """
        self._load(key, target, elements)

    def read(self, key: str, elements: range | None = None) -> Any:
        """Return a tensor or another value; of a tensor with `elements` the rest may be zeros, see `read_into`."""
        shown = self.shown(key)
        return self._load(key, None if shown is None else torch.zeros(shown.shape, dtype=shown.dtype), elements)

    def _load(self, key: str, target: torch.Tensor | None, elements: range | None) -> Any:
        values: dict[str, Any] = {key: target}
        if elements is not None and not elements:
            return target
        try:
            with _quiet():
                load(values, storage_reader=self._reader, planner=_LoadPlanner(elements), no_dist=True)
        except pickle.UnpicklingError as error:
            # PyTorch's message recommends to load the pickle anyway.
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"a pickle that names {named[1]}" if named else "a damaged pickle"
            raise CheckpointError(f"{key} of {self.path} is {what}: it was not loaded") from None
        except Exception as error:  # a damaged archive can raise any kind
            first = str(error).partition("\n")[0]
            raise CheckpointError(f"cannot read {key} of {self.path}: {first}") from error
        return values[key]


class _StreamingPlanner(DefaultSavePlanner):
    """DCP's planner, which makes a tensor only when it is about to be written."""

    def __init__(self, sources: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self._sources = sources

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        source = self._sources.get(index.fqn)
        return super().lookup_object(index) if source is None else source()


def write_distributed(path: Path, state: dict[str, Any], sources: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """Write a checkpoint of `state` into the directory `path`.

    A tensor of `state` gives shape and dtype; the function under its keys, joined by dots, in `sources` returns its
    values when it is about to be written. One or two tensors are in memory at a time.
    """
    # DCP holds the contents of one file until it is written, and with a device present reads ahead.
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=1, per_thread_copy_ahead=0)
    with _quiet():
        save(state, storage_writer=writer, planner=_StreamingPlanner(sources), no_dist=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Have DCP raise the error itself rather than a report of all ranks, and not warn that it runs on one rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointException as error:
        # DCP's own class is not an Exception.
        failure = next(iter(error.failures.values()))[0]
        # After a failed write, torch.save finds its archive unfinished and raises a RuntimeError
        # about that.
        cause: BaseException | None = failure
        while type(cause) is RuntimeError:
            cause = cause.__context__
        raise (cause if isinstance(cause, OSError) else failure) from None
