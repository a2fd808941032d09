"""The course of a recipe's run between two steps: a signal ends it there, and changed options begin to hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from memascend.cli import adapters
from memascend.cli.changes import Changes, apply_changes, effects
from memascend.cli.errors import note
from memascend.errors import Abandoned

if TYPE_CHECKING:
    from memascend.cli.recipes.record import Record
    from memascend.cli.settings import Settings
    from memascend.common.interrupts import Interrupts


class Stopped(Abandoned):
    """A signal has ended the run after a step. All that belongs to the step is done, unless it was to evaluate."""


class Course(TrainerCallback):
    """Ends a run that was asked to end, keeps what a checkpoint of adapters lacks, and applies changed options."""

    def __init__(self, settings: Settings, interrupts: Interrupts, record: Record, changes: Changes) -> None:
        self._settings, self._interrupts = settings, interrupts
        self._record, self._changes = record, changes
        #: Adapters are in memory: they are kept by checkpoints, the last one after this step.
        self._saved_step: int | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Apply changed options, and let the next signal end the run after its step."""
        for line in effects(self._changes, state.global_step, state.max_steps):
            note(line)
        if self._changes:
            apply_changes(self._changes, self._settings, getattr(optimizer, "optimizer", optimizer), lr_scheduler)
        self._interrupts.graceful = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have adapters saved where the run is to end."""
        control.should_save |= bool(self._interrupts.asked and self._settings.lora_rank)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete a checkpoint of adapters."""
        if self._settings.lora_rank:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            progress = {"steps": state.global_step} | self._record.state_dict()
            adapters.finish_checkpoint(folder, progress, len(state.log_history))
            self._saved_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run here. One of adapters that lacks a checkpoint takes the step first, and saves them after it."""
        if not self._settings.lora_rank or self._saved_step == state.global_step:
            self._end(state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run within an evaluation, which is taken when the run goes on."""
        if not self._settings.lora_rank:
            self._end(state)

    def _end(self, state: Any) -> None:
        if self._interrupts.asked is not None:
            raise (Stopped if state.global_step else Abandoned)(self._interrupts.asked)
