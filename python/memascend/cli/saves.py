"""Steps that are kept under a name as a run goes on: checkpoints of its store."""

from __future__ import annotations

from typing import Any

import memascend
from memascend.cli.errors import note
from memascend.errors import StoreError

PREFIX = "step-"


def save_periodically(model: Any, step: int, every: int | None, keep_last: int | None) -> None:
    """Keep step `step` under its name if it is its turn, and delete all but the last `keep_last` that were kept so.

    Checkpoints of other names stay. Where the store has no room for another, a note says so and the run goes on: its
    last step is durable all the same.
    """
    if every is None or step % every:
        return
    if not keep_as(model, f"{PREFIX}{step}", f"step {step} is not kept as a checkpoint"):
        return
    for old in _kept(model)[:-keep_last] if keep_last is not None else ():
        memascend.delete_checkpoint(model, old)


def keep_as(model: Any, tag: str, failure: str) -> bool:
    """Keep the present state under `tag`, and no longer an earlier one; return whether there was room for it.

    Where there was none, a note says `failure`, and why.
    """
    try:
        if tag in tags_of(model):
            memascend.delete_checkpoint(model, tag)
        memascend.save_checkpoint(model, tag)
    except StoreError as error:
        note(f"{failure}: {error}")
        return False
    return True


def tags_of(model: Any) -> list[str]:
    """Return the names of the checkpoints in the store of `model`, the oldest first."""
    return [tag for tag, _, _ in memascend.checkpoints(model)]


def _kept(model: Any) -> list[str]:
    """Return the checkpoints that were made here, the oldest first."""
    return [tag for tag in tags_of(model) if tag.removeprefix(PREFIX).isdecimal() and tag.startswith(PREFIX)]
