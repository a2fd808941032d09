"""The best model of a run by its loss on held-out data: a checkpoint in the store, or a model directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import memascend
from memascend.command.exits import note
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

    def take(self, steps: int, finished: Path, *, keep_last: bool) -> bool:
        """Have the best model written to `finished`, which another one may have, and return whether there is one.

        Args:
            steps: the step that was taken last.
            finished: where the model is to be.
            keep_last: whether the store is kept, with the last step as a checkpoint.
        """
        if not self._in_store():
            if not self._folder.is_dir():
                return False
            self._folder.rename(finished)
            return True
        kept = {tag: step for tag, step, _ in memascend.checkpoints(self._model)}
        if self.TAG not in kept:
            return False
        if kept[self.TAG] != steps:
            if keep_last:
                self._name(self.LAST)
                note(f"the store goes back to step {kept[self.TAG]}; its last step is the checkpoint {self.LAST!r}")
            memascend.restore_checkpoint(self._model, self.TAG)
        return False

    def _in_store(self) -> bool:
        session = find_offload(self._model)
        return session is not None and not session.trained_outside() and bool(session.runtime.generation)

    def _name(self, tag: str) -> None:
        """Keep the present state under `tag`, and no longer an earlier one."""
        if tag in {tag for tag, _, _ in memascend.checkpoints(self._model)}:
            memascend.delete_checkpoint(self._model, tag)
        memascend.save_checkpoint(self._model, tag)
