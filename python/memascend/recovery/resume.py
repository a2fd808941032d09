"""Resuming a run from its store: the model, its optimizers and everything that belongs to the last durable step."""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import torch
from torch import nn

from memascend import optim
from memascend._memascend import ClosedStore, return_large_blocks_to_system
from memascend.autograd.binding import materialise
from memascend.common.sizes import AUTO
from memascend.durability.added import Copies, added_parameters
from memascend.durability.outline import what_it_has
from memascend.durability.record import parse_record, restore_random_states, understanding
from memascend.errors import CheckpointError, MemascendError
from memascend.formats.transformers_models import model_of_record
from memascend.layout.division import divide
from memascend.layout.tables import find_tables
from memascend.optim.record import empty_parameters, find_states
from memascend.options import RECORDED, REPLACE
from memascend.ranks.group import Ranks
from memascend.ranks.locations import paths_of
from memascend.ranks.membership import refuse_share
from memascend.recovery.common_generation import go_to_common_step
from memascend.session import rank_checks
from memascend.session.api import find_offload, offload_of
from memascend.session.open import open_session, opening
from memascend.session.rank_hooks import hooks_for
from memascend.session.runtime import when_free
from memascend.session.saved_weights import version_now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memascend.layout.units import Unit
    from memascend.optim.base import OffloadedOptimizer
    from memascend.options import Activations, Experts, RankLocations, SpareFor, Tuning, Update
    from memascend.session.compute import ComputeOptions
    from memascend.session.session import Session

_log = logging.getLogger("memascend")

#: The options that a session which goes back to a checkpoint is opened with again.
_AS_OPENED = (
    *("device", "device_memory", "recompute", "activations", "batch_tokens", "micro_batch_size", "tile_tokens"),
    *("update", "experts", "durability"),
)


@dataclass(frozen=True)
class Resumed:
    """A resumed run: its model, its optimizers and its position."""

    model: nn.Module
    #: The optimizers that trained the model, in the order in which they were made.
    optimizers: list[OffloadedOptimizer]
    #: Durable optimizer steps. Steps skipped for a gradient that is not finite do not count.
    steps: int

    @property
    def optimizer(self) -> OffloadedOptimizer:
        """The run's only optimizer.

        Raises MemascendError if there is none yet, or more than one.
        """
        if len(self.optimizers) != 1:
            raise MemascendError(f"the run had {len(self.optimizers)} optimizers: see `optimizers`")
        return self.optimizers[0]


