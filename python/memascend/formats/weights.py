"""The parameters of a model that the tensors of a Hugging Face directory make.

Where transformers stacks experts, their tensors lie one behind the other in the parameter, so each is read to where it
belongs; a transposed or interleaved parameter is made by transformers' own conversion, from all of its tensors at once.
A rank reads only its elements, so all ranks together read a model once; as no two read the same bytes, they compare the
beginnings of all tensors instead.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import CheckpointError
from memascend.formats.heads import initial_values, is_of_head
from memascend.formats.quantised.forms import form_of_names
from memascend.formats.quantised.reading import QuantisedTensors
from memascend.formats.resized import resize
from memascend.formats.safetensors import PIECE_BYTES
from memascend.formats.transformers_models import Conversion, Mapping, empty_model, untie
from memascend.formats.weight_files import WeightFiles
from memascend.layout.bits import PUBLISHED
from memascend.layout.ties import ties_of

if TYPE_CHECKING:
    from collections.abc import Mapping as MappingOf
    from collections.abc import Sequence
    from pathlib import Path

    from memascend._memascend import ExternalFile, Packing
    from memascend.formats.safetensors import SafetensorsReader
    from memascend.layout.units import ParameterEntry, Unit

_log = logging.getLogger("memascend")


def empty_model_of(config: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Return the empty model of a configuration, whose parameters are tied as the weights in `directory` are.

    Without weights there, as the configuration says.
    """
    model = empty_model(config, directory, dtype)
    if ties_of(model) and directory.is_dir() and any(directory.glob("*.safetensors")):
        with closing(WeightFiles(directory)) as files:
            Sources(model, files)
    return model


def stay_published(model: nn.Module, directory: Path, units: Sequence[Unit]) -> bool:
    """Lay out the empty `model` as with `frozen_bits="published"`; return False where that cannot be had."""
    try:
        with closing(WeightFiles(directory)) as files:
            if files.quantised is None:
                return False
            Sources(model, files).locate_published(units, direct=False)
    except CheckpointError:
        return False
    return True


