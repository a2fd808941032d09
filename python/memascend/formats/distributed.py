"""Training states to and from other trainers: PyTorch Distributed Checkpoints, streamed, never whole in memory.

Over ranks a checkpoint is written in the order of PyTorch's writer, so rank 0 tells the others which tensors it is
about to read. When it is read, each rank leaves out of PyTorch's plan the pieces that its share does not touch. A rank
whose files are damaged takes part in the commit, so that all can load another checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.autograd.binding import outdate_graphs
from memascend.common.outputs import sync
from memascend.errors import CheckpointError, MemascendError, StoreError
from memascend.formats.saving import saved_buffers
from memascend.layout.registry import place_of, ranks_of
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.states import UnreadStates, read_state, shown_dtype
from memascend.ranks.rank_errors import exchange_errors, raise_on_all_ranks
from memascend.session.api import sessions_of
from memascend.session.rank_checks import compare_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memascend._memascend import Rule
    from memascend.formats.dcp import DistributedReader
    from memascend.layout.units import ParameterEntry
    from memascend.ranks.group import Ranks

#: Prefix of the optimizer's states in a checkpoint; the parameter's name, a dot and the state's
#: name follow.
STATES = "optim.state."


def save_distributed(model: nn.Module, optimizer: OffloadedOptimizer | None, directory: str | os.PathLike[str]) -> None:
    """Write weights, and the optimizer's states unless it is None, as a PyTorch Distributed Checkpoint.

    It holds `{"model": ..., "optim": ...}` as `get_model_state_dict` and `get_optimizer_state_dict` of
    torch.distributed.checkpoint.state_dict give it, so that another trainer loads it by `dcp.load` and
    `set_model_state_dict`, `set_optimizer_state_dict`, on as many ranks as it likes. Tied weights are there under every
    name. States are shown as in `optimizer.state_dict()`: 8-bit ones as float32, and beside them `master_low` or
    `master` of 16-bit weights, which `dcp.load` into an optimizer of `torch.optim` leaves out. A parameter that was
    never updated has states of zeros and a `step` of 0.

    One tensor is in memory at a time, and one of the states on the store's drive. The checkpoint appears under its name
    only when it is whole and on the medium. Where the store is divided over ranks, every rank calls this, and rank 0
    writes; an error there is raised on every rank.

    Raises:
        CheckpointError: `directory` is there already and not empty.
        OSError: of the system, naming `directory`, or the store's where there is no room for the one state. The model
            and the optimizer are as before.
    """
    path = Path(directory)
    state: dict[str, Any] = {"model": {}}
    sources: dict[str, Callable[[], torch.Tensor]] = {}
    names = _names(model)
    _add_weights(model, names, state["model"], sources)
    if optimizer is not None:
        state["optim"] = {"state": {}, "param_groups": []}
        _add_states(_ours(optimizer), names, state["optim"], sources)
    ranks = ranks_of(names)
    if ranks is None:
        _write(path, state, sources)
    else:
        _write_over(ranks, path, state, sources)


def _write_over(
    ranks: Ranks, path: Path, state: dict[str, Any], sources: dict[str, Callable[[], torch.Tensor]]
) -> None:
    """Write a checkpoint on rank 0, to which every rank sends its shares of each tensor in turn."""
    failure: OSError | CheckpointError | None = None
    action = "write a checkpoint"

    def told(key: str, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        ranks.all_gather_object(action, key)
        return source()

    if ranks.rank == 0:
        try:
            _write(path, state, {key: partial(told, key, source) for key, source in sources.items()})
        except (OSError, CheckpointError) as error:
            if isinstance(error, StoreError):
                raise
            failure = error
        ranks.all_gather_object(action, "")
    else:
        while key := ranks.all_gather_object(action, "")[0].strip():
            sources[key]()
    exchange_errors(ranks, action, failure)


def _write(path: Path, state: dict[str, Any], sources: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Write a checkpoint that appears under its name when it is whole."""
    from memascend.formats.dcp import write_distributed

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already: a checkpoint needs a new or an empty directory")
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if hidden.exists():  # left by a killed process with the same number
            shutil.rmtree(hidden)
        hidden.mkdir()
        write_distributed(hidden, state, sources)
        sync(hidden)
        os.rename(hidden, path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, MemascendError):
            # For an open file the system gives no path, and the path of the hidden directory would
            # mislead.
            if error.filename is None or str(hidden) in str(error.filename):
                error.filename = str(path)
            error.filename2 = None
        raise


