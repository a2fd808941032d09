"""Models in and out: Hugging Face directories streamed into the store and back, never whole in memory."""

from __future__ import annotations

import json
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import return_large_blocks_to_system
from memascend.common.sizes import parse_size
from memascend.durable.record import source_of
from memascend.errors import CheckpointError
from memascend.formats.safetensors import write_safetensors
from memascend.formats.transformers_models import (
    empty_model,
    load_any_config,
    load_generation_config,
    revert_conversions,
    saves_adapters,
)
from memascend.formats.weights import INDEX_NAME, WEIGHTS_NAME, Sources, WeightFiles
from memascend.layout.units import DTYPE_NAMES, Unit, absent_like, partition
from memascend.offloading.api import find_offload, offload_of
from memascend.offloading.computing import Computing
from memascend.offloading.hooks import Hooks, has_adapters
from memascend.offloading.session import Session
from memascend.plan.host import make_plan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from memascend.offloading.native import StorePaths


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    store: StorePaths,
    host_memory: str | int,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    frozen: str | None = None,
    recompute: bool = True,
    activations: str | None = None,
    batch_tokens: int | None = None,
    durability: str = "auto",
    keep_store: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> nn.Module:
    """Open a Hugging Face model directory with its parameters on SSD: the model is never whole in memory.

    Args:
        path: directory with config.json and safetensors weights.
        dtype: "bfloat16", "float16" or "float32"; the weights are converted while they are read.
        frozen: freeze all parameters, for adapters that are added later (PEFT): "store" copies them to the store like
            trained ones; "files" reads them from the safetensors files at each use, which takes neither time nor room
            for a copy. The files must hold the weights in `dtype` and must not change, and the run has no durable
            steps.
        store, host_memory, device, device_memory, recompute, activations: as in `memascend.offload`.
        batch_tokens, durability, keep_store, options: as in `memascend.offload`.
        progress: called with (bytes done, bytes in all) while the weights are read.

    Raises:
        CheckpointError: the directory is not such a model, or a file is damaged.
        BudgetError, DeviceError, StoreError, ValueError: as in `memascend.offload`.
    """
    _check_frozen(frozen, durability, keep_store)
    return_large_blocks_to_system()
    directory = Path(path)
    budget = parse_size(host_memory)
    computing = Computing.of(device, device_memory, recompute, activations, batch_tokens)
    config = load_any_config(directory)
    with closing(WeightFiles(directory)) as files:
        model = empty_model(config, directory, _parse_dtype(dtype))
        load_generation_config(model, directory)
        sources = Sources(model, files)
        units = _divide(model, sources, computing.torch_device, frozen, options.get("direct", True))
        plan = make_plan(units, budget)
        materialise(model, units)
        session = Session(
            model,
            units,
            plan,
            store,
            computing=computing,
            keep_store=keep_store,
            durability="none" if frozen == "files" else durability,
            source=source_of(model, sources.conversions),
            options=options,
        )
        _fill(session, sources, progress)
    return model


def _check_frozen(frozen: str | None, durability: str, keep_store: bool | None) -> None:
    if frozen not in (None, "store", "files"):
        raise ValueError(f"frozen={frozen!r} is none of None, 'store' and 'files'")
    if frozen == "files" and (keep_store or durability not in ("auto", "none")):
        raise ValueError(
            "with frozen='files' the store holds nothing that could be kept: leave out durability and keep_store, or "
            "use frozen='store'"
        )


def _divide(model: nn.Module, sources: Sources, device: torch.device, frozen: str | None, direct: bool) -> list[Unit]:
    """Divide the model into units, frozen if `frozen` is not None."""
    model.requires_grad_(frozen is None)
    units = partition(model, device)
    if frozen == "files":
        sources.locate(units, direct)
    return units


def _fill(session: Session, sources: Sources, progress: Callable[[int, int], None] | None) -> None:
    """Read the weights into the store and attach the session to its model; discard the session on an error."""
    try:
        session.fill(sources.read, progress)
        sources.read_buffers()
        Hooks(session).attach()
    except BaseException:
        session.discard()
        raise


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    names |= {name: dtype for dtype, name in DTYPE_NAMES.items()}
    parsed = dtype if dtype in names.values() else names.get(str(dtype).removeprefix("torch."))
    if not isinstance(parsed, torch.dtype):
        raise ValueError(f"dtype {dtype} is not supported: use bfloat16, float16 or float32")
    return parsed


def materialise(model: nn.Module, units: list[Unit]) -> None:
    """Replace the meta parameters by CPU parameters that show NaN and occupy one element; tied ones stay tied."""
    places = {place.parameter: place for unit in units for place in unit.places}
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in fresh:
                place = places.get(parameter)
                absent = place.absent if place else absent_like(parameter.shape, parameter.dtype)
                fresh[parameter] = nn.Parameter(absent, requires_grad=parameter.requires_grad)
                if place:
                    place.parameter = fresh[parameter]
            module._parameters[name] = fresh[parameter]