class Sources:
    """The checkpoint tensors of every parameter, renamed, merged and split as transformers does it.

    Conversions run on the tensors of one parameter at a time.
    """

    def __init__(self, model: nn.Module, files: WeightFiles, *, begins_heads: bool = False) -> None:
        """Map the tensors of `files` to the parameters of `model`.

        With `begins_heads` a head of the task that has no tensor begins as transformers initialises it.

        Raises CheckpointError for a parameter without a tensor, or a tensor of another shape or kind of dtype.
        """
        self.model, self.files = model, files
        self._expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        mapping = Mapping(model, self._expected, sorted(files.where, key=_natural_key))
        self._plain, self._conversions = mapping.plain, mapping.conversions
        self._untie()
        #: Indices of transformers' conversions that the checkpoint needed.
        self.conversions = mapping.used
        #: Parameters that are tensors one behind the other: name -> (tensor, its first element in the parameter).
        self._gathered: dict[str, list[tuple[str, int]]] = {}
        #: Parameters that a conversion made beyond the one that was read.
        self._made: dict[str, torch.Tensor] = {}
        #: A parameter's first name -> all its names: a tied parameter may be stored under any of
        #: them.
        self._aliases = _aliases_of(model)
        #: Parameters of a head that no file has, and tables that were resized, with their first values.
        self._begun: dict[str, torch.Tensor] = {}
        if begins_heads:
            self._begun = initial_values(model, [name for name in self._missing() if is_of_head(model, name)])
        self._buffers_read = False
        self._check()
        self._find_gathered()

    def resize_tables(self, rows: int) -> None:
        """Have the model's tables of tokens begin with `rows` rows, as transformers makes them of those in the files.

        Their values are whole in memory until this object is gone. Raises as `memascend.formats.resized.resize`.
        """

        def read(name: str, target: torch.Tensor) -> None:
            begun, pieces = self._begun.get(name), self._pieces_of(name)
            if begun is not None:
                target.copy_(begun)
            elif pieces is not None:
                self._gather(pieces, target.view(-1), 0)
            else:
                raise CheckpointError(
                    f"{name} is made of several tensors in {self.files.directory}, and is not resized while it is read"
                )

        self.read_buffers()  # Some have a value for each token, and are resized too.
        self._begun |= resize(self.model, rows, read)
        self._aliases = _aliases_of(self.model)

    def _find_gathered(self) -> None:
        """Find the parameters that a conversion makes of tensors one behind the other: those are read one by one."""
        for name, conversion in list(self._conversions.items()):
            parameter, matrices = self._expected.get(name), conversion.stacked()
            if parameter is None or matrices is None or parameter.ndim != 3 or len(parameter) != len(matrices):
                continue
            shapes = [[self.files.where[key].entries[key].shape for key in keys] for keys in matrices]
            rows, width = parameter.shape[1:]
            fitting = all(len(shape) == 2 and shape[1] == width for matrix in shapes for shape in matrix)
            # Tensors that do not fit are told by the conversion.
            if not fitting or any(sum(shape[0] for shape in matrix) != rows for matrix in shapes):
                continue
            first, pieces = 0, []
            for key, shape in zip(chain(*matrices), chain(*shapes), strict=True):
                pieces.append((key, first))
                first += math.prod(shape)
            self._gathered[name] = pieces
            del self._conversions[name]

    def _untie(self) -> None:
        """Untie parameters that the configuration ties but the files hold with different values."""
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
        """Return whether two tensors of the files have the same values, in the dtype of the parameter `name`."""
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

    def _targets(self) -> set[str]:
        """Return the names of the tensors that the files make."""
        return {*self._plain, *(target for made_by in self._conversions.values() for target in made_by.targets)}

    def _missing(self) -> list[str]:
        """Return the parameters that have no tensor."""
        targets = self._targets()
        return [first for first, aliases in self._aliases.items() if not targets.intersection(aliases)]

    def _check(self) -> None:
        targets = self._targets()
        missing = [name for name in self._missing() if name not in self._begun]
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
                    f"{tuple(parameter.shape)}: config.json belongs to other weights"
                )
        for conversion in self._conversions.values():
            for key, _ in conversion.parts:
                self._check_dtype(None, key)

    def _check_dtype(self, parameter: torch.Tensor | None, key: str) -> None:
        """Raise CheckpointError for numbers that are no weights by themselves: integers, or FP8 without its scales."""
        reader = self.files.where[key]
        dtype = reader.entries[key].dtype
        is_weight = dtype.is_floating_point and dtype.itemsize > 1
        if not is_weight and (parameter is None or parameter.is_floating_point()):
            quantised = self.files.quantised
            unknown = (
                "no quantization_config in its config.json says how"
                if quantised is None
                else f"{quantised.form} has no such tensor"
            )
            raise CheckpointError(
                f"{key} in {reader.path} is of dtype {str(dtype).removeprefix('torch.')}, as in a quantised "
                f"checkpoint, and {unknown}: memascend trains floating point of 16 and 32 bits"
            )

    def locate_published(self, units: Sequence[Unit], direct: bool) -> None:
        """Have the units that are quantised in the files read from there, and dequantised at each use.

        Raises CheckpointError where there are none, or they are not read so.
        """
        # A table is read by parts, from the store only.
        layers = (unit for unit in units if not unit.is_table)
        published = [unit for unit in layers if any(self._is_quantised(place) for place in unit.places)]
        if not published:
            raise CheckpointError(
                f"{self.files.directory} has no layers whose weights are quantised, which stay as they are published "
                f"with frozen_bits={PUBLISHED!r}: leave it out"
            )
        self.locate(published, direct)

    def _is_quantised(self, place: ParameterEntry) -> bool:
        pieces = self._pieces_of(place.name) or ()
        return any(isinstance(self.files.where[key], QuantisedTensors) for key, _ in pieces)

    def locate(self, units: Sequence[Unit], direct: bool) -> None:
        """Have every parameter read from its bytes in its file, past the page cache if `direct`.

        Raises CheckpointError for a parameter that needs a conversion or another dtype.
        """
        externals = {reader: reader.external(direct) for reader in self.files.readers}
        located: dict[ParameterEntry, list[tuple[ExternalFile, int, int, Packing | None]]] = {}
        for place in (place for unit in units for place in unit.places):
            pieces = self._pieces_of(place.name)
            if pieces is None:
                raise CheckpointError(
                    f"{place.name} is made of several tensors in {self.files.directory}, which are not one behind the "
                    "other in it, so that it cannot be read from there as it is: use frozen='store'"
                )
            located[place] = [self._located(place, key, externals) for key, _ in pieces]
        for place, sources in located.items():
            unit = place.tensor.unit
            unit.sources[place] = sources
            if self._is_quantised(place):
                unit.published[place] = sum(self._stored_nbytes(key) for key, _ in self._pieces_of(place.name) or ())

    def stored_as(self, place: ParameterEntry) -> list[str] | None:
        """Return the tensors of the files that lie one behind the other in a parameter; None where it is made."""
        pieces = self._pieces_of(place.name)
        return None if pieces is None else [key for key, _ in pieces]

    def _pieces_of(self, first_name: str) -> list[tuple[str, int]] | None:
        """Return the tensors that a parameter is read from, each with its first element there; None if it is made."""
        for name in self._aliases[first_name]:
            if name in self._plain:
                return [(self._plain[name], 0)]
            if name in self._gathered:
                return self._gathered[name]
        return None

    def _located(
        self, place: ParameterEntry, key: str, externals: MappingOf[SafetensorsReader, ExternalFile]
    ) -> tuple[ExternalFile, int, int, Packing | None]:
        """Return the source of a parameter that is read from one tensor, a piece of `Unit.sources`, or refuse it."""
        reader = self.files.where[key]
        entry = reader.entries[key]
        if isinstance(reader, QuantisedTensors):
            file, position, packing = reader.in_place(key, place.dtype, externals)
            return file, position, math.prod(entry.shape) * place.dtype.itemsize, packing
        if entry.dtype != place.dtype:
            stored, wanted = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, place.dtype))
            raise CheckpointError(
                f"{key} in {reader.path} is of dtype {stored}, the model's is {wanted}: frozen='files' reads "
                f"weights as they are; use dtype={stored!r} or frozen='store'"
            )
        return externals[reader], entry.start, entry.end - entry.start, None

    def _stored_nbytes(self, key: str) -> int:
        """Return the bytes of a tensor in its file, with its scales."""
        reader = self.files.where[key]
        if isinstance(reader, QuantisedTensors):
            return reader.stored_nbytes(key)
        return reader.entries[key].end - reader.entries[key].start

    def read(self, place: ParameterEntry, target: torch.Tensor, first_row: int | None = None) -> None:
        """Fill `target` with the values of a parameter, or with its rows from `first_row` on."""
        first = first_row * place.blocks.width if first_row else 0
        self._read(place, target, first, rows_follow=first_row is not None and first + target.numel() < place.numel)

    def read_part(self, place: ParameterEntry, target: torch.Tensor, first: int) -> None:
        """Fill `target`, of one dimension, with the elements of a parameter from number `first` on."""
        self._read(place, target, first, rows_follow=first + target.numel() < place.numel)

    def read_share(self, place: ParameterEntry, target: torch.Tensor) -> None:
        """Fill of `target`, which has room for a whole parameter, the elements that one rank's store has.

        Only those are read, but for a parameter that a conversion makes.
        """
        first, _, count = place.stored
        self._read(place, target.view(-1)[first : first + count], first)

    def _read(self, place: ParameterEntry, target: torch.Tensor, first: int, rows_follow: bool = False) -> None:
        """Fill `target` with the elements of a parameter from number `first` on."""
        if place.name in self._begun:
            target.copy_(self._begun[place.name].reshape(-1)[first : first + target.numel()].view(target.shape))
            return
        pieces = self._pieces_of(place.name)
        if pieces is not None:
            self._gather(pieces, target.reshape(-1), first)
            return
        for name in self._aliases[place.name]:
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

    def _gather(self, pieces: Sequence[tuple[str, int]], target: torch.Tensor, first: int) -> None:
        """Fill `target` with elements from number `first` on of tensors that are one behind the other."""
        for key, begin in pieces:
            reader = self.files.where[key]
            end = begin + math.prod(reader.entries[key].shape)
            low, high = max(begin, first), min(end, first + target.numel())
            if low < high:
                reader.read_into(key, target[low - first : high - first], low - begin)

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
        """Fill the model's persistent buffers that the checkpoint has, once."""
        if self._buffers_read:
            return
        self._buffers_read = True
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                key = self._plain.get(name)
                if key is None:
                    continue
                if buffer.is_meta:
                    buffer = torch.empty_like(buffer, device="cpu")
                    module._buffers[name.rpartition(".")[2]] = buffer
                self.files.where[key].read_into(key, buffer)


def _aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _natural_key(name: str) -> list[Any]:
    """Sort numbers within names by value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
