"""Models out: the present parameters of a model, or of a part of one, as a Hugging Face directory, streamed.

The present parameters are walked by name; each is read from the store where it has a place there, and from memory where
it was put there after offload. So a replaced head is saved, and parameters that can no longer be reached are not. Over
ranks all walk through the same groups of parameters, and rank 0 writes; after an error there it reads the others all
the same, so that no rank is left waiting in a gather.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import traceback
from collections import defaultdict
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.autograd.proxies import is_proxy, shown_by
from memascend.common.outputs import sync, sync_names, writing
from memascend.common.sizes import parse_size
from memascend.errors import CheckpointError, OutputError, StoreError
from memascend.formats.safetensors import write_safetensors
from memascend.formats.transformers_models import revert_conversions, saves_adapters, tied_names, unsaved_names
from memascend.formats.weight_files import INDEX_NAME, WEIGHTS_NAME
from memascend.layout.registry import place_of, ranks_of
from memascend.layout.units import DTYPE_NAMES
from memascend.ranks.rank_errors import exchange_errors
from memascend.session.api import refuse_ranks, sessions_of
from memascend.session.module_hooks import Hooks, has_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Iterable, Iterator

    from memascend.ranks.group import Ranks
    from memascend.streaming.tables import OffloadedTable

#: Parameters that are written together, by name: of a unit, and others of its layer that lie in memory.
_Group = dict[str, nn.Parameter]

_CONFIGS = ("config.json", "generation_config.json")
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
#: Files of weights, as transformers and PEFT name them.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "model.safetensors.index.json")
_ADAPTERS = ("adapter_model*.safetensors", "adapter_model*.bin")
#: Options of transformers' `save_pretrained` that make no difference here, whatever their value.
_WITHOUT_EFFECT = ("token", "save_peft_format", "save_function")
_INSTEAD = {
    "state_dict": "the present weights are streamed from the store; change them in the model, or leave it out",
    "push_to_hub": "save to a directory, and upload that",
    "variant": "the file is called model.safetensors; rename it",
    "save_original_format": "the names are always the original checkpoint's",
    "distributed_checkpoint": "use memascend.save_distributed(model, None, directory)",
    "safe_serialization": "weights are written as safetensors",
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype that weights are trained and saved in, given as such or by name ("bf16", "bfloat16").

    Raises ValueError for another.
    """
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    names |= {name: dtype for dtype, name in DTYPE_NAMES.items()}
    parsed = dtype if dtype in names.values() else names.get(str(dtype).removeprefix("torch."))
    if not isinstance(parsed, torch.dtype):
        raise ValueError(f"dtype {dtype} is not supported: use bfloat16, float16 or float32")
    return parsed


