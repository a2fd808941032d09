"""One architecture of transformers, trained offloaded and in memory, in a process of its own."""

from __future__ import annotations

import copy
import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import architecture_tables
import bit_equality
import numpy as np
import small_models
import tiny_models
import torch
import transformers
from torch.utils import _pytree as pytree

import memascend

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

STEPS = 2
#: Where a model is offloaded to for a moment.
WHERE: dict[str, Any] = {
    "host_memory": "1GiB",
    "allocator": "pageable",
    "durability": "none",
    "engine": "threads",
    "direct": False,
    "compute_threads": 1,
}


class NotBuiltError(Exception):
    """No small model of an architecture can be built."""


class NotTrainedError(Exception):
    """A small model was built, but no inputs are found with which it can be trained in memory."""


def run(pipe: Any, name: str, room: Path) -> None:
    """Send the outcome of the architecture `name`, and the reason."""
    _keep_quiet()
    pipe.send(outcome(name, room))


def run_with_tables(pipe: Any, name: str, room: Path) -> None:
    """Send the outcome of the architecture `name` with tables, and the reason; then how they were used."""
    _keep_quiet()
    architecture_tables.force()
    seen = architecture_tables.Seen()
    pipe.send(outcome(name, room, seen))
    pipe.send(seen)


def _keep_quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def outcome(name: str, room: Path, seen: architecture_tables.Seen | None = None) -> tuple[str, str]:
    """Return the outcome of the architecture `name`, and the reason.

    Where `seen` is given, its tables are read by blocks, and the model in memory computes its loss in pieces. `seen` is
    told how.
    """
    try:
        pristine, inputs = find(getattr(transformers, name))
    except NotBuiltError as error:
        return "not built", str(error)
    except NotTrainedError as error:
        return "not trained", str(error)
    model, beside = copy.deepcopy(pristine), copy.deepcopy(pristine)
    if seen is not None:
        seen.expect(beside)
        if not seen.tables:
            return "no table", ""
        memascend.fuse_loss(beside)
    expected = train(beside, inputs)
    if seen is not None and seen.losses:
        seen.compare(expected, train(copy.deepcopy(pristine), inputs))
    try:
        memascend.offload(model, store=room / "store", **WHERE)
        if wrong := bit_equality.differing(train(model, inputs), expected):
            again = pristine if seen is None else memascend.fuse_loss(pristine)
            if bit_equality.differing(train(again, inputs), expected):
                return "not trained", "in memory, too, two runs differ"
            return "wrong", told(wrong, expected)
        if seen is not None:
            seen.note(model)
        return saved(model, beside, room)
    except memascend.MemascendError as error:
        return "refused", reason_of(error, room)


def find(model_type: Any, **changed: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model of an architecture that can be trained in memory, and inputs for it.

    `changed` are values of its configuration.
    """
    not_built, not_trained = None, None
    try:
        for config in small_models.configurations(model_type, **changed):
            try:
                model = build(model_type, config)
            except Exception as error:
                not_built = not_built or error
                continue
            try:
                return model, inputs_for(model)
            except Exception as error:
                not_trained = not_trained or error
    except Exception as error:
        not_built = not_built or error
    if not_trained is not None:
        raise NotTrainedError(reason_of(not_trained))
    raise NotBuiltError(reason_of(not_built))


def build(model_type: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in model_type(copy.deepcopy(config)).parameters())
    if numel > small_models.PARAMETERS_MAX:
        raise ValueError(f"it has {numel // 1_000_000} million parameters")
    seed(0)
    return model_type(config).float().train()


def inputs_for(model: nn.Module) -> dict[str, Any]:
    """Return the first inputs with which a copy of the model computes a loss and gradients.

    Raises as the first of them do without labels.
    """
    scratch, kinds = copy.deepcopy(model), small_models.Inputs(model)
    first_error: Exception | None = None
    for inputs in kinds.candidates():
        error = error_of(scratch, inputs)
        first_error = first_error or error
        # Where a model refuses the inputs by themselves, it may still want labels: of the first kind.
        for labels in kinds.labels() if error is None else islice(kinds.labels(), 1):
            if error_of(scratch, inputs | labels) is None:
                return inputs | labels
    assert first_error is not None
    raise first_error


def error_of(model: nn.Module, inputs: dict[str, Any]) -> Exception | None:
    """Return why the model cannot compute a loss and gradients with these inputs, or None."""
    seed(1)
    try:
        loss = small_models.loss_of(model(**fresh(inputs)))
        loss.backward()
    except Exception as error:
        return error
    return None if loss.isfinite() else ValueError("the loss is not finite")


def train(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Train two steps and evaluate; return copies of all that was computed, by name."""
    seen: dict[str, torch.Tensor | None] = {}
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        seed(10 + step)
        loss = small_models.loss_of(model(**fresh(inputs)))
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        for name, gradient in tiny_models.gradients_of(model):
            if gradient is None or gradient.numel():  # a parameter without elements has no place on the store
                seen[f"step {step}: gradient of {name}"] = gradient
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    seed(20)
    with torch.no_grad():
        output = model(**fresh(inputs))
    seen |= {f"output {index}": value.clone() for index, value in enumerate(small_models.tensors_of(output))}
    seen |= {f"parameter {name}": value for name, value in memascend.parameters_of(model)}
    seen |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return seen


def saved(model: nn.Module, beside: Any, room: Path) -> tuple[str, str]:
    """Compare the weights loaded after saving the offloaded model, and after saving the one in memory.

    It is loaded by transformers, and offloaded as it is read.
    """
    load = type(beside).from_pretrained
    try:
        beside.save_pretrained(room / "memory")
        loaded = load(room / "memory", dtype=torch.float32)
        expected, parameters = loaded.state_dict(), dict(loaded.named_parameters())
    except Exception as error:
        return "not saved", reason_of(error)
    memascend.save_pretrained(model, room / "offloaded")
    memascend.close(model)
    if wrong := bit_equality.differing(load(room / "offloaded", dtype=torch.float32).state_dict(), expected):
        return "wrong", f"saved and loaded: {told(wrong, expected)}"
    model = memascend.from_pretrained(room / "offloaded", store=room / "again", dtype="float32", **WHERE)
    ours = dict(memascend.parameters_of(model))
    if wrong := bit_equality.differing(ours, parameters):
        if not bit_equality.differing(ours, dict(beside.named_parameters())):
            return "not saved", f"it loads other values than it saved: {told(wrong, parameters)}"
        return "wrong", f"saved and read: {told(wrong, parameters)}"
    memascend.close(model)
    return "same", ""


def seed(number: int) -> None:
    """Seed the three generators that dropout, dropped layers and masks of transformers draw from."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fresh(inputs: dict[str, Any]) -> Any:
    return pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, inputs)


def told(wrong: list[str], all_of_them: dict[str, Any]) -> str:
    return f"{len(wrong)} of {len(all_of_them)} differ, {sorted(wrong)[0]} among them"


def reason_of(error: Exception | None, room: Path | None = None) -> str:
    """Return the beginning of the error, in one line, with paths relative to `room`."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace(f"{room}/", "")[:160]
