"""Go on with a run from its store: the model, its optimizers and everything that belongs to the last durable step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend._memascend import KeptStore, Rule, return_large_blocks_to_system
from memascend.common.sizes import parse_size
from memascend.durable import exact_json as plain
from memascend.durable.generations import FORMAT, restore_random_states
from memascend.errors import CheckpointError, MemascendError
from memascend.formats.hugging_face import empty_model, materialise
from memascend.layout.units import StorePlane, partition
from memascend.offloading.session import Computing, Offload, find_offload, offload_of, store_paths
from memascend.plan.host import make_plan, smallest_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.layout.units import Unit
    from memascend.offloading.session import StorePaths
    from memascend.optim.base import OffloadedOptimizer


#: What every record has.
_PARTS = {"steps", "model", "recompute", "units", "buffers", "optimizers", "random", "tracked"}


@dataclass(frozen=True)
class Resumed:
    """A run that goes on."""

    model: nn.Module
    #: All that trained the model, in the order in which they were made.
    optimizers: list[OffloadedOptimizer]
    #: Optimizer steps that were durable; those that were left out for a gradient that is not finite do not count.
    steps: int

    @property
    def optimizer(self) -> OffloadedOptimizer:
        """The one optimizer.

        Raises MemascendError if there is none yet, or more than one.
        """
        if len(self.optimizers) != 1:
            raise MemascendError(f"the run had {len(self.optimizers)} optimizers: see `optimizers`")
        return self.optimizers[0]


def resume(
    store: StorePaths,
    *,
    host_memory: str | int | None = None,
    model: nn.Module | None = None,
    tag: str | None = None,
    durability: str = "auto",
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool | None = None,
    activations: str | None = None,
    batch_tokens: int | None = None,
    keep_store: bool | None = None,
    optimizer_classes: Mapping[str, type] | None = None,
    **options: Any,
) -> Resumed:
    """Go on with a run from its last durable step, whatever stopped it: nothing is read but the manifest.

    Weights, states, options and step numbers of the optimizers, the model's buffers and the states of Python's, NumPy's
    and PyTorch's random numbers are as they were. Call `memascend.track` before the loop for what else belongs to it
    (schedulers, scalers, data); it goes on with the same bits then.

    Args:
        store: where the run was, one of its volumes at least.
        host_memory: as in `memascend.offload`; it may be another than before. None is the least that works.
        model: of a run that was begun with `memascend.offload`: the same module again, whatever its weights are. Models
            of transformers need not be given.
        tag: of a checkpoint to go on from, instead of the last durable step. What came after it is given up.
        device, device_memory, activations, batch_tokens, durability, keep_store, options: as in `memascend.offload`;
            they may be others than before. `recompute` is as before unless given.
        optimizer_classes: by name, those of optimizers that are not memascend's own.

    Raises:
        StoreError: there is no such store, it is in use, or what it holds is damaged.
        CheckpointError: it holds another model than the one given, or cannot be understood.
        BudgetError: as in `memascend.offload`.
    """
    return_large_blocks_to_system()
    paths = store_paths(store)
    record = read_record(paths, tag)
    classes = {each["class"]: _class_of(each["class"], optimizer_classes or {}) for each in record["optimizers"]}
    if model is None:
        model = _model_of(record["model"])
    elif (known := find_offload(model)) is not None:
        if not known.runtime.closed:
            raise MemascendError("the model is offloaded already")
        known.forget()
    recompute = record["recompute"] if recompute is None else recompute
    computing = Computing.of(device, device_memory, recompute, activations, batch_tokens)
    units = _units_of(model, record, computing.torch_device)
    plan = smallest_plan(units) if host_memory is None else make_plan(units, parse_size(host_memory))
    if tag is not None:
        # Only now that nothing of it is wrong: the steps after it are given up.
        kept = KeptStore(paths)
        try:
            kept.restore_snapshot(tag)
        finally:
            kept.close()
    state = Offload(
        model,
        units,
        plan,
        paths,
        computing=computing,
        keep_store=keep_store,
        durability=durability,
        source=record["model"],
        options=options,
        resume=True,
    )
    try:
        _find_states(state, record)
        with torch.no_grad():
            state.generations.take_up(record)
        state.attach()
        optimizers = [_optimizer_of(state, each, classes[each["class"]]) for each in record["optimizers"]]
        restore_random_states(record["random"])
    except BaseException:
        state.keep_store = None
        state.close(failed=True)
        raise
    return Resumed(model, optimizers, record["steps"])


def track(model: nn.Module, **objects: Any) -> None:
    """Have the states of `objects` belong to every durable step of an offloaded model's run.

    Objects have `state_dict()` and `load_state_dict()`, of numbers, strings, lists, tuples, dictionaries and tensors:
    `scheduler=`, `scaler=`, or any other name. That of `data=`, a data loader that knows its position, is asked for
    when the step is taken; the others when the next forward pass begins, after schedulers and scalers have followed it.

    In a resumed run each object gets the state that was kept under its name, and random numbers go on where they were:
    call it last before the loop, with the same names. Make the iterator of a `DataLoader` before: it draws a number.
    """
    offload_of(model).generations.track(objects)


def save_checkpoint(model: nn.Module, tag: str, *, keep_last: int | None = None) -> None:
    """Keep the present state of a run in its store under a name, until it is deleted.

    Nothing is copied: what the checkpoint has is not written over any more, and takes as much room as weights and
    states do. With `keep_last`, only so many checkpoints stay: the oldest go. `memascend.resume(store, tag=...)` goes
    on from it.

    Raises:
        StoreError: no room, or the tag is taken; nothing has changed then.
        MemascendError: the run updates in place (durability "none").
    """
    offload_of(model).save_checkpoint(tag, keep_last)


def checkpoints(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return (tag, generation, bytes) of the checkpoints in a model's store, the oldest first."""
    return offload_of(model).runtime.snapshots()