def _ours(optimizer: Any) -> OffloadedOptimizer:
    if not isinstance(optimizer, OffloadedOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer of memascend: torch.distributed.checkpoint saves and "
            "loads PyTorch's own"
        )
    return optimizer


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every parameter with all its names, unit by unit."""
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    positions = {
        place.parameter: position
        for position, place in enumerate(place for session in sessions_of(model) for place in session.places)
    }
    return dict(sorted(names.items(), key=lambda entry: positions.get(entry[0], len(positions))))


def _add_weights(
    model: nn.Module,
    names: dict[nn.Parameter, list[str]],
    weights: dict[str, torch.Tensor],
    sources: dict[str, Callable[[], torch.Tensor]],
) -> None:
    for session in sessions_of(model):
        session.flush()
    for parameter, aliases in names.items():
        for name in aliases:
            weights[name] = _shown(parameter, parameter.dtype)
            sources[f"model.{name}"] = partial(_weight, parameter)
    weights |= saved_buffers(model)


def _shown(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of the parameter's shape that occupy one element."""
    return torch.zeros((), dtype=dtype).expand(parameter.shape)


def _weight(parameter: nn.Parameter) -> torch.Tensor:
    owner = place_of(parameter)
    if owner is None:
        return parameter.detach()
    state, place = owner
    return place.view(state.read_unit(place.tensor.unit))


def _add_states(
    optimizer: OffloadedOptimizer,
    names: dict[nn.Parameter, list[str]],
    saved: dict[str, Any],
    sources: dict[str, Callable[[], torch.Tensor]],
) -> None:
    _refuse_projected(optimizer)
    optimizer.flush()
    for group in optimizer.param_groups:
        fqns = [_name_in_model(names, parameter) for parameter in group["params"]]
        saved["param_groups"].append({**group, "params": fqns})
        for fqn, parameter in zip(fqns, group["params"], strict=True):
            saved_states = optimizer.state.get(parameter, {})
            if "step" not in saved_states and not parameter.requires_grad:
                continue
            shown = {"step": torch.tensor(float(saved_states.get("step", 0)))}
            for plane in optimizer.last_rule_of(group, parameter).planes:
                shown[plane.name] = _shown(parameter, shown_dtype(plane))
                source = partial(torch.zeros, parameter.shape, dtype=shown_dtype(plane))
                if "step" in saved_states:
                    source = partial(read_state, parameter, plane, saved_states, optimizer.location(parameter))
                sources[f"{STATES}{fqn}.{plane.name}"] = source
            saved["state"][fqn] = shown


def _refuse_projected(optimizer: OffloadedOptimizer) -> None:
    """Raise ValueError for APOLLO, whose moments do not have the shapes of parameters."""
    if any(group.get("rank") is not None for group in optimizer.param_groups):
        raise ValueError(
            f"the moments of {type(optimizer).__name__} do not have the shapes of parameters, and a distributed "
            "checkpoint of them is not supported: give optimizer=None, and keep optimizer.state_dict() with torch.save"
        )


def _name_in_model(names: dict[nn.Parameter, list[str]], parameter: nn.Parameter) -> str:
    if parameter not in names:
        raise ValueError("the optimizer has a parameter that is not the model's: give the model that it trains")
    return names[parameter][0]


# ---- loading ------------------------------------------------------------------------------------------------


