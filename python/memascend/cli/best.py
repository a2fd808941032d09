"""The best model of a run by its loss on held-out data: a checkpoint in the store, or a model directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import memascend
from memascend.cli.console import without_plans
from memascend.cli.errors import note
from memascend.cli.saves import keep_as, tags_of
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class BestModel:
    """Keeps the best model so far."""

    #: Its name in the store, and the last step's where the store goes back behind it.
    TAG, LAST = "best", "last"

    def __init__(self, model: Any, folder: Path, write: Callable[[Path], None]) -> None:
        """Keep models in the store where it has durable steps, else in `folder`, by `write`."""
        self._model, self._folder, self._write = model, folder, write
        self._restored: memascend.Resumed | None = None
        #: The step whose model a run that is killed now goes on with as the best one, of a run with checkpoints.
        self.recorded: int | None = None

    def save(self, step: int) -> bool:
        """Keep the model as it is after step `step` instead of the one before, and return whether there was room."""
        if not self._in_store():
            shutil.rmtree(self._of(step), ignore_errors=True)
            self._write(self._of(step))
            for other in self._folder.parent.glob(f"{self._folder.name}-*"):
                if other not in (self._of(step), self._of(self.recorded)):
                    shutil.rmtree(other)
            return True
        return keep_as(self._model, self.TAG, f"step {step} is the best so far, and cannot be kept")

    def restore(self, best_step: int, steps: int, finished: Path, *, keep_last: bool) -> bool:
        """Have the model be the best one, or move that to `finished`, and return whether it is there.

        Args:
            best_step: that after which the best model was kept.
            steps: that which was taken last.
            finished: a directory for the model.
            keep_last: whether the store stays: then the last step becomes a checkpoint.
        """
        if not self._in_store():
            if not self._of(best_step).is_dir():
                note(f"the best model, of step {best_step}, is not there: the last one is written")
                return False
            for file in list(self._of(best_step).iterdir()):
                shutil.move(file, finished / file.name)  # The store may be on another filesystem.
            return True
        if best_step == steps:
            return False
        if self.TAG not in tags_of(self._model):
            note(f"the best model, of step {best_step}, could not be kept: the last one is written")
            return False
        if keep_last:
            has_last = keep_as(self._model, self.LAST, f"step {steps} is the last one, and cannot be kept")
            last = f"its last step is the checkpoint {self.LAST!r}" if has_last else "its last step is discarded"
            note(f"the store goes back to step {best_step}; {last}")
        with without_plans():
            # The store records the optimizers that there are: without this one, no run could go on from it.
            self._restored = memascend.restore_checkpoint(self._model, self.TAG)
        return False

    def delete(self) -> None:
        """Delete the best model from a store that is not kept."""
        if self._in_store() and self.TAG in tags_of(self._model):
            memascend.delete_checkpoint(self._model, self.TAG)

    def _of(self, step: int | None) -> Path:
        """Return the directory of a step's model: a run may go on from an earlier checkpoint, with its own best."""
        return self._folder.with_name(f"{self._folder.name}-{step}")

    def _in_store(self) -> bool:
        session = find_offload(self._model)
        return session is not None and not session.trained_outside() and session.commit_log.period != 0