def delete_checkpoint(model: nn.Module, tag: str) -> None:
    """Delete a checkpoint of a model's store; its room is free.

    Raises StoreError if there is none of that name.
    """
    offload_of(model).runtime.delete_snapshot(tag)


def can_resume(store: StorePaths) -> bool:
    """Whether there is a durable step to go on from.

    Raises StoreError if a place cannot be read, or is in use.
    """
    return KeptStore.is_there(store_paths(store))


def read_record(paths: list[Any], tag: str | None = None) -> dict[str, Any]:
    """Return what the store keeps of a run beside its tensors, at its last durable step or at the checkpoint `tag`."""
    kept = KeptStore(paths)
    try:
        checkpoints = {name: state for name, _, _, state in kept.snapshots()}
        if tag is not None and tag not in checkpoints:
            kept.restore_snapshot(tag)  # which says so
        text = kept.state if tag is None else checkpoints[tag]
    finally:
        kept.close()
    if text is None:
        where = ", ".join(str(path) for path in paths)
        raise CheckpointError(
            f"the store in {where} has no durable step to go on from, but checkpoints: give tag= (memascend "
            f"checkpoints --restore) one of {', '.join(checkpoints)}"
        )
    return record_of(text, paths)


def record_of(text: str | None, paths: Sequence[Any]) -> dict[str, Any]:
    """Return what the text is that a store keeps of a run.

    Raises CheckpointError for any other text.
    """
    where = ", ".join(str(path) for path in paths)
    try:
        record = plain.loads(text or "")
        version = record["format"]
        missing = _PARTS - record.keys() if version == FORMAT else None
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the store in {where} keeps something that is no run of memascend: {error}") from None
    if version != FORMAT:
        raise CheckpointError(f"the store in {where} keeps a run in format {version}, this version reads {FORMAT}")
    return record


