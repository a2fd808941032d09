"""Models in and out: Hugging Face directories streamed into the store and back, never whole in memory."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import return_large_blocks_to_system
from memascend.common.sizes import parse_size
from memascend.durable.record import source_of
from memascend.errors import CheckpointError
from memascend.formats.safetensors import SafetensorsReader, write_safetensors
from memascend.layout.units import DTYPE_NAMES, Place, Unit, absent_like, partition
from memascend.offloading.api import find_offload, offload_of
from memascend.offloading.computing import Computing
from memascend.offloading.hooks import Hooks, has_adapters
from memascend.offloading.session import Session
from memascend.plan.host import make_plan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from memascend.offloading.native import StorePaths

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


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
        store: a directory, or several on different drives over which the bytes are striped.
        host_memory: ceiling of what memascend holds in host memory, as bytes or "8GiB".
        dtype: "bfloat16", "float16" or "float32"; the weights are converted while they are read.
        frozen: freeze all parameters, for adapters that are added later (PEFT): "store" copies them to the store like
            others; "files" reads them from the safetensors files whenever they are used, which takes neither time nor
            room for a copy. The files must stay as they are, with weights in `dtype`. Nothing of a model that is
            read from its files can be made durable.
        device, device_memory, recompute, activations, batch_tokens, durability, keep_store, options: as in
            `memascend.offload`.
        progress: called with (bytes done, bytes in all) while the weights are read.

    Raises:
        CheckpointError: the directory is not such a model, or a file is damaged.
        BudgetError, DeviceError, StoreError, ValueError: as in `memascend.offload`.
    """
    if frozen not in (None, "store", "files"):
        raise ValueError(f"frozen={frozen!r} is none of None, 'store' and 'files'")
    if frozen == "files" and (keep_store or durability not in ("auto", "none")):
        raise ValueError(
            "with frozen='files' the store holds nothing that could be kept: leave out durability and keep_store, or "
            "use frozen='store'"
        )
    return_large_blocks_to_system()
    directory = Path(path)
    budget = parse_size(host_memory)
    computing = Computing.of(device, device_memory, recompute, activations, batch_tokens)
    config = _load_config(directory)
    weights = _Weights(directory)
    try:
        model = empty_model(config, directory, _parse_dtype(dtype))
        if (directory / "generation_config.json").is_file():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        sources = _Sources(model, weights)
        model.requires_grad_(frozen is None)
        units = partition(model, computing.torch_device)
        if frozen == "files":
            sources.locate(units, options.get("direct", True))
        plan = make_plan(units, budget)
        materialise(model, units)
        state = Session(
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
        try:
            state.fill(sources.read, progress)
            sources.read_buffers()
            Hooks(state).attach()
        except BaseException:
            state.discard()
            raise
    finally:
        weights.close()
    return model


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    names |= {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = dtype if dtype in names.values() else names.get(str(dtype).removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {dtype} is not supported: use bfloat16, float16 or float32")
    return found


def _load_config(directory: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CheckpointError("model directories need transformers: pip install 'memascend[hf]'") from error
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a configuration it does not know
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{directory}/config.json is not a model that transformers knows: {first}") from None


def empty_model(config: Any, directory: Path | str, dtype: torch.dtype) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers real."""
    import transformers

    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    build = getattr(cls, "_from_config", None) or transformers.AutoModelForCausalLM.from_config
    try:
        with _parameters_on_meta():
            model = build(config, dtype=dtype)
            model.tie_weights()
    except ValueError as error:
        raise CheckpointError(f"{directory}: {str(error).splitlines()[0]}") from None
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:  # the range of bfloat16 does without these
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in kept):
            parameter.data = parameter.data.to(torch.float32)
    model.train()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send every parameter to the meta device as it is registered; its memory was never touched."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(model: nn.Module, units: list[Unit]) -> None:
    """Replace the meta parameters by CPU parameters that hold nothing; tied ones stay tied."""
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


class _Weights:
    """The safetensors files of a directory, all headers checked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.readers: list[SafetensorsReader] = []
        self.where: dict[str, SafetensorsReader] = {}
        index = directory / INDEX_NAME
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if not files or any(Path(name).name != name for name in files):
                    raise ValueError
            except (ValueError, KeyError, AttributeError, TypeError):
                raise CheckpointError(f"{index} is not a safetensors index") from None
        elif (directory / WEIGHTS_NAME).is_file():
            files = [WEIGHTS_NAME]
        else:
            other = next(iter(sorted(directory.glob("*.bin")) + sorted(directory.glob("*.gguf"))), None)
            hint = f"; {other.name} is of another format: save it again with save_pretrained" if other else ""
            raise CheckpointError(f"{directory} has no {WEIGHTS_NAME} and no {INDEX_NAME}{hint}")
        try:
            for name in files:
                if not (directory / name).is_file():
                    raise CheckpointError(f"{directory / name} is missing, but {INDEX_NAME} names it")
                reader = SafetensorsReader(directory / name)
                self.readers.append(reader)
                self.where |= dict.fromkeys(reader.entries, reader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


class _Sources:
    """Which checkpoint tensors make which parameters: renamed, merged and split as transformers would.

    Transformers describes how checkpoints of an architecture map to its modules (experts stacked into one tensor,
    say) as `WeightConverter`s; they are run here on the tensors of one target at a time.
    """

    def __init__(self, model: nn.Module, weights: _Weights) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.model, self.weights = model, weights
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        prefix = getattr(model, "base_model_prefix", None)
        #: Parameter name -> checkpoint tensor, for those that are taken as they are.
        self.plain: dict[str, str] = {}
        #: First target of a conversion -> (converter, [(checkpoint tensor, pattern)]).
        self.converted: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for key in sorted(weights.where, key=_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = key, None
            if pattern is None:
                self.plain[name] = key
            else:
                made_by = self.converted.setdefault(name, (deepcopy(by_pattern[pattern]), []))
                made_by[1].append((key, pattern))
        #: What a conversion made beyond the parameter that asked for it.
        self._made: dict[str, torch.Tensor] = {}
        self._expected = expected
        self.conversions = [index for index, transform in enumerate(transforms) if transform.was_used()]
        model._weight_conversions = [transforms[index] for index in self.conversions]
        # A tied parameter may be stored under any of its names.
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._aliases = {names[0]: names for names in self._names.values()}
        self._check()

    def _check(self) -> None:
        targets = set(self.plain)
        for name, (converter, _) in self.converted.items():
            for target in converter.target_patterns:
                targets.add(name.replace(converter.target_patterns[0], target))
        missing = [names[0] for names in self._names.values() if not targets.intersection(names)]
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise CheckpointError(
                f"{self.weights.directory} lacks weights that {type(self.model).__name__} needs: {listed}"
            )
        for name, key in self.plain.items():
            parameter = self._expected.get(name)
            if parameter is not None:
                self._check_dtype(parameter, key)
            if parameter is not None and tuple(parameter.shape) != self.weights.where[key].entries[key].shape:
                raise CheckpointError(
                    f"{key} in {self.weights.where[key].path} has shape "
                    f"{self.weights.where[key].entries[key].shape}, the configuration says {tuple(parameter.shape)}"
                )

        for _, parts in self.converted.values():
            for key, _ in parts:
                self._check_dtype(None, key)

    def _check_dtype(self, parameter: torch.Tensor | None, key: str) -> None:
        dtype = self.weights.where[key].entries[key].dtype
        if not dtype.is_floating_point and (parameter is None or parameter.is_floating_point()):
            raise CheckpointError(
                f"{key} in {self.weights.where[key].path} is of dtype {str(dtype).removeprefix('torch.')}, as in a "
                "quantised checkpoint: memascend trains floating-point weights"
            )

    def locate(self, units: list[Unit], direct: bool) -> None:
        """Have every parameter read from where it lies in its file, without the page cache if `direct`."""
        files = {reader: reader.external(direct) for reader in self.weights.readers}
        for place in (place for unit in units for place in unit.places):
            key = next((self.plain[name] for name in self._aliases[place.name] if name in self.plain), None)
            if key is None:
                raise CheckpointError(
                    f"{place.name} is made of several tensors in {self.weights.directory}, so that it cannot be read "
                    "from there as it is: use frozen='store'"
                )
            reader = self.weights.where[key]
            entry = reader.entries[key]
            if entry.dtype != place.dtype:
                found, wanted = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, place.dtype))
                raise CheckpointError(
                    f"{key} in {reader.path} is of dtype {found}, the model's is {wanted}: frozen='files' reads "
                    f"weights as they are; use dtype={found!r} or frozen='store'"
                )
            place.source = files[reader], entry.start

    def read(self, place: Place, target: torch.Tensor) -> None:
        """Fill `target` with the values of a parameter."""
        for name in self._aliases[place.name]:
            if name in self.plain:
                key = self.plain[name]
                self.weights.where[key].read_into(key, target)
                return
            if name in self._made or self._convert(name):
                made = self._made.pop(name)
                if made.shape != target.shape:
                    raise CheckpointError(
                        f"the tensors in {self.weights.directory} that make {name} give shape {tuple(made.shape)}, the "
                        f"configuration says {tuple(target.shape)}"
                    )
                target.copy_(made)
                return
        raise CheckpointError(f"no weights for {place.name} in {self.weights.directory}")

    def _convert(self, wanted: str) -> bool:
        for first, (converter, parts) in self.converted.items():
            targets = [first.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
            if wanted not in targets:
                continue
            for key, pattern in parts:
                converter.add_tensor(first, key, pattern, self.weights.where[key].read(key))
            try:
                made = converter.convert(first, model=self.model, config=self.model.config)
            except Exception as error:  # whatever stacking tensors of unequal shapes raises
                what = str(error).partition("\n")[0]
                raise CheckpointError(
                    f"the tensors in {self.weights.directory} that make {first} do not fit: {what}"
                ) from None
            self._made |= {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
            del self.converted[first]
            return wanted in self._made
        return False

    def read_buffers(self) -> None:
        """Fill the model's persistent buffers that the checkpoint has."""
        for name, buffer in self.model.named_buffers():
            key = self.plain.get(name)
            if key is not None:
                self.weights.where[key].read_into(key, buffer)


def _natural_key(name: str) -> list[Any]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def parameters_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of every parameter, copied out of the store one unit at a time; tied ones once.

    Works on an ordinary model too, where it yields copies.
    """
    named = dict(model.named_parameters())
    if find_offload(model) is not None:
        state = offload_of(model)
        state.flush()
        # PEFT renames what it wraps.
        names = {parameter: name for name, parameter in named.items()}
        for unit in state.units:
            storage = state.read_unit(unit)
            for place in unit.places:
                name = names.get(place.parameter, place.name)
                named.pop(name, None)
                yield name, place.view(storage).clone()
            # The next unit may need the buffer that this holds.
            del storage
    for name, parameter in named.items():
        yield name, parameter.detach().clone()


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
    wanted = None if dtype is None else _parse_dtype(dtype)
    state = None if find_offload(model) is None else offload_of(model)
    if state is not None and (state.model() is not model or has_adapters(model)):
        # Those of PEFT, and the adapters of transformers' own models.
        saves_adapters = hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)
        if wanted is not None or not saves_adapters:
            raise CheckpointError(
                f"{type(model).__name__} holds an offloaded model with parameters beside it, which the format of that "
                "one has no names for: save adapters with the save_pretrained of PEFT's model"
            )
        model.save_pretrained(directory)
        return
    if state is None and not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} is not a Hugging Face model: use memascend.parameters_of")
    if state is None and wanted is None:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return
    directory.mkdir(parents=True, exist_ok=True)
    if state is not None:
        state.flush()
    all_units = partition(model) if state is None else state.units
    shards = _shards(all_units, parse_size(max_shard_size), wanted)
    weight_map: dict[str, str] = {}
    for number, units in enumerate(shards, start=1):
        name = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = {
            key: (wanted or tensor.dtype, tuple(tensor.shape))
            for unit in units
            for key, tensor in _revert(model, _meta_tensors(unit)).items()
        }
        buffers = saved_buffers(model) if number == 1 else {}
        entries |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in buffers.items()}
        write_safetensors(directory / name, entries, _tensors(state, model, units, buffers, wanted))
        weight_map |= dict.fromkeys(entries, name)
    if len(shards) > 1:
        total = sum(_saved_bytes(unit, wanted) for unit in all_units)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    if getattr(model, "config", None) is not None:
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = wanted or next(place.dtype for unit in all_units for place in unit.places)
        config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(directory)


def _tensors(
    state: Session | None,
    model: nn.Module,
    units: list[Unit],
    buffers: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from buffers.items()
    for unit in units:
        if state is None:
            values = {place.name: place.parameter.detach().cpu() for place in unit.places}
        else:
            storage = state.read_unit(unit)
            values = {place.name: place.view(storage) for place in unit.places}
            del storage
        reverted = _revert(model, values)
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


def _revert(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo the conversions that made the model's parameters from the checkpoint's tensors."""
    if not hasattr(model, "config"):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's persistent buffers by name."""
    saved = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                saved[f"{prefix}.{name}" if prefix else name] = buffer
    return saved
