"""The options and data that a recipe's run was begun with, which a run that goes on is compared with.

The store has them with every durable step. Adapters are in memory: their checkpoints have them.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import memascend
from memascend.cli import adapters
from memascend.cli.changes import RATES, Changes, compare
from memascend.errors import DataError
from memascend.ranks.locations import paths_of
from memascend.recovery.resume import read_record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from memascend.cli.recipes.tasks import Task
    from memascend.cli.settings import Settings

#: The name of the command's own loop in the record of a store.
_OWN_LOOP = "progress"
#: Settings that may differ with --change. Those that decide the rows of a step may not: the trainer counts batches.
_CHANGEABLE = (*RATES, "max_grad_norm", "weight_decay")


class Record:
    """The options and the data of a run, as `memascend.track` takes them."""

    #: The name of this in the record of a store.
    NAME = "recipe"

    def __init__(self, task: Task, settings: Settings, trainer_options: Mapping[str, Any], rows: Any) -> None:
        given = {"task": task.name, "trainer_options": dict(trainer_options)}
        # As the record has them: without tuples.
        self.settings = json.loads(json.dumps(settings.decisive | given, default=str))
        ends = json.dumps([rows[0], rows[len(rows) - 1]], default=str, sort_keys=True)
        self.data = [len(rows), hashlib.sha256(ends.encode()).hexdigest()]

    def state_dict(self) -> dict[str, Any]:
        """Return the options and the data."""
        return {"settings": self.settings, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: they were compared before the model was opened."""

    def changes_since(self, before: dict[str, Any], change: bool) -> Changes:
        """Return the options that differ from the run's.

        Raises DataError, naming the option, for one that may not differ, and where the data differs.
        """
        allowed = _CHANGEABLE if change else ()
        changes = compare(before.get("settings", {}), self.settings, allowed, _CHANGEABLE)
        if before.get("data", self.data) != self.data:
            raise DataError("the data is not that of the run in the store: --resume needs the same files")
        return changes


def record_before(settings: Settings) -> dict[str, Any]:
    """Return the record of the run that goes on; empty for one that begins.

    Raises DataError where the store holds a run of the command's own loop.
    """
    if not settings.resume:
        return {}
    if settings.lora_rank:
        checkpoint = last_checkpoint(settings)
        return {} if checkpoint is None else adapters.recorded(checkpoint)[0]
    if not is_kept(settings):
        return {}
    tracked = read_record(paths_of(list(settings.store)))["tracked"]
    if _OWN_LOOP in tracked:
        where = ", ".join(map(str, settings.store))
        raise DataError(f"{where} holds a run of --task sft or pretrain: go on with that, or give another --store")
    return tracked.get(Record.NAME, {})


def last_checkpoint(settings: Settings) -> Path | None:
    """Return the last whole checkpoint of adapters in OUT, or None."""
    if not settings.lora_rank or not settings.out.is_dir():
        return None
    return next(filter(adapters.is_whole, reversed(adapters.checkpoints_in(settings.out))), None)


def is_kept(settings: Settings) -> bool:
    """Return whether there is a run that --resume goes on with."""
    if settings.lora_rank:
        return last_checkpoint(settings) is not None
    return memascend.can_resume(paths_of(list(settings.store)))
