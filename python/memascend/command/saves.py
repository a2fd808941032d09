"""Steps that are kept under a name as a run goes on: a checkpoint of its store every so many steps."""

from __future__ import annotations

from typing import Any

import memascend
from memascend.command.exits import note
from memascend.errors import StoreError

PREFIX = "step-"


def save_periodically(model: Any, step: int, every: int | None, keep_last: int | None) -> None:
    """Keep step `step` under its name if it is its turn, and delete all but the last `keep_last` that were kept so.

    Checkpoints of other names stay. Where the store has no room for another, a note says so and the run goes on: its
    last step is durable all the same.
    """
    if every is None or step % every:
        return
    tag = f"{PREFIX}{step}"
    try:
        if tag in _kept(model):  # of a run that has gone back behind it
            memascend.delete_checkpoint(model, tag)
        memascend.save_checkpoint(model, tag)
    except StoreError as error:
        note(f"step {step} is not kept as a checkpoint: {error}")
        return
    for old in _kept(model)[:-keep_last] if keep_last is not None else ():
        memascend.delete_checkpoint(model, old)


def _kept(model: Any) -> list[str]:
    """The checkpoints that were made here, the oldest first."""
    tags = [tag for tag, _, _ in memascend.checkpoints(model)]
    return [tag for tag in tags if tag.removeprefix(PREFIX).isdecimal() and tag.startswith(PREFIX)]