def parameters_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of every parameter, copied out of the store one unit at a time; tied ones once.

    Works on an ordinary model too, where it yields copies.
    """
    named = dict(model.named_parameters())
    if find_offload(model) is not None:
        session = offload_of(model)
        session.flush()
        # PEFT renames the parameters that it wraps.
        names = {parameter: name for name, parameter in named.items()}
        for unit in session.units:
            storage = session.read_unit(unit)
            for place in unit.places:
                name = names.get(place.parameter, place.name)
                named.pop(name, None)
                yield name, place.view(storage).clone()
            # The next unit may need the buffer that `storage` holds.
            del storage
    for name, parameter in named.items():
        yield name, parameter.detach().clone()


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's persistent buffers by name."""
    saved = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                saved[f"{prefix}.{name}" if prefix else name] = buffer
    return saved


def save_pretrained(
    model: nn.Module,
    out: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_size: str | int = "5GB",
) -> None:
    """Write a model as a Hugging Face directory: config, generation config, sharded safetensors with an index.

    An offloaded model is streamed unit by unit, in the format and under the names of the original checkpoint; an
    ordinary Hugging Face model saves itself. Of a model of PEFT the adapters are saved, as PEFT does. Weight files
    appear under their names only when whole.

    With `dtype` ("bfloat16", "float16" or "float32") every weight is converted as it is written, and config.json says
    so; the model stays as it is.

    Raises:
        CheckpointError: the model has no such format, or a finite weight is beyond what float16 holds.
        OSError: a file cannot be written.
    """
    directory = Path(out)
    converted_dtype = None if dtype is None else _parse_dtype(dtype)
    session = None if find_offload(model) is None else offload_of(model)
    if session is not None and (session.model() is not model or has_adapters(model)):
        _save_adapters(model, directory, converted_dtype)
        return
    if session is None and not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} is not a Hugging Face model: use memascend.parameters_of")
    if session is None and converted_dtype is None:
        own: Any = model
        own.save_pretrained(directory, max_shard_size=max_shard_size)
        return
    directory.mkdir(parents=True, exist_ok=True)
    if session is not None:
        session.flush()
    units = partition(model) if session is None else session.units
    _write_weights(session, model, units, directory, converted_dtype, parse_size(max_shard_size))
    _write_configs(model, directory, converted_dtype or next(place.dtype for unit in units for place in unit.places))


def _save_adapters(model: Any, directory: Path, dtype: torch.dtype | None) -> None:
    """Let a model save its adapters.

    Raises CheckpointError where it cannot, or `dtype` asks for converted weights.
    """
    if dtype is not None or not saves_adapters(model):
        raise CheckpointError(
            f"{type(model).__name__} holds an offloaded model with parameters beside it, which the format of that "
            "one has no names for: save adapters with the save_pretrained of PEFT's model"
        )
    model.save_pretrained(directory)


def _write_weights(
    session: Session | None,
    model: nn.Module,
    units: list[Unit],
    directory: Path,
    dtype: torch.dtype | None,
    shard_bytes_max: int,
) -> None:
    """Write the safetensors files, with an index if there are several."""
    shards = _shards(units, shard_bytes_max, dtype)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = {
            key: (dtype or tensor.dtype, tuple(tensor.shape))
            for unit in shard
            for key, tensor in revert_conversions(model, _meta_tensors(unit)).items()
        }
        buffers = saved_buffers(model) if number == 1 else {}
        entries |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in buffers.items()}
        write_safetensors(directory / name, entries, _tensors(session, model, shard, buffers, dtype))
        weight_map |= dict.fromkeys(entries, name)
    if len(shards) > 1:
        total = sum(_saved_bytes(unit, dtype) for unit in units)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _write_configs(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json and, of a model that generates, generation_config.json."""
    if getattr(model, "config", None) is not None:
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(directory)


def _tensors(
    session: Session | None,
    model: nn.Module,
    units: list[Unit],
    buffers: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from buffers.items()
    for unit in units:
        if session is None:
            values = {place.name: place.parameter.detach().cpu() for place in unit.places}
        else:
            storage = session.read_unit(unit)
            values = {place.name: place.view(storage) for place in unit.places}
            del storage
        reverted = revert_conversions(model, values)
        del values
        for name in list(reverted):
            yield name, _converted(name, reverted.pop(name), dtype)


def _converted(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None:
        return value
    converted = value.to(dtype)
    if dtype == torch.float16 and converted.isinf().any() and not torch.equal(converted.isinf(), value.isinf()):
        raise CheckpointError(f"{name} has a weight beyond 65504, which float16 cannot hold: save it as bfloat16")
    return converted


def _meta_tensors(unit: Unit) -> dict[str, torch.Tensor]:
    return {place.name: torch.empty(place.shape, dtype=place.dtype, device="meta") for place in unit.places}


def _saved_bytes(unit: Unit, dtype: torch.dtype | None) -> int:
    return sum(place.numel * (dtype or place.dtype).itemsize for place in unit.places)


def _shards(units: list[Unit], limit: int, dtype: torch.dtype | None) -> list[list[Unit]]:
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        nbytes = _saved_bytes(unit, dtype)
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += nbytes
    return shards