def resume(
    store: RankLocations,
    *,
    host_memory: str | int | None = None,
    host_memory_max: str | int | None = None,
    model: nn.Module | None = None,
    tag: str | None = None,
    durability: str = "auto",
    device: str | torch.device | None = None,
    device_memory: str | int | None = None,
    recompute: bool | None = None,
    activations: Activations | None = None,
    batch_tokens: int | tuple[int, int] | None = None,
    micro_batch_size: int | None = None,
    tile_tokens: int | str | None = None,
    update: Update = "forward",
    experts: Experts = "whole",
    spare_memory: SpareFor = "auto",
    keep_store: bool | Literal["replace"] | None = None,
    optimizer_classes: Mapping[str, type] | None = None,
    add_adapters: Callable[[nn.Module], nn.Module] | None = None,
    process_group: Any = None,
    **options: Unpack[Tuning],
) -> Resumed:
    """Go on with a run from its last durable step, whatever stopped it. Only the manifest is read.

    Weights, optimizer states, options and step numbers, the model's buffers and the states of Python's, NumPy's and
    PyTorch's random number generators are restored. Call `memascend.track` before the training loop for schedulers,
    scalers and data loaders. The run then goes on with the same bits: `fused_loss` and `gradients` of `offload` are as
    they were.

    Args:
        store: the volumes of the run's store, at least one. Over ranks as in `memascend.offload`.
        host_memory: as in `memascend.offload`; may differ from before. None is the least that works.
        host_memory_max: as in `memascend.offload`.
        model: for a run begun with `memascend.offload`, the same module again, with any weights. Models of
            transformers need not be given.
        tag: a checkpoint to go on from, instead of the last durable step. All later steps are discarded.
        device, device_memory, activations, batch_tokens, update, experts, durability, keep_store, options: as
            in `memascend.offload`; may differ from before.
        recompute, micro_batch_size, tile_tokens: as in `memascend.offload`. None is as before. Other micro-batches or
            tiles have other bits.
        optimizer_classes: classes by name, for optimizers that are not memascend's own.
        add_adapters: for a run whose adapters were added after `memascend.offload`: a function that is called with the
            model, adds the same ones, with any values, and returns the model that the run goes on with.
        process_group: as in `memascend.offload`. Every rank resumes its own store, of a run with as many ranks
            (`memascend.reshard` makes it one); they go on from the last step that all of them have.

    Raises:
        StoreError: the store does not exist, is in use, or is damaged.
        CheckpointError: the store holds another model than the one given, or cannot be understood.
        BudgetError, DeviceError, TypeError, ValueError: as in `memascend.offload`.
    """
    keywords = locals()
    if keep_store == REPLACE:
        raise ValueError("keep_store='replace' deletes the run that is to be resumed: leave it out")
    return_large_blocks_to_system()
    # The record names these, once it is read.
    as_before = [name for name in RECORDED if keywords.get(name) is None]
    given = {name: value for name, value in keywords.items() if name not in as_before}
    with opening(resume, given) as (chosen, ranks):
        paths = paths_of(store, process_group)
        tags = None if ranks is None else go_to_common_step(paths, ranks)
        if tags is not None and tag is not None and tag not in tags:
            raise CheckpointError(f"the stores of the ranks have no checkpoint {tag} together, but {sorted(tags)}")
        record = read_record(paths, tag)
        if ranks is None:
            refuse_share(record, ", ".join(map(str, paths)))
        if add_adapters is None:
            refuse_added(record)
        classes = {
            described["class"]: _class_of(described["class"], optimizer_classes or {})
            for described in record["optimizers"]
        }
        if model is None:
            with understanding(paths):
                model = model_of_record(record["model"])
        else:
            _free_closed(model)
        recorded: dict[str, Any] = {name: record.get(name) for name in as_before}
        chosen = replace(chosen, **recorded)
        units_of = partial(_divide, model, record, ranks=ranks)
        session = open_session(model, chosen, ranks, units_of, lambda: record["model"], tag=tag, resumes=record)
        try:
            if tags is not None:
                session.checkpoints.delete(name for name in session.checkpoints.tags() if name not in tags)
            whole, states = _restore_model(session, model, record, paths, add_adapters)
            optimizers = []
            for described in record["optimizers"]:
                name = described["class"]
                # An error of a class of the program's own is not the record's fault.
                with nullcontext() if name in (optimizer_classes or {}) else understanding(paths):
                    optimizers.append(_make_optimizer(session, described, classes[name], states))
            with understanding(paths):
                restore_random_states(record["random"])
            if tag is not None:
                # Nothing can be refused any more: now the steps after the snapshot are discarded.
                session.checkpoints.confirm(tag)
                if ranks is not None:  # Until all have that generation, any of them may have to go back.
                    ranks.barrier(f"have gone back to checkpoint {tag}")
        except BaseException:
            session.keep_store = None
            session.close(failed=True)
            raise
    return Resumed(whole, optimizers, record["steps"])


def _restore_model(
    session: Session,
    model: nn.Module,
    record: dict[str, Any],
    paths: Sequence[Any],
    add_adapters: Callable[[nn.Module], nn.Module] | None,
) -> tuple[nn.Module, Any]:
    """Give a model the recorded state and its hooks.

    Return the model that the run goes on with, and the states of the parameters that `add_adapters` has added to it.
    """
    hooks = hooks_for(session)
    with understanding(paths):
        find_states(session, record)
    if add_adapters is None:
        with understanding(paths), torch.no_grad():
            session.commit_log.restore(record)
        hooks.attach()
        return model, {}
    hooks.attach()
    whole = _adapted(session, model, add_adapters)
    with understanding(paths), torch.no_grad():
        session.commit_log.restore(record)
        return whole, session.commit_log.restore_beside(record)