def load_distributed(model: nn.Module, optimizer: OffloadedOptimizer | None, directory: str | os.PathLike[str]) -> None:
    """Take over weights, and states unless `optimizer` is None, from a PyTorch Distributed Checkpoint.

    It may be `save_distributed`'s or any other trainer's that saved `{"model": ..., "optim": ...}` with the weights of
    `get_model_state_dict` and the states of `get_optimizer_state_dict`, from any number of ranks. The model may be
    offloaded or not. Values are converted to the dtypes that they have here; options of the groups are taken over as by
    `optimizer.load_state_dict`. Where weights alone are loaded, load them before the optimizer takes its first step:
    states that it has stay as they are.

    Where the store is divided over ranks, every rank calls this, with the same checkpoint on each machine, which is
    compared by its metadata and the beginnings of its pieces. A rank reads the pieces of files that its shares lie in;
    an error of one rank is raised on every rank.

    A few tensors are in memory at a time. Nothing that a pickle could run is loaded: `.metadata` may name only classes
    that describe tensors, everything else goes through `torch.load(weights_only=True)`.

    Raises:
        CheckpointError: there is no such checkpoint, or something is missing, of another shape, truncated or not
            admitted; nothing has changed then. A file whose contents are found to be damaged on the way is named too,
            but tensors that were read before have changed: load another checkpoint.
        MemascendError: the model's weights are read from its files (`frozen="files"`), or it is a part of an offloaded
            model; nothing has changed then.
    """
    from memascend.formats.dcp import DistributedReader

    names, buffers = _names(model), saved_buffers(model)
    _check_can_be_filled(model, names)
    ranks = ranks_of(names)
    with raise_on_all_ranks(ranks, "load a checkpoint"):
        reader = DistributedReader(Path(directory))
        problems: list[str] = []
        keys = _keys(reader, names, buffers, problems)
        states = None if optimizer is None else _state_dict(reader, _ours(optimizer), names, problems)
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise CheckpointError(f"{reader.path} cannot be loaded: {'; '.join(problems[:3])}{more}")
        fingerprint = b"" if ranks is None else reader.fingerprint()
    if ranks is not None:
        compare_checkpoints(ranks, fingerprint, reader.path)
    for session in sessions_of(model):
        session.flush()
    with raise_on_all_ranks(ranks, "load the weights of a checkpoint"), _changing(model, ranks):
        _load_weights(model, keys, reader)
        for name, buffer in buffers.items():
            reader.read_into(f"model.{name}", buffer)
    if optimizer is not None and states is not None:
        with raise_on_all_ranks(ranks, "load the states of a checkpoint"), _changing(model, ranks):
            optimizer.load_state_dict(states)


@contextmanager
def _changing(model: nn.Module, ranks: Ranks | None) -> Iterator[None]:
    """Take part in the commit of the other ranks, on a rank where loading has failed."""
    try:
        yield
    except CheckpointError:
        for session in sessions_of(model) if ranks is not None else ():
            session.commit_log.changed()
        raise


def _keys(
    reader: DistributedReader,
    names: dict[nn.Parameter, list[str]],
    buffers: dict[str, torch.Tensor],
    problems: list[str],
) -> dict[nn.Parameter, str]:
    """Return the key of each parameter, and append weights and buffers that cannot be loaded to `problems`."""
    keys: dict[nn.Parameter, str] = {}
    for parameter, aliases in names.items():
        # A tied parameter may be stored under any of its names.
        name = next((name for name in aliases if f"model.{name}" in reader.entries), aliases[0])
        keys[parameter] = f"model.{name}"
        _check(reader, keys[parameter], parameter, problems)
    for name, buffer in buffers.items():
        _check(reader, f"model.{name}", buffer, problems)
    return keys


def _elements(parameter: nn.Parameter) -> range | None:
    """Return the elements of a parameter that this rank's store has; None for one that is not divided."""
    owner = place_of(parameter)
    if owner is None or owner[1].tensor.shard is None:
        return None
    first, _, count = owner[1].stored
    return range(first, first + count)


