"""Checkpoints of other libraries' loops: a directory of kilobytes that names a checkpoint in the store of a model.

The part on the store is kept there under a name. The directory holds that name, and whatever is in memory.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError
from memascend.formats.json_files import read_json
from memascend.layout.registry import place_of
from memascend.layout.units import raw_tensor_access
from memascend.optim import OffloadedOptimizer
from memascend.ranks.rank_errors import broadcast_from_rank0
from memascend.recovery.resume import restore_checkpoint
from memascend.session.api import find_offload, offload_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from torch import nn

    from memascend.ranks.group import Ranks
    from memascend.session.session import Session

#: The file of a checkpoint's directory that names checkpoints in stores; a store's own file has another name.
MANIFEST = "memascend_checkpoint.json"
#: Version of that file. A later version refuses a file that it cannot read.
_FORMAT = 1


def write_names(directory: Path, models: dict[int, tuple[Session, str | None]]) -> None:
    """Write where the store of each offloaded model is, and the name of the checkpoint there; None where there is none.

    Models are known by their number among those that are saved together. The file of an earlier checkpoint stays until
    this one is whole.
    """
    entries = [
        {"index": index, "store": [str(path) for path in session.paths], "tag": tag}
        for index, (session, tag) in models.items()
    ]
    temporary = directory / (MANIFEST + ".tmp")
    temporary.unlink(missing_ok=True)  # A link is not written through.
    with temporary.open("x") as file:
        json.dump({"format": _FORMAT, "models": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / MANIFEST)


def has_names(directory: Path) -> bool:
    """Return whether a directory is a checkpoint that `write_names` was called for."""
    return (directory / MANIFEST).is_file()


def read_names(directory: Path) -> dict[int, str | None]:
    """Return the names that `write_names` was given, by the number of the model.

    Raises CheckpointError where there is no such file, or one that is damaged or of another version.
    """
    file = directory / MANIFEST
    if not has_names(directory):
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it was not saved from an offloaded model. Load its weights into the model "
            "before memascend.offload"
        )
    found = read_json(file)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(f"{file} is of another version of memascend than this one reads")
    try:
        names = {model["index"]: model["tag"] for model in found["models"]}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} names no checkpoint of a store") from error
    if not all(isinstance(index, int) and isinstance(tag, str | None) for index, tag in names.items()):
        raise CheckpointError(f"{file} names no checkpoint of a store")
    return names


def read_name(directory: Path) -> str | None:
    """Return the name in the checkpoint of one model, or None where nothing on its store was trained.

    Raises CheckpointError as `read_names` does, and for the checkpoint of several models.
    """
    names = read_names(directory)
    if list(names) != [0]:
        raise CheckpointError(f"{directory / MANIFEST} is of {len(names)} offloaded models, and here is one")
    return names[0]


def ranks_of(session: Session | None) -> Ranks | None:
    """Return the ranks that a model's store is divided over; None for a model of one process."""
    return None if session is None else session.membership.ranks


def is_trained(session: Session) -> bool:
    """Return whether anything on the store of an offloaded model is trained: else a checkpoint needs none of it."""
    with raw_tensor_access():
        trained = (place.tensor for place in session.places if place.parameter.requires_grad)
        return any(tensor.trained or tensor.trained_later for tensor in trained)


def keep(session: Session, label: str) -> str | None:
    """Keep the present state of an offloaded model in its store, under a new name that begins like `label`.

    Returns the name, the same on every rank, or None where nothing on the store is trained. Raises as
    `memascend.save_checkpoint` does.
    """
    if not is_trained(session):
        return None
    readable = re.sub(r"[^\w=.-]+", "-", label).lstrip("-.")[:80]
    tag = broadcast_from_rank0(
        ranks_of(session), "name a checkpoint", lambda: f"{readable or 'checkpoint'}-{uuid.uuid4().hex[:8]}"
    )
    session.save_checkpoint(tag)
    return tag


def go_back(session: Session, tag: str) -> list[OffloadedOptimizer]:
    """Go back to a named checkpoint of an offloaded model, and return its optimizers, made anew."""
    model = session.model()
    assert model is not None, "the caller holds the model"
    classes = {type(optimizer).__name__: type(optimizer) for optimizer in session.commit_log.optimizers}
    return restore_checkpoint(model, tag, optimizer_classes=classes).optimizers


def forget(model: nn.Module, tags: Iterable[str | None]) -> None:
    """Delete the named checkpoints that are in the store of `model`."""
    session = find_offload(model)
    if session is None or session.closed:
        return
    forgotten = set(tags)
    session.checkpoints.delete([tag for tag in session.checkpoints.tags() if tag in forgotten])


def state_in_memory(model: nn.Module) -> dict[str, Any]:
    """Return the part of `model.state_dict()` that is not on a store."""
    on_store = _names_on_store(model)
    return {name: value for name, value in model.state_dict().items() if name not in on_store}


def load_state_in_memory(model: nn.Module, state: dict[str, torch.Tensor], frozen_elsewhere: bool = False) -> None:
    """Load the result of `state_in_memory`. With `frozen_elsewhere` it may lack frozen weights.

    Raises CheckpointError where the model has other parts in memory now.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    absent = _names_on_store(model)
    if frozen_elsewhere:
        absent |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    differing = sorted(set(unexpected) | (set(missing) - absent))
    if differing:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {differing[0]} is only in one of them, beside what is on the "
            "store; make the model as it was when the checkpoint was saved"
        )


def _names_on_store(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if place_of(parameter) is not None}


def belongs_to(optimizer: Any, session: Session) -> bool:
    """Return whether all that an optimizer trains is on one offloaded model's store, and so in its checkpoints."""
    return isinstance(optimizer, OffloadedOptimizer) and optimizer.trains_only(session)


def successor(optimizer: OffloadedOptimizer, restored: list[OffloadedOptimizer]) -> OffloadedOptimizer:
    """Take from `restored` the optimizer of a checkpoint that trains the parameters of `optimizer`.

    Raises CheckpointError if there is none.
    """
    for index, other in enumerate(restored):
        if type(other) is type(optimizer) and _parameters(other) == _parameters(optimizer):
            return restored.pop(index)
    raise CheckpointError(
        f"the checkpoint has no {type(optimizer).__name__} of the same parameters as the one given: make the "
        "optimizers as they were when it was saved"
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def follow(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Have a scheduler of PyTorch, and those it is made of, set the learning rate of another optimizer."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for inner in getattr(scheduler, "_schedulers", ()):
        follow(inner, old, new)


def open_session(model: nn.Module) -> Session | None:
    """Return the session of a model or of the model that it wraps; None for an ordinary one.

    Raises MemascendError for one that was closed.
    """
    return None if find_offload(model) is None else offload_of(model)