def parameters_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of every parameter, copied out of the store one unit at a time; tied ones once.

    Works on an ordinary model too, where it yields copies.
    """
    for session in sessions_of(model):
        session.flush()
    for group in _groups(dict(model.named_parameters())):
        values = _values(group)
        for name in list(values):
            yield name, values.pop(name).clone()


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
    overwrite: bool = False,
) -> None:
    """Write a model as a Hugging Face directory: config, generation config, sharded safetensors with an index.

    An offloaded model, or a part of one, is streamed unit by unit, in the format and under the names of the original
    checkpoint: as the model is now, with modules that were replaced or added since. An ordinary Hugging Face model
    saves itself. Of a model of PEFT the adapters are saved, as PEFT does. Weight files appear under their names only
    when whole. `model.save_pretrained(out)` of an offloaded model of transformers does the same, and replaces earlier
    files, as transformers does. Here weights that `out` holds already are refused, unless `overwrite` is set.

    Where the store is divided over ranks, every rank calls this, and rank 0 writes. An error there is raised on every
    rank.

    With `dtype` ("bfloat16", "float16" or "float32") every weight is converted as it is written, and config.json says
    so; the model stays as it is.

    Raises:
        CheckpointError: the model has no such format, or a finite weight is beyond the range of float16.
        MemascendError: the model was closed.
        OSError: a file cannot be written, or there are weights already.
    """
    directory = Path(out)
    converted_dtype = None if dtype is None else parse_dtype(dtype)
    sessions = sessions_of(model)
    ranks = ranks_of(model.parameters())
    if saves_adapters(model) and converted_dtype is None:
        if not overwrite:
            _on_first(ranks, partial(_refuse_weights, directory, _ADAPTERS), iter(()))
        _save_adapters(model, directory)
        return
    if sessions and (saves_adapters(model) or has_adapters(model)):
        raise CheckpointError(
            f"{type(model).__name__} holds adapters beside its parameters, which the format of its checkpoint has no "
            "names for: save adapters with the save_pretrained of PEFT's model"
        )
    if not sessions and not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} is not a Hugging Face model: use memascend.parameters_of")

    if not sessions and converted_dtype is None:
        if not overwrite:
            _refuse_weights(directory, _WEIGHTS)
        own: Any = model
        own.save_pretrained(directory, max_shard_size=max_shard_size)
        return
    shards = _shards(_groups(_written_parameters(model)), parse_size(max_shard_size), converted_dtype)
    unread = (group for shard in shards for group in shard)
    made: list[Path] = []

    def begin() -> None:
        if not overwrite:
            _refuse_weights(directory, _WEIGHTS)
        made.extend(path for path in (directory, *directory.parents) if not path.exists())
        directory.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        _write_weights(model, directory, converted_dtype, shards, unread)
        _write_configs(model, directory, converted_dtype)
        _settle(directory, made)

    _on_first(ranks, begin, iter(()))
    for session in sessions:
        session.flush()
    _on_first(ranks, write, unread)


def _on_first(ranks: Ranks | None, do: Callable[[], None], unread: Iterator[_Group]) -> None:
    """Have rank 0 alone do something for which it takes groups from `unread`; the others send it their shares of these.

    Raises an error of the files that rank 0 writes on every rank. The groups that it has left unread are read before,
    so that all ranks are where they would be without the error, and may go on.
    """
    failure: OSError | CheckpointError | None = None
    if ranks is None or ranks.rank == 0:
        try:
            do()
        except (OSError, CheckpointError) as error:
            if ranks is None or isinstance(error, StoreError):
                raise
            # The frames hold views of a buffer that the remaining groups need.
            traceback.clear_frames(error.__traceback__)
            failure = error
    if ranks is not None:
        for group in unread:
            _values(group)
        exchange_errors(ranks, "save the model", failure)


def _refuse_weights(directory: Path, patterns: tuple[str, ...]) -> None:
    """Raise OutputError where `directory` holds weights, which are another model's as far as is known."""
    weights = next((file for pattern in patterns for file in directory.glob(pattern)), None)
    if weights is not None:
        raise OutputError(
            f"{weights} exists: give another directory, or overwrite=True to replace the model that is there"
        )


def saver_of(module: nn.Module) -> Callable[..., None] | None:
    """Return the replacement of `module.save_pretrained` while `module` is offloaded, or None.

    Only models of transformers have one that the format of `save_pretrained` here is the same as. Models of PEFT save
    their adapters themselves, but want them in memory.
    """
    if hasattr(module, "get_base_model") and hasattr(module, "save_pretrained"):
        return partial(_save_adapters, module)
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    return partial(_save_as_transformers, module)


Hooks.save_by(saver_of)


