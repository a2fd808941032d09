"""The weights of a Hugging Face directory: its safetensors files, and the parameters that their tensors make."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json
from memascend.formats.quantised.forms import form_of, form_of_names
from memascend.formats.quantised.reading import QuantisedTensors
from memascend.formats.safetensors import PIECE_BYTES, SafetensorsReader
from memascend.formats.transformers_models import Conversion, Mapping, empty_model, untie
from memascend.layout.ties import ties_of

if TYPE_CHECKING:
    from memascend.layout.units import Place, Unit

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: Elements of each tensor that a fingerprint of weights has.
_BEGINNING = 1024
_log = logging.getLogger("memascend")


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
        #: The tensors that are quantised, where their form is read; and what reads each tensor of the model, by name.
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
        """Have quantised tensors stand in the place of what they are stored as."""
        self.quantised = quantised
        for key in quantised.stored:
            del self.where[key]
        self.where |= dict.fromkeys(quantised.entries, quantised)

    def fingerprint(self) -> bytes:
        """Return what tells these weights from others without reading all of them: the beginning of each tensor."""
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

        Quantised weights have none: bfloat16 is what they are read in.
        """
        if self.quantised is not None:
            return torch.bfloat16
        entries = sorted(self.readers[0].entries.items(), key=lambda item: item[0])
        return next((entry.dtype for _, entry in entries if entry.dtype.is_floating_point), None)

    def close(self) -> None:
        """Close the files."""
        for reader in self.readers:
            reader.close()