def _model_of(source: dict[str, Any]) -> nn.Module:
    if source["kind"] != "transformers":
        raise CheckpointError(
            f"the run is of a {source['class']}, which a store cannot make: give the same module as model=..."
        )
    try:
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as error:
        raise CheckpointError("models of transformers need it: pip install 'memascend[hf]'") from error
    values = dict(source["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [source["class"]]
    for name, kept in source["implementations"].items():
        setattr(config, name, kept)
    model = empty_model(config, "the store", torch.float32)
    if source["generation_config"] is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(source["generation_config"])
    if source["conversions"] is not None:
        known = get_model_conversion_mapping(model)
        model._weight_conversions = [known[index] for index in source["conversions"]]
    return model


def _units_of(model: nn.Module, record: dict[str, Any], device: torch.device) -> list[Unit]:
    """Divide the model as the store has it, with the dtypes and frozen parameters that it had."""
    kept = {
        name: (tensor["dtype"], tensor.get("trained", True), trained)
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, _, _, trained in tensor["parameters"]
    }
    for name, parameter in model.named_parameters():
        if name not in kept:
            continue  # told below
        dtype, laid_out_trained, _ = kept[name]
        if parameter.dtype != getattr(torch, dtype):
            parameter.data = parameter.data.to(getattr(torch, dtype))
        parameter.requires_grad_(laid_out_trained)
    units = partition(model, device)
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.requires_grad_(kept[name][2])  # as it was last, whatever it was when it was laid out
    for name, found, known in _differences(units, record):
        raise CheckpointError(f"the store holds another model: {name} is {known} there and {found} in the model given")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        materialise(model, units)
    return units


def _differences(units: list[Unit], record: dict[str, Any]) -> list[tuple[str, str, str]]:
    def shown(where: tuple[Any, ...] | None) -> str:
        return "missing" if where is None else f"of shape {tuple(where[-1])}, at {where[2]} of {where[1]} in {where[0]}"

    found = {
        place.name: (unit.name, tensor.name, place.start, list(place.shape))
        for unit in units
        for tensor in unit.tensors
        for place in tensor.places
    }
    known = {
        name: (unit["name"], tensor["name"], start, shape)
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, shape, start, _ in tensor["parameters"]
    }
    names = [name for name in known | found if known.get(name) != found.get(name)]
    return [(name, shown(found.get(name)), shown(known.get(name))) for name in names[:1]]


def _find_states(state: Offload, record: dict[str, Any]) -> None:
    """Tell every tensor where its states are, in which formats."""
    kept = {
        (tensor["name"], plane, dtype): name
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, plane, dtype in tensor["states"]
    }
    rules: defaultdict[str, list[Rule]] = defaultdict(list)
    for optimizer in record["optimizers"]:
        for name, (_, arguments, _) in optimizer["states"].items():
            rules[name].append(Rule(*arguments))
    for place in state.places:
        for plane in (plane for rule in rules[place.name] for plane in rule.planes):
            name = kept.get((place.tensor.name, plane.name, plane.dtype))
            if name is None or plane in place.tensor.planes:
                continue
            found = state.runtime.find_tensor(name)
            if found is None:
                raise CheckpointError(f"the store has no {name}, which the optimizer needs")
            place.tensor.planes[plane] = StorePlane(plane, name, found, written=True)
    # States that were made room for and never written begin anew where they are needed.
    used = {tensor.name for unit in state.units for tensor in unit.tensors}
    used |= {kept.name for unit in state.units for tensor in unit.tensors for kept in tensor.planes.values()}
    for name in state.runtime.tensor_names():
        if name not in used and not name.startswith(".buffers"):
            found = state.runtime.find_tensor(name)
            assert found is not None
            state.runtime.remove_tensor(found)


def _class_of(name: str, classes: Mapping[str, type]) -> type:
    from memascend import optim

    cls = classes.get(name) or getattr(optim, name, None)
    if cls is None:
        raise CheckpointError(f"the run was trained by a {name}: give it as optimizer_classes={{{name!r}: {name}}}")
    return cls


def _optimizer_of(state: Offload, described: dict[str, Any], cls: type) -> OffloadedOptimizer:
    parameters = {place.name: place.parameter for place in state.places}
    groups = [{**group, "params": [parameters[each] for each in group["params"]]} for group in described["groups"]]
    optimizer = cls(groups, nonfinite=described["nonfinite"])
    optimizer.take_up(described)
    return optimizer