def _save_as_transformers(model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """Save an offloaded model of transformers: `save_pretrained` with the signature that `model`'s class gives it.

    Raises ValueError for an option that cannot be carried out, beside the errors of `save_pretrained`.
    """
    if saves_adapters(model):
        _save_adapters(model, save_directory, *args, **kwargs)
        return
    signature = inspect.signature(type(model).save_pretrained)
    chosen = signature.bind(model, save_directory, *args, **kwargs).arguments
    options = {**chosen, **chosen.pop("kwargs", {})}
    for name in ("self", "save_directory", "kwargs", *_WITHOUT_EFFECT):
        options.pop(name, None)
    shard = options.pop("max_shard_size", signature.parameters["max_shard_size"].default)
    saves = options.pop("is_main_process", True)
    if _is_present(model, options.get("state_dict")):
        del options["state_dict"]  # as accelerate's examples give it
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    for name, value in options.items():
        if value != defaults.get(name, name == "safe_serialization"):
            instead = _INSTEAD.get(name, "leave it out")
            shown = repr(value) if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"
            raise ValueError(
                f"{type(model).__name__} is offloaded: its save_pretrained cannot follow {name}={shown}: {instead}"
            )
    # Every rank sends its shares; which of them writes is settled.
    if saves or ranks_of(model.parameters()) is not None:
        save_pretrained(model, save_directory, max_shard_size=shard, overwrite=True)


def _is_present(model: nn.Module, state: Any) -> bool:
    """Return whether a state dict is the one of `model`, with nothing changed or left out."""
    if not isinstance(state, dict):
        return False
    own = model.state_dict()
    return state.keys() == own.keys() and all(_show_the_same(state[name], value) for name, value in own.items())


def _show_the_same(one: Any, other: Any) -> bool:
    """Return whether two tensors are views of the same values, in memory or on SSD."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if is_proxy(one) or is_proxy(other):
        return is_proxy(one) and is_proxy(other) and shown_by(one) == shown_by(other)
    layouts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (one, other)]
    return layouts[0] == layouts[1]


class _Values(dict[str, Any]):
    """A state dict whose proxies are read when they are asked for: only adapters stay in memory."""

    #: Whether the values that were read stay here.
    keeps = False

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if not isinstance(value, torch.Tensor) or not is_proxy(value):
            return value
        read = value.detach().clone()
        if self.keeps:
            self[name] = read
        return read

    def items(self) -> Any:
        return ((name, self[name]) for name in self)


def _save_adapters(model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """Let a model save its adapters as its class does; those on the store are given to it in memory."""
    own = type(model).save_pretrained
    chosen = inspect.signature(own).bind(model, save_directory, *args, **kwargs).arguments
    sessions = sessions_of(model)
    if sessions and {**chosen, **chosen.get("kwargs", {})}.get("state_dict") is None:
        kwargs["state_dict"] = _Values(model.state_dict())
    ranks = ranks_of(model.parameters())
    if ranks is None:
        own(model, save_directory, *args, **kwargs)
    else:
        _save_adapters_over(ranks, model, save_directory, *args, **kwargs)


def _save_adapters_over(
    ranks: Ranks, model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> None:
    """Let a model of PEFT ask for its adapters on all ranks, and then save them on rank 0."""
    own = type(model).save_pretrained
    if not hasattr(model, "get_base_model"):
        refuse_ranks(model, "saving adapters of transformers' own", "make them with peft.get_peft_model")
    if isinstance(kwargs["state_dict"], _Values):
        kwargs["state_dict"].keeps = True
    bound = inspect.signature(own).bind(model, save_directory, *args, **kwargs)

    def save(directory: str | os.PathLike[str], writes: bool) -> None:
        bound.arguments |= {"save_directory": directory, "is_main_process": writes}
        own(*bound.args, **bound.kwargs)

    with TemporaryDirectory() as nowhere:
        save(nowhere, False)
    _on_first(ranks, partial(save, save_directory, True), iter(()))


def _written_parameters(model: nn.Module) -> _Group:
    """Return the parameters that are written, by name: tied ones under the name that transformers gives them."""
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    tied, unsaved = tied_names(model), unsaved_names(model)
    chosen = {next((name for name in aliases if name not in tied), aliases[0]): p for p, aliases in names.items()}
    return {name: parameter for name, parameter in chosen.items() if name not in unsaved}


def _written_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are written, by their names in the checkpoint."""
    unsaved = unsaved_names(model)
    buffers = {name: buffer for name, buffer in saved_buffers(model).items() if name not in unsaved}
    return revert_conversions(model, buffers)


def _groups(named: _Group) -> list[_Group]:
    """Divide parameters into groups that need at most one unit of a store each.

    A conversion may need several parameters of a layer. So a parameter in memory goes with the unit that holds the
    remainder of its layer.
    """
    units = {name: located[1].tensor.unit for name, parameter in named.items() if (located := place_of(parameter))}
    beside: defaultdict[str, set[Hashable]] = defaultdict(set)
    for name, unit in units.items():
        if not unit.is_table:
            beside[_layer(name)].add(unit)
    groups: defaultdict[Hashable, _Group] = defaultdict(dict)
    for name, parameter in named.items():
        layer = _layer(name)
        neighbours = beside.get(layer, ())
        key = units.get(name) or (next(iter(neighbours)) if len(neighbours) == 1 else layer)
        groups[key][name] = parameter
    return list(groups.values())


def _layer(name: str) -> str:
    """Return the name of the repeated layer that a parameter is in, or else of its module."""
    layer = re.match(r"(.*?\.)??\d+(?=\.)", name)
    return name.rpartition(".")[0] if layer is None else layer[0]


def _values(group: _Group) -> dict[str, torch.Tensor]:
    """Return the present values of a group; values from the store are views of one buffer."""
    values: dict[str, torch.Tensor] = {}
    storage: torch.Tensor | None = None
    for name, parameter in group.items():
        located = place_of(parameter)
        if located is None:
            values[name] = parameter.detach()
            continue
        session, place = located
        storage = session.read_unit(place.tensor.unit) if storage is None else storage
        values[name] = place.view(storage)
    return values


def _write_weights(
    model: nn.Module,
    directory: Path,
    dtype: torch.dtype | None,
    shards: list[list[_Group]],
    unread: Iterator[_Group],
) -> None:
    """Write the safetensors files, with an index if there are several, and remove the files of an earlier save.

    `unread` has the groups of all `shards`; each is taken as it is read.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shown = {name: tensor for group in shard for name, tensor in revert_conversions(model, _shown(group)).items()}
        entries = {name: (_dtype_of(tensor, dtype), tuple(tensor.shape)) for name, tensor in shown.items()}
        # Buffers keep their dtype, as they do where a model is loaded in another one.
        buffers = _written_buffers(model) if number == 1 else {}
        entries |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in buffers.items()}
        write_safetensors(directory / file, entries, _tensors(model, islice(unread, len(shard)), buffers, dtype))
        weight_map |= dict.fromkeys(entries, file)
        total += sum(math.prod(shape) * kind.itemsize for kind, shape in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _replace_index(directory, index if len(shards) > 1 else None, set(weight_map.values()))


def _replace_index(directory: Path, index: dict[str, Any] | None, written: set[str]) -> None:
    """Write the index, or remove an earlier one, and then remove weight files that are no longer in use."""
    if index is None:
        (directory / INDEX_NAME).unlink(missing_ok=True)
    else:
        temporary = directory / (INDEX_NAME + ".tmp")
        temporary.unlink(missing_ok=True)  # A link is not written through.
        with open(temporary, "x") as opened:
            opened.write(json.dumps(index, indent=2) + "\n")
        os.replace(temporary, directory / INDEX_NAME)
    for file in directory.iterdir():
        if (file.name == WEIGHTS_NAME or _SHARD_NAME.fullmatch(file.name)) and file.name not in written:
            file.unlink()


def _write_configs(model: Any, directory: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and, of a model that generates, generation_config.json. A link there is replaced."""
    for name in _CONFIGS:
        if (directory / name).is_symlink():
            (directory / name).unlink()
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
        config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(directory)


def _settle(directory: Path, made: list[Path]) -> None:
    """Wait until all but the weights, which are there, is on the medium: a program may remove the store next.

    `made` are the directories that the save has made.
    """
    with writing(directory):
        for name in (*_CONFIGS, INDEX_NAME):
            if (directory / name).exists():
                sync(directory / name)
        for folder in (directory, *(path.parent for path in made)):
            sync_names(folder)


def _tensors(
    model: nn.Module, groups: Iterable[_Group], buffers: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor | Generator[torch.Tensor, None, None]]]:
    yield from buffers.items()
    for group in groups:
        if (table := _table(model, group)) is not None:
            yield table[0], (_converted(table[0], rows, dtype) for _, rows in table[1].blocks())
            continue
        # A conversion computes on the CPU, wherever the parameters in memory are.
        reverted = revert_conversions(model, {name: value.cpu() for name, value in _values(group).items()})
        for name in list(reverted):
            yield name, _converted(name, reverted.pop(name), dtype)


