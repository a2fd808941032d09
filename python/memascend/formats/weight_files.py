"""The open safetensors files of a Hugging Face directory, chosen as transformers does it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json
from memascend.formats.quantised.forms import form_of
from memascend.formats.quantised.reading import QuantisedTensors
from memascend.formats.safetensors import SafetensorsReader

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: Elements of each tensor that a fingerprint of weights has.
_BEGINNING = 1024


class WeightFiles:
    """The open safetensors files of a directory, all headers checked. Quantised tensors appear dequantised."""

    def __init__(self, directory: Path, variant: str | None = None) -> None:
        """Open the files of a `variant` ("fp16" reads model.fp16.safetensors), or those that have none.

        Raises CheckpointError where one is missing or damaged, or a quantised tensor is not of the directory's form.
        """
        self.directory = directory
        self.readers: list[SafetensorsReader] = []
        #: Name of a tensor as it is stored -> the file that holds it.
        self.stored: dict[str, SafetensorsReader] = {}
        #: The quantised tensors, where their form is read; and the reader of each tensor of the model, by name.
        self.quantised: QuantisedTensors | None = None
        self.where: dict[str, SafetensorsReader | QuantisedTensors] = {}
        try:
            for name in _file_names(directory, variant):
                if not (directory / name).is_file():
                    raise CheckpointError(f"{directory / name} is missing, but its index names it")
                reader = SafetensorsReader(directory / name)
                self.readers.append(reader)
                self.stored |= dict.fromkeys(reader.entries, reader)
            self.where |= self.stored
            form = form_of(directory)
            if form is not None and form.kind is not None:
                self._add_quantised(QuantisedTensors(form, self.stored, directory))
        except BaseException:
            self.close()
            raise

    def _add_quantised(self, quantised: QuantisedTensors) -> None:
        """Replace the stored tensors by the quantised tensors that they make."""
        self.quantised = quantised
        for key in quantised.stored:
            del self.where[key]
        self.where |= dict.fromkeys(quantised.entries, quantised)

    def fingerprint(self) -> bytes:
        """Return a fingerprint of these weights without reading all of them: the beginning of each tensor."""
        digest = hashlib.blake2b()
        for key in sorted(self.stored):
            entry = self.stored[key].entries[key]
            beginning = torch.empty(min(math.prod(entry.shape), _BEGINNING), dtype=entry.dtype)
            self.stored[key].read_into(key, beginning)
            digest.update(repr((key, entry.dtype, entry.shape)).encode())
            digest.update(beginning.view(torch.uint8).numpy().data)
        return digest.digest()

    def first_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first floating-point tensor, as transformers takes it for dtype="auto".

        Quantised weights have none: they are read in bfloat16.
        """
        if self.quantised is not None:
            return torch.bfloat16
        entries = sorted(self.readers[0].entries.items(), key=lambda item: item[0])
        return next((entry.dtype for _, entry in entries if entry.dtype.is_floating_point), None)

    def close(self) -> None:
        """Close the files."""
        for reader in self.readers:
            reader.close()


def weights_dtype(directory: Path) -> torch.dtype | None:
    """Return the dtype that most bytes of a directory's floating-point weights are in; None where it has no weights.

    It is bfloat16 for weights that are quantised.
    """
    if not any(directory.glob("*.safetensors")):
        return None
    nbytes: Counter[torch.dtype] = Counter()
    with closing(WeightFiles(directory)) as files:
        if files.quantised is not None:
            return torch.bfloat16
        for reader in files.readers:
            for entry in reader.entries.values():
                nbytes[entry.dtype] += (entry.end - entry.start) * entry.dtype.is_floating_point
    return max(nbytes, key=lambda dtype: nbytes[dtype], default=None)


def files_bytes(directory: Path) -> int | None:
    """Return the bytes of a directory's weight files, without reading any; None where it lacks one."""
    try:
        return sum((directory / name).stat().st_size for name in _file_names(directory, None))
    except (CheckpointError, OSError):
        return None


def _file_names(directory: Path, variant: str | None) -> list[str]:
    """Return the names of the weight files in a directory, chosen as transformers' `from_pretrained` does.

    The configuration may name a file (`transformers_weights`). Else a whole file precedes an index, which transformers
    leaves behind when it saves a sharded model again in one file.
    """
    config_file = directory / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is not None:
        if not isinstance(named, str) or Path(named).name != named:
            raise CheckpointError(f"{config_file}: transformers_weights ({named!r}) is no file of the directory")
        return _indexed(directory / named) if named.endswith(".index.json") else [named]
    whole, index = (_of_variant(name, variant) for name in (WEIGHTS_NAME, INDEX_NAME))
    if (directory / whole).is_file():
        return [whole]
    if (directory / index).is_file():
        return _indexed(directory / index)
    other = next(iter(sorted(directory.glob("*.bin")) + sorted(directory.glob("*.gguf"))), None)
    hint = f"; {other.name} is of another format: save it again with save_pretrained" if other else ""
    raise CheckpointError(f"{directory} has no {whole} and no {index}{hint}")


def _of_variant(name: str, variant: str | None) -> str:
    stem, _, extension = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{extension}"


def _indexed(index: Path) -> list[str]:
    """Return the names of the files that an index names."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise KeyError
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not a safetensors index") from None
    return names