def empty_model_of(config: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Return the empty model of a configuration, whose parameters are tied as the weights in `directory` are.

    Without weights there, as the configuration says.
    """
    model = empty_model(config, directory, dtype)
    if ties_of(model) and directory.is_dir() and any(directory.glob("*.safetensors")):
        with closing(WeightFiles(directory)) as files:
            Sources(model, files)
    return model


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
    """Return the bytes of a directory's weight files, of which nothing is read; None where it lacks one."""
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


class Sources:
    """The checkpoint tensors of every parameter, renamed, merged and split as transformers does it.

    Conversions run on the tensors of one parameter at a time.
    """

    def __init__(self, model: nn.Module, files: WeightFiles) -> None:
        """Map the tensors of `files` to the parameters of `model`.

        Raises CheckpointError for a parameter without a tensor, or a tensor of another shape or kind of dtype.
        """
        self.model, self.files = model, files
        self._expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        mapping = Mapping(model, self._expected, sorted(files.where, key=_natural_key))
        self._plain, self._conversions = mapping.plain, mapping.conversions
        self._untie()
        #: Indices of transformers' conversions that the checkpoint needed.
        self.conversions = mapping.used
        #: Parameters that a conversion made beyond the one that was read.
        self._made: dict[str, torch.Tensor] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        #: A parameter's first name -> all its names: a tied parameter may be stored under any of
        #: them.
        self._aliases = {aliases[0]: aliases for aliases in names.values()}
        self._check()

    def _untie(self) -> None:
        """Untie what the configuration ties and the files hold with different values, as transformers does."""
        keys = dict(self._plain)
        for target, source in ties_of(self.model).items():
            if source not in keys and target in keys:
                keys[source] = keys[target]
            elif source in keys and target in keys and not self._are_equal(target, keys[source], keys[target]):
                _log.warning(
                    "%s: the configuration ties %s to %s, but the files hold both, with different values: they are "
                    "not tied (tie_word_embeddings=false in config.json would say so)",
                    self.files.directory,
                    target,
                    source,
                )
                untie(self.model, [target])
        self._expected |= dict(self.model.named_parameters(remove_duplicate=False))

    def _are_equal(self, name: str, first: str, second: str) -> bool:
        """Whether two tensors of the files have the same values, in the dtype of the parameter `name`."""
        keys = (first, second)
        shapes = {self.files.where[key].entries[key].shape for key in keys}
        if first == second or len(shapes) > 1:
            return first == second
        numel = math.prod(shapes.pop())
        step = PIECE_BYTES // self._expected[name].dtype.itemsize
        pieces = torch.empty(2, min(step, numel), dtype=self._expected[name].dtype)
        for begin in range(0, numel, step):
            parts = pieces[:, : min(step, numel - begin)]
            for key, part in zip(keys, parts, strict=True):
                self.files.where[key].read_into(key, part, begin)
            if not torch.equal(*parts):
                return False
        return True

    def _check(self) -> None:
        targets = set(self._plain)
        for conversion in self._conversions.values():
            targets.update(conversion.targets)
        missing = [first for first, aliases in self._aliases.items() if not targets.intersection(aliases)]
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            form = form_of_names(self.files.where)
            quantised = (
                f": some of its tensors are quantised ({form}), and no quantization_config in its config.json says how"
            )
            raise CheckpointError(
                f"{self.files.directory} lacks weights that {type(self.model).__name__} needs: {listed}"
                f"{quantised if form else ''}"
            )
        # A buffer made from a parameter is on the meta device, as the parameter is.
        unmade = next(
            (name for name, value in self.model.named_buffers() if value.is_meta and name not in targets), None
        )
        if unmade is not None:
            raise CheckpointError(
                f"{self.files.directory} lacks the buffer {unmade}, which {type(self.model).__name__} makes from its "
                "weights: load the model with transformers, then call memascend.offload"
            )
        for name, key in self._plain.items():
            parameter = self._expected.get(name)
            if parameter is None:
                continue
            self._check_dtype(parameter, key)
            reader = self.files.where[key]
            if tuple(parameter.shape) != reader.entries[key].shape:
                raise CheckpointError(
                    f"{key} in {reader.path} has shape {reader.entries[key].shape}, the configuration says "
                    f"{tuple(parameter.shape)}"
                )
        for conversion in self._conversions.values():
            for key, _ in conversion.parts:
                self._check_dtype(None, key)

    def _check_dtype(self, parameter: torch.Tensor | None, key: str) -> None:
        reader = self.files.where[key]
        dtype = reader.entries[key].dtype
        if not dtype.is_floating_point and (parameter is None or parameter.is_floating_point()):
            raise CheckpointError(
                f"{key} in {reader.path} is of dtype {str(dtype).removeprefix('torch.')}, as in a quantised "
                "checkpoint, and no quantization_config in its config.json says how: memascend trains floating-point "
                "weights"
            )

    def locate(self, units: list[Unit], direct: bool) -> None:
        """Have every parameter read from its bytes in its file, past the page cache if `direct`.

        Raises CheckpointError for a parameter that needs a conversion or another dtype.
        """
        externals = {reader: reader.external(direct) for reader in self.files.readers}
        for place in (place for unit in units for place in unit.places):
            key = next((self._plain[name] for name in self._aliases[place.name] if name in self._plain), None)
            if key is None:
                raise CheckpointError(
                    f"{place.name} is made of several tensors in {self.files.directory}, so that it cannot be read "
                    "from there as it is: use frozen='store'"
                )
            reader = self.files.where[key]
            if isinstance(reader, QuantisedTensors):
                raise CheckpointError(
                    f"{key} in {reader.path} is quantised ({reader.form}), so that it cannot be read from there as it "
                    "is: use frozen='store'"
                )
            entry = reader.entries[key]
            if entry.dtype != place.dtype:
                stored, wanted = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, place.dtype))
                raise CheckpointError(
                    f"{key} in {reader.path} is of dtype {stored}, the model's is {wanted}: frozen='files' reads "
                    f"weights as they are; use dtype={stored!r} or frozen='store'"
                )
            place.source = externals[reader], entry.start

    def read(self, place: Place, target: torch.Tensor, first_row: int | None = None) -> None:
        """Fill `target` with the values of a parameter, or with its rows from `first_row` on."""
        first = (first_row or 0) * math.prod(place.shape[1:])
        self._read(place, target, first, rows_follow=first_row is not None and first + target.numel() < place.numel)

    def read_share(self, place: Place, target: torch.Tensor) -> None:
        """Fill of `target`, which has room for a whole parameter, the elements that one rank's store has.

        Only those are read, but for a parameter that a conversion makes.
        """
        first, _, count = place.stored
        self._read(place, target.view(-1)[first : first + count], first)

    def _read(self, place: Place, target: torch.Tensor, first: int, rows_follow: bool = False) -> None:
        """Fill `target` with the elements of a parameter from number `first` on."""
        for name in self._aliases[place.name]:
            if name in self._plain:
                key = self._plain[name]
                self.files.where[key].read_into(key, target, first)
                return
            if name in self._made or self._convert(name):
                made = self._made.pop(name)
                if made.shape != place.shape:
                    raise CheckpointError(
                        f"the tensors in {self.files.directory} that make {name} give shape {tuple(made.shape)}, the "
                        f"configuration says {tuple(place.shape)}"
                    )
                target.copy_(made.reshape(-1)[first : first + target.numel()].view(target.shape))
                if rows_follow:
                    self._made[name] = made
                return
        raise CheckpointError(f"no weights for {place.name} in {self.files.directory}")

    def _convert(self, wanted: str) -> bool:
        """Run the conversion that makes the parameter `wanted`; False where there is none."""
        first = next((name for name, made_by in self._conversions.items() if wanted in made_by.targets), None)
        if first is None:
            return False
        conversion: Conversion = self._conversions[first]
        for key, pattern in conversion.parts:
            conversion.add_tensor(key, pattern, self._whole(key, self._expected[first].dtype))
        try:
            self._made |= conversion.convert()
        except Exception as error:  # stacking tensors of unequal shapes raises several kinds
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"the tensors in {self.files.directory} that make {first} do not fit: {reason}"
            ) from None
        del self._conversions[first]
        return wanted in self._made

    def _whole(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the dtype of its file, or, where it is quantised, in `dtype`."""
        reader = self.files.where[key]
        if not isinstance(reader, QuantisedTensors):
            return reader.read(key)
        tensor = torch.empty(reader.entries[key].shape, dtype=dtype)
        reader.read_into(key, tensor)
        return tensor

    def read_buffers(self) -> None:
        """Fill the model's persistent buffers that the checkpoint has."""
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                key = self._plain.get(name)
                if key is None:
                    continue
                if buffer.is_meta:
                    buffer = torch.empty_like(buffer, device="cpu")
                    module._buffers[name.rpartition(".")[2]] = buffer
                self.files.where[key].read_into(key, buffer)


def _natural_key(name: str) -> list[Any]:
    """Sort numbers within names by value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