def _check_can_be_filled(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> None:
    """Raise MemascendError for a session whose weights `model` cannot replace, all of them."""
    for session in sessions_of(model):
        for place in session.places:
            if not place.tensor.unit.in_store:
                raise MemascendError(
                    f"no checkpoint can be loaded into the model: {place.name} {place.tensor.unit.read_only}"
                )
            if place.parameter not in names:
                raise MemascendError(
                    f"{place.name} is on the store, but not in the model given: load into the whole model, as it was "
                    "offloaded"
                )


def _check(reader: DistributedReader, key: str, wanted: torch.Tensor, problems: list[str]) -> None:
    """Append to `problems` the reason why the tensor `key` cannot be loaded into one like `wanted`, if there is one."""
    problem = reader.problem(key) if key in reader.entries else f"{key} is missing"
    shown = None if problem is not None else reader.shown(key)
    if problem is not None:
        pass
    elif shown is None:
        problem = f"{key} is not a tensor"
    elif shown.shape != wanted.shape:
        problem = f"{key} has shape {tuple(shown.shape)} instead of {tuple(wanted.shape)}"
    elif wanted.is_floating_point() and not shown.is_floating_point():
        problem = f"{key} is of dtype {str(shown.dtype).removeprefix('torch.')}, which is not a dtype of training"
    if problem is not None:
        problems.append(problem)


def _load_weights(model: nn.Module, keys: dict[nn.Parameter, str], reader: DistributedReader) -> None:
    whole: dict[ParameterEntry, torch.Tensor] = {}  # the table that is read

    def read(place: ParameterEntry, target: torch.Tensor, first_row: int | None = None) -> None:
        if first_row is None:
            reader.read_into(keys[place.parameter], target, _elements(place.parameter))
            return
        if place not in whole:
            whole.clear()
            whole[place] = torch.empty(place.shape, dtype=place.dtype)
            reader.read_into(keys[place.parameter], whole[place])
        target.copy_(whole[place].view(-1, target.shape[-1])[first_row : first_row + len(target)])

    for session in sessions_of(model):
        for unit in session.units:
            session.streamer.release(unit)
            session.streamer.discard(unit)
        session.fill(read, None)
        for place in session.places:
            outdate_graphs(place)
    for parameter, key in keys.items():
        if place_of(parameter) is None:
            reader.read_into(key, parameter.detach())


def _state_dict(
    reader: DistributedReader,
    optimizer: OffloadedOptimizer,
    names: dict[nn.Parameter, list[str]],
    problems: list[str],
) -> dict[str, Any]:
    """Return a state dict for `optimizer.load_state_dict`, whose states are read when it takes them over."""
    saved_groups = _saved_groups(reader, problems)
    if not saved_groups:
        return {}
    by_name: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key in reader.entries:
        if key.startswith(STATES):
            fqn, _, name = key.removeprefix(STATES).rpartition(".")
            by_name[fqn][name] = key
    state: dict[int, UnreadStates] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, parameter in zip(numbers, group["params"], strict=True):
            first = _name_in_model(names, parameter)
            groups_with = (
                (name, saved) for saved in saved_groups for name in names[parameter] if name in saved["params"]
            )
            fqn, saved = next(groups_with, (first, {}))
            if not saved:
                problems.append(f"{fqn} is in none of the parameter groups")
            elif options and options is not saved:
                problems.append(f"{fqn} is in another parameter group than {names[group['params'][0]][0]}")
            options = options or saved
            taken = {name: value for name, value in options.items() if name not in optimizer.own_options}
            rule = optimizer.rule_of(group | taken, parameter)
            state[number] = _unread(reader, parameter, rule, fqn, by_name[fqn], problems)
        groups.append(options | {"params": list(numbers)})
    return {"state": state, "param_groups": groups}


def _saved_groups(reader: DistributedReader, problems: list[str]) -> list[dict[str, Any]]:
    """Read the options of all groups; `params` are names."""
    groups: list[dict[str, Any]] = []
    for number in count():
        prefix = f"optim.param_groups.{number}."
        keys = [key for key in reader.entries if key.startswith(prefix)]
        if prefix + "params" not in keys:
            break
        wrong = [problem for problem in map(reader.problem, keys) if problem is not None]
        problems.extend(wrong)
        group = {} if wrong else {key.removeprefix(prefix): reader.read(key) for key in keys}
        if isinstance(group.get("params"), list):
            groups.append(group)
        elif not wrong:
            problems.append(f"{prefix}params is no list of names")
    if not groups and not problems:
        problems.append("optim.param_groups is missing")
    return groups


def _unread(
    reader: DistributedReader,
    parameter: nn.Parameter,
    rule: Rule,
    fqn: str,
    keys: dict[str, str],
    problems: list[str],
) -> UnreadStates:
    """Return the saved states of a parameter; without any it begins like one that never had a gradient."""
    problems_before = len(problems)
    wanted = [plane for plane in rule.planes if plane.name in keys]
    for plane in wanted:
        _check(reader, keys[plane.name], _shown(parameter, shown_dtype(plane)), problems)
    for plane in rule.planes:
        # Other trainers have no such master weights; the weight itself becomes the master then.
        if keys and plane.name not in keys and not plane.name.startswith("master"):
            problems.append(f"{STATES}{fqn}.{plane.name} is missing")
    shown: dict[str, Any] = {}
    if "step" in keys:
        problem = reader.problem(keys["step"])
        if problem is None:
            like = reader.shown(keys["step"])
            shown["step"] = reader.read(keys["step"]) if like is None or like.numel() == 1 else None
            problem = None if _is_count(shown["step"]) else f"{keys['step']} is no number of steps"
        if problem is not None:
            problems.append(problem)
    if len(problems) == problems_before:
        shown |= {plane.name: reader.shown(keys[plane.name]) for plane in wanted}
    elements = _elements(parameter)
    return UnreadStates(shown, lambda name: reader.read(keys[name], elements))


def _is_count(step: Any) -> bool:
    try:
        return 0 <= int(step) == float(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
