"""A model directory in 16 bits, written once more with its linear weights in NF4: a base that runs read in place.

Quantised are the weights that `frozen_bits=4` quantises. Each of their tensors in the files is by itself, in the form
and with the bits of bitsandbytes' `quantize_4bit` with double quantisation. All else is in bfloat16, in which such a
base computes. Tensors keep their files.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from memascend.errors import CheckpointError, DataError
from memascend.formats.json_files import read_json
from memascend.formats.quantised.forms import form_of
from memascend.formats.safetensors import write_safetensors
from memascend.formats.transformers_models import empty_model, load_any_config
from memascend.formats.weight_files import INDEX_NAME, WEIGHTS_NAME, WeightFiles
from memascend.formats.weights import Sources
from memascend.layout.bits import BLOCK, NESTED_BLOCK, PIECE_ELEMENTS, parts_of
from memascend.layout.frozen_bits import quantise_units
from memascend.layout.quantising import NF4, dynamic_code, quantise_scales, to_four_bits
from memascend.layout.units import partition

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from memascend.formats.safetensors import SafetensorsReader

    #: Dtypes and shapes of the tensors of a file, by name.
    Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_BITS = 4
#: The bytes that describe a tensor as JSON. Spaces fill them up: the mean of its scales, a number of any length, is
#: known only after the header of the file was written.
_STATE_BYTES = 256


class _Chosen(NamedTuple):
    """What becomes of the tensors of a directory."""

    #: Tensors that are quantised.
    quantised: set[str]
    #: Dtypes of other tensors; those that no parameter has keep theirs.
    dtypes: dict[str, torch.dtype]
    #: Linear layers that are not quantised.
    left: list[str]


def write_nf4(model_dir: Path, out: Path) -> None:
    """Write the model directory `model_dir` to the new directory `out`, a piece of half a million elements at a time.

    Raises CheckpointError for a model that is quantised already, or that cannot be read in place.
    """
    config = load_any_config(model_dir)
    form = form_of(model_dir)
    if form is not None:
        raise CheckpointError(
            f"{model_dir} holds weights in {form} already: train adapters over them as they are, with --dequantize"
        )
    with closing(WeightFiles(model_dir)) as files:
        model = empty_model(config, model_dir, torch.bfloat16)
        chosen = _choose(model, Sources(model, files))
        out.mkdir(parents=True)
        written: dict[str, Entries] = {}
        for reader in files.readers:
            name = reader.path.name if len(files.readers) > 1 else WEIGHTS_NAME
            written[name] = _entries(reader, chosen)
            write_safetensors(out / name, written[name], _tensors(reader, written[name], chosen))
    if len(written) > 1:
        total = sum(
            math.prod(shape) * dtype.itemsize for entries in written.values() for dtype, shape in entries.values()
        )
        weight_map = {key: name for name, entries in written.items() for key in entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    _write_config(model_dir, out, chosen.left)


def _choose(model: nn.Module, sources: Sources) -> _Chosen:
    units, directory = partition(model), sources.files.directory
    try:
        quantise_units(model, units, _BITS)
    except DataError:
        raise CheckpointError(
            f"{directory}: {type(model).__name__} has no linear weights in repeated layers, which are what is "
            "quantised: use it as it is"
        ) from None
    quantised: set[str] = set()
    dtypes: dict[str, torch.dtype] = {}
    for place in (place for unit in units for place in unit.places):
        keys = sources.stored_as(place)
        if keys is not None and place.bits is None:
            dtypes |= dict.fromkeys(keys, place.dtype)
        elif place.bits is not None:
            sizes = [math.prod(sources.files.stored[key].entries[key].shape) for key in keys or ()]
            if keys is None or any(size % 2 for size in sizes):
                raise CheckpointError(
                    f"{place.name} is made of tensors in {directory} that are not one behind the other in it, so that "
                    "it could not be read from there: use --base-bits 4 for each run"
                )
            quantised.update(keys)
    weights = {place.parameter for unit in units for place in unit.places if place.bits is not None}
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return _Chosen(quantised, dtypes, [name for name, module in linear if module.weight not in weights])


def _entries(reader: SafetensorsReader, chosen: _Chosen) -> Entries:
    """Return the tensors of a file that is written from another."""
    entries: Entries = {}
    for name, entry in reader.entries.items():
        if name not in chosen.quantised:
            entries[name] = chosen.dtypes.get(name, entry.dtype), entry.shape
            continue
        numbers, blocks, factors = parts_of(math.prod(entry.shape), _BITS)
        entries |= {
            name: (torch.uint8, (numbers, 1)),
            f"{name}.absmax": (torch.uint8, (blocks,)),
            f"{name}.nested_absmax": (torch.float32, (factors // torch.float32.itemsize,)),
            f"{name}.nested_quant_map": (torch.float32, (len(dynamic_code()),)),
            f"{name}.quant_map": (torch.float32, (len(NF4),)),
            f"{name}.quant_state.bitsandbytes__nf4": (torch.uint8, (_STATE_BYTES,)),
        }
    return entries


def _tensors(
    reader: SafetensorsReader, entries: Entries, chosen: _Chosen
) -> Iterator[tuple[str, torch.Tensor | Generator[torch.Tensor, None, None]]]:
    for name, entry in reader.entries.items():
        if name in chosen.quantised:
            yield from _quantised(reader, name)
        else:
            width = max(entry.shape[-1], 1) if len(entry.shape) > 1 else 1
            pieces = _pieces(reader, name, entries[name][0], width)
            yield name, (values.view(-1, width) if len(entry.shape) > 1 else values for values in pieces)


def _quantised(
    reader: SafetensorsReader, name: str
) -> Iterator[tuple[str, torch.Tensor | Generator[torch.Tensor, None, None]]]:
    """Yield the numbers of a tensor, and then its scales, as bitsandbytes names them."""
    scales: list[torch.Tensor] = []

    def numbers() -> Generator[torch.Tensor, None, None]:
        for values in _pieces(reader, name, torch.bfloat16, BLOCK[_BITS]):
            try:
                packed, of_piece = to_four_bits(values)
            except ValueError as error:
                raise CheckpointError(
                    f"{name} in {reader.path} has {error}, which have no scale in {_BITS} bits"
                ) from None
            scales.append(of_piece)
            yield packed.view(-1, 1)

    yield name, numbers()
    nested = quantise_scales(torch.cat(scales))
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK[_BITS],
        "dtype": "bfloat16",
        "shape": reader.entries[name].shape,
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": nested.offset,
    }
    text = json.dumps(state).ljust(_STATE_BYTES).encode()
    yield f"{name}.absmax", nested.scales
    yield f"{name}.nested_absmax", nested.factors
    yield f"{name}.nested_quant_map", dynamic_code()
    yield f"{name}.quant_map", torch.tensor(NF4)
    yield f"{name}.quant_state.bitsandbytes__nf4", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _pieces(
    reader: SafetensorsReader, name: str, dtype: torch.dtype, width: int
) -> Generator[torch.Tensor, None, None]:
    """Yield the elements of a tensor in pieces, multiples of `width`."""
    numel, step = math.prod(reader.entries[name].shape), max(PIECE_ELEMENTS // width, 1) * width
    for first in range(0, numel, step):
        values = torch.empty(min(step, numel - first), dtype=dtype)
        reader.read_into(name, values, first)
        yield values


def _write_config(model_dir: Path, out: Path, left: list[str]) -> None:
    """Write the configuration with the entry that transformers reads this form by."""
    described = read_json(model_dir / "config.json")
    described.pop("transformers_weights", None)
    described |= dict.fromkeys(
        [name for name in ("dtype", "torch_dtype") if name in described] or ["dtype"], "bfloat16"
    )
    described["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": left,
    }
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
