"""The quantised tensors of a directory as tensors of floating point, read as a safetensors file is."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from memascend.errors import CheckpointError, MemascendError, first_line
from memascend.formats.quantised import bitsandbytes, columns, compressed, float8, mxfp4
from memascend.formats.quantised.tensors import StoredTensor
from memascend.formats.safetensors import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from memascend._memascend import ExternalFile, Packing
    from memascend.formats.quantised.forms import Form
    from memascend.formats.quantised.tensors import Packed
    from memascend.formats.safetensors import SafetensorsReader

#: Kinds of forms -> the function that finds their tensors.
READERS = {
    "awq": columns.find_awq,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed.find,
    "fp8": float8.find,
    "gptq": columns.find_gptq,
    "mxfp4": mxfp4.find,
}


class QuantisedTensors:
    """Quantised tensors by their names in the model. `entries` say float32: they are read in any dtype."""

    def __init__(self, form: Form, where: Mapping[str, SafetensorsReader], directory: Path) -> None:
        """Find the tensors of a form in open files.

        Raises CheckpointError where tensors do not fit the form.
        """
        self.form, self.path = form, directory
        stored = {key: StoredTensor(reader, key) for key, reader in where.items()}
        assert form.kind is not None, form
        try:
            found = READERS[form.kind](stored, form.described or {})
        except (MemascendError, MemoryError, OSError):
            raise
        except Exception as error:  # sizes of another kind in the configuration, or tensors of another form
            raise CheckpointError(
                f"{directory}: its tensors do not fit {form}: {type(error).__name__}: {first_line(error)}; "
                "download the directory again"
            ) from error
        self._packed: dict[str, Packed] = {name: packed for name, (packed, _) in found.items()}
        self.entries = {name: TensorEntry(torch.float32, packed.shape, 0, 0) for name, packed in self._packed.items()}
        #: Names of the stored tensors of each, and of all.
        self._parts = {name: [part for part in parts if part in where] for name, (_, parts) in found.items()}
        self.stored = set(chain.from_iterable(self._parts.values()))
        self._where = where

    def in_place(
        self, name: str, dtype: torch.dtype, externals: Mapping[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, Packing]:
        """Return where a tensor lies and how, for weights of `dtype` that are dequantised at each use.

        Raises CheckpointError for a form, or a dtype, in which they are not.
        """
        found = self._packed[name].in_place(dtype, externals)
        if found is None:
            raise CheckpointError(
                f"{name} in {self.path} is quantised ({self.form}), and is not read from there as "
                f"{str(dtype).removeprefix('torch.')}: use frozen='store' without frozen_bits"
            )
        return found

    def stored_nbytes(self, name: str) -> int:
        """Return the bytes that a tensor takes as it is published, with its scales."""
        entries = (self._where[part].entries[part] for part in self._parts[name])
        return sum(entry.end - entry.start for entry in entries)

    def read_into(self, name: str, target: torch.Tensor, first: int = 0) -> None:
        """Dequantise a tensor into `target` (contiguous CPU tensor), a piece at a time.

        A `target` with fewer elements gets those from number `first` on.
        """
        self._packed[name].read_into(target, first)
