"""The best model of a run by its loss on held-out data: a checkpoint in the store, or a model directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import memascend
from memascend.command.exits import note
from memascend.command.screen import without_plans
from memascend.errors import StoreError
from memascend.offloading.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Best:
    """Keeps the best model so far."""

    #: Its name in the store, and that of the last step where the store goes back behind it.
    TAG, LAST = "best", "last"

    def __init__(self, model: Any, folder: Path, write: Callable[[Path], None]) -> None:
        """Keep models in the store where it has durable steps, else in `folder`, by `write`."""
        self._model, self._folder, self._write = model, folder, write

    def keep(self, step: int) -> None:
        """Keep the model as it is after step `step` instead of the one before."""
        if not self._in_store():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._write(self._folder)
            return
        try:
            self._name(self.TAG)
        except StoreError as error:
            note(f"step {step} is the best so far and cannot be kept: {error}")

    def take(self, step: int, steps: int, finished: Path, *, keep_last: bool) -> bool:
        """Have the model be the best one, or move that to `finished`, and return whether it is there.

        Args:
            step: that after which the best model was kept.
            steps: that which was taken last.
            finished: a directory for the model.
            keep_last: whether the store stays: then the last step becomes a checkpoint.
        """
        if not self._in_store():
            if not self._folder.is_dir():
                return False
            for file in self._folder.iterdir():
                file.rename(finished / file.name)
            return True
        if step == steps:
            return False
        if self.TAG not in self._tags():
            note(f"the best model, of step {step}, could not be kept: the last one is written")
            return False
        if keep_last:
            self._name(self.LAST)
            note(f"the store goes back to step {step}; its last step is the checkpoint {self.LAST!r}")
        with without_plans():
            memascend.restore_checkpoint(self._model, self.TAG)
        return False

    def forget(self) -> None:
        """Delete the best model from a store that is not kept."""
        if self._in_store() and self.TAG in self._tags():
            memascend.delete_checkpoint(self._model, self.TAG)

    def _in_store(self) -> bool:
        session = find_offload(self._model)
        return session is not None and not session.trained_outside() and session.generations.period != 0

    def _name(self, tag: str) -> None:
        """Keep the present state under `tag`, and no longer an earlier one."""
        if tag in self._tags():
            memascend.delete_checkpoint(self._model, tag)
        memascend.save_checkpoint(self._model, tag)

    def _tags(self) -> set[str]:
        return {tag for tag, _, _ in memascend.checkpoints(self._model)}