def _table(model: nn.Module, group: _Group) -> tuple[str, OffloadedTable] | None:
    """Return the name under which a group is written that is one table on the store, and the table."""
    located = place_of(next(iter(group.values()))) if len(group) == 1 else None
    if located is None or not located[1].tensor.unit.is_table:
        return None
    written = revert_conversions(model, _shown(group))
    (name, shown), place = next(iter(written.items())), located[1]
    if len(written) > 1 or (shown.shape, shown.dtype) != (place.shape, place.dtype):
        return None
    return name, located[0].stored_table(place)


def _dtype_of(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a weight is written in."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _converted(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    converted = value.to(_dtype_of(value, dtype))
    if dtype == torch.float16 and converted.isinf().any() and not torch.equal(converted.isinf(), value.isinf()):
        raise CheckpointError(f"{name} has a weight beyond 65504, which float16 cannot hold: save it as bfloat16")
    return converted


def _shown(group: _Group) -> dict[str, torch.Tensor]:
    """Return tensors without contents, of the shapes and dtypes of a group."""
    return {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in group.items()}


def _shards(groups: list[_Group], limit: int, dtype: torch.dtype | None) -> list[list[_Group]]:
    shards: list[list[_Group]] = [[]]
    filled = 0
    for group in groups:
        nbytes = sum(parameter.numel() * _dtype_of(parameter, dtype).itemsize for parameter in group.values())
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += nbytes
    return shards