def _adapted(session: Session, model: nn.Module, add_adapters: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return what `add_adapters` makes of a model whose weights are the stored run's.

    Raises CheckpointError where it has changed weights, as some adapters do once at the start of a run.
    """

    before = {place: version_now(place) for place in session.places}
    whole = add_adapters(model)
    changed = next((place for place, version in before.items() if version_now(place) != version), None)
    if changed is not None:
        raise CheckpointError(
            f"add_adapters has changed {changed.name}, which the store has as the run left it: adapters that take a "
            "part of the weights over at the start (PiSSA, OLoRA) have done so already. Add them with "
            "init_lora_weights=False"
        )
    return whole


def refuse_added(record: dict[str, Any]) -> None:
    """Raise CheckpointError for a run whose model had parameters added to it, which only its program can add."""
    names = [name for _, pack in record.get("added", []) for name, *_ in pack]
    if names:
        raise CheckpointError(
            f"the run has parameters that were added to the model after memascend.offload, such as {names[0]}: give "
            "memascend.resume a function that adds them again, such as add_adapters=lambda model: "
            "peft.get_peft_model(model, config)"
        )


def _free_closed(model: nn.Module) -> None:
    """Give a model whose session was closed its own forward back.

    Raises MemascendError while the session is open.
    """
    session = find_offload(model)
    if session is None:
        return
    if not session.closed:
        raise MemascendError(
            "the model is offloaded already: go back with memascend.restore_checkpoint, or close it (memascend.close) "
            "before"
        )
    if session.attachment is not None:
        session.attachment.forget()


def track(model: nn.Module, **objects: Any) -> None:
    """Include the states of `objects` in every durable step of an offloaded model's run.

    Objects are given by name, such as `scheduler=` or `scaler=`. Each has `state_dict()` and `load_state_dict()`, of
    numbers, strings, lists, tuples, dictionaries and tensors. The state of `data=`, a data loader that knows its
    position, is taken at the step. The states of the others are taken when the next forward pass begins, after
    schedulers and scalers have followed the step.

    In a resumed run each object gets the state that was recorded under its name, and the random number generators are
    restored: call `track` last before the loop, with the same names. Make the iterator of a `DataLoader` before it,
    since that draws a random number.

    Raises TypeError for an object without these methods, MemascendError for a state that a record cannot hold.
    """
    offload_of(model).commit_log.track(objects)


def save_checkpoint(model: nn.Module, tag: str, *, keep_last: int | None = None) -> None:
    """Keep the present state of a run in its store under the name `tag`, until it is deleted.

    Nothing is copied: later steps are written elsewhere, so that a checkpoint takes as much space as weights and
    states. `memascend.resume(store, tag=...)` goes on from it. With `keep_last`, only that many checkpoints stay, and
    the oldest are deleted.

    Raises:
        StoreError: the store lacks space, or has the tag already. The run is as before.
        MemascendError: the run updates in place (durability "none").
    """
    offload_of(model).save_checkpoint(tag, keep_last)


def checkpoints(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return (tag, generation number, bytes) of each checkpoint in the store of `model`, the oldest first."""
    return offload_of(model).checkpoints.all()


def delete_checkpoint(model: nn.Module, tag: str) -> None:
    """Delete a checkpoint in the store of `model`, and free its space.

    Raises StoreError if the store has no checkpoint of that name.
    """
    offload_of(model).checkpoints.delete([tag])


def restore_checkpoint(
    model: nn.Module, tag: str | None, *, optimizer_classes: Mapping[str, type] | None = None
) -> Resumed:
    """Go back to a checkpoint in the store of `model`, or to its last durable step (None). Later steps are discarded.

    The model is the same object, and is offloaded as before. Its optimizers are made anew, and the former ones can no
    longer step. Call `memascend.track` again before training goes on.

    Raises StoreError if the store has no checkpoint of that name, before anything has changed.
    """
    session = offload_of(model)
    if session.commit_log.has_beside:
        raise MemascendError(
            "parameters were added to the model after memascend.offload: close it (memascend.close), and go on with "
            "memascend.resume(store, add_adapters=...)"
        )
    if tag is not None:
        session.checkpoints.check(tag)
    whole = session.model()
    kept, session.keep_store = session.keep_store, True
    follows_machine = session.host_budget.follows_machine
    options, group, store = session.options, None, cast("RankLocations", session.paths)
    ranks = session.membership.ranks
    if ranks is not None:
        # The locations are this rank's already.
        group, store = ranks.group, [session.paths] * ranks.size
        ranks.barrier(f"restore checkpoint {tag}")
    # As after a failure: the steps that follow the checkpoint need not be completed.
    session.close(failed=True, resumes=True)
    return resume(
        store,
        model=whole,
        tag=tag,
        host_memory=AUTO if follows_machine else session.host_budget.nbytes,
        host_memory_max=session.plan.budget_max,
        keep_store=kept,
        optimizer_classes=optimizer_classes,
        process_group=group,
        **{name: getattr(options, name) for name in _AS_OPENED},
        **options.tuning,
    )


def can_resume(store: RankLocations, *, process_group: Any = None) -> bool:
    """Return whether `store` has a durable step to go on from; over ranks, whether the stores of all of them have.

    `store` and `process_group` are as in `memascend.offload`. Raises StoreError if a volume cannot be read, or is in
    use.
    """
    ranks = Ranks.of(process_group)
    with rank_checks.synchronise_errors(ranks):
        there = when_free(lambda: ClosedStore.is_there(paths_of(store, process_group)))
        return there if ranks is None else bool(ranks.all_gather("look for a run", torch.tensor([there])).all())


def read_record(paths: list[Any], tag: str | None = None) -> dict[str, Any]:
    """Return the record of a store's last durable step, or of the snapshot `tag`.

    Raises StoreError for a tag that the store does not have, CheckpointError where there is no durable step, or its
    record cannot be read.
    """
    with closing(when_free(lambda: ClosedStore(paths))) as kept_store:
        records = {name: text for name, _, _, text in kept_store.snapshots()}
        if tag is not None and tag not in records:
            kept_store.restore_snapshot(tag)  # Raises, naming the tag.
        text = kept_store.state if tag is None else records[tag]
        if kept_store.is_older:
            _log.warning(
                "the manifest %s is damaged: the one before it was taken, which has %s; the last commit is lost",
                ", ".join(map(str, kept_store.damaged_manifests)),
                what_it_has(kept_store, paths),
            )
    if text is None:
        where = ", ".join(str(path) for path in paths)
        raise CheckpointError(
            f"the store in {where} has no durable step to go on from, but checkpoints: give tag= (memascend "
            f"checkpoints --restore) one of {', '.join(records)}"
        )
    return parse_record(text, paths)


def _divide(model: nn.Module, record: dict[str, Any], computing: ComputeOptions, ranks: Ranks | None) -> list[Unit]:
    """Divide the model as the store has it, with the dtypes and frozen parameters that it had.

    Raises CheckpointError where model and record differ.
    """
    recorded = {
        name: (tensor["dtype"], tensor["trained"], trained)
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, _, _, trained in tensor["parameters"]
    }
    for name, parameter in model.named_parameters():
        if name not in recorded:
            continue  # `_first_difference` names it.
        dtype, laid_out_trained, _ = recorded[name]
        if parameter.dtype != getattr(torch, dtype):
            parameter.data = parameter.data.to(getattr(torch, dtype))
        parameter.requires_grad_(laid_out_trained)
    if ranks is not None:
        _refuse_pieces(model, computing)
    fused_loss = computing.options.fused_loss if ranks is None else None
    units = computing.partition(model, fused_loss, ranks is not None)
    if ranks is not None:
        divide(units, ranks.rank, ranks.size)
    for name, parameter in model.named_parameters():
        if name in recorded:
            _, _, trained_last = recorded[name]
            parameter.requires_grad_(trained_last)  # The layout depends on the parameters that were trained at first.
    _mark_trained_later(units)
    difference = _first_difference(units, record)
    if difference is not None:
        name, there, here = difference
        raise CheckpointError(f"the store holds another model: {name} is {there} there and {here} in the model given")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        materialise(model, units)
    return units


def _mark_trained_later(units: list[Unit]) -> None:
    """Have the plan count what was frozen when the run began, and is trained now."""
    for tensor in (tensor for unit in units for tensor in unit.tensors if not tensor.trained):
        tensor.trained = tensor.trained_later = any(place.parameter.requires_grad for place in tensor.places)


def _refuse_pieces(model: nn.Module, computing: ComputeOptions) -> None:
    """Raise CheckpointError for a run of one process that has computed its loss in pieces: ranks have other bits."""
    if find_tables(model, computing.options.fused_loss) - find_tables(model, False):
        raise CheckpointError(
            "the run computes its loss in pieces (fused_loss), which ranks do not yet: resume it with one process"
        )


def _first_difference(units: list[Unit], record: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return the first parameter whose entry differs, and how the store and the model describe it; None if none."""

    def shown(location: tuple[Any, ...] | None) -> str:
        if location is None:
            return "missing"
        tensor, start, shape = location
        return f"of shape {tuple(shape)}, at {start} of {tensor}"

    here = {
        place.name: (tensor.name, place.start, list(place.shape))
        for unit in units
        for tensor in unit.tensors
        for place in tensor.places
    }
    there = {
        name: (tensor["name"], start, shape)
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, shape, start, _ in tensor["parameters"]
    }
    for name in there | here:
        if there.get(name) != here.get(name):
            return name, shown(there.get(name)), shown(here.get(name))
    return None


def _class_of(name: str, classes: Mapping[str, type]) -> type:
    cls = classes.get(name) or getattr(optim, name, None)
    if cls is None:
        raise CheckpointError(f"the run was trained by a {name}: give it as optimizer_classes={{{name!r}: {name}}}")
    return cls


def _make_optimizer(session: Session, described: dict[str, Any], cls: type, states: Copies) -> OffloadedOptimizer:
    """Make an optimizer again from the result of its `describe`, with the `states` of added parameters."""
    parameters = {place.name: place.parameter for place in session.places}
    parameters |= empty_parameters(session) | added_parameters(session)
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in described["groups"]]
    optimizer = cls(groups, nonfinite=described["nonfinite"])
    optimizer.restore(described)
    if states:
        optimizer.restore_added(described, states)
    return optimizer
