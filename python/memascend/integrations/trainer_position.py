"""Where transformers' Trainer is within its run, as every durable step records it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from memascend.durable.record import random_states, restore_random_states
from memascend.report.figures import Meter
from memascend.report.figures import opening as opening_of

if TYPE_CHECKING:
    from torch import nn

#: What was logged, and the figures of steps, one JSON object a line.
LOG_NAME = "metrics.jsonl"


class Position(TrainerCallback):
    """The Trainer's own state, tracked by `memascend.track`.

    A durable step is recorded before its figures are logged, the model evaluated and a checkpoint saved. A run that is
    resumed there does first what was still to be done.
    """

    #: The name of this in a record.
    NAME = "trainer"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.log = TrainerLog(Path(trainer.args.output_dir) / LOG_NAME)
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        #: The states of random number generators after that was done for the last step.
        self.random: dict[str, Any] = {}
        self._epoch_ends = False
        self._finished_step = self._finished_epochs = 0
        self._loaded: dict[str, Any] | None = None

    def begin(self) -> None:
        """Begin a training, or one that is resumed: then `load_state_dict` follows."""
        self._finished_step = self._finished_epochs = 0
        self._loaded = None

    def finish(self) -> None:
        """Note that the figures of the present step, or of the epoch that ends, were logged and so on."""
        self._finished_step = self._trainer.state.global_step
        self.random = random_states()
        if self._epoch_ends:
            self._finished_epochs = self._epochs
            self._epoch_ends = False

    @property
    def _epochs(self) -> int:
        """The epoch that the present step belongs to, the first being 1."""
        return -int(-(self._trainer.state.epoch or 0) // 1)

    # ---- the record ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state without its log, which is in a file."""
        trainer = self._trainer
        state = dataclasses.asdict(dataclasses.replace(trainer.state, log_history=[]))
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        state["stateful_callbacks"] = {
            type(callback).__name__: callback.state() for callback in callbacks if isinstance(callback, ExportableState)
        }
        return {
            "state": json.loads(json.dumps(state)),
            "logged": self.log.count,
            "finished": [self._finished_step, self._finished_epochs],
            "random": self.random,
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._loaded = recorded
        self._finished_step, self._finished_epochs = recorded["finished"]
        self.random = recorded["random"]
        self.grad_norm, self.learning_rate = recorded["grad_norm"], recorded["learning_rate"]

    def write(self, folder: str, recorded: dict[str, Any]) -> str:
        """Write a recorded state where transformers' Trainer reads it, and return the folder."""
        state = recorded["state"] | {"log_history": self.log.read(recorded["logged"])}
        Path(folder, TRAINER_STATE_NAME).write_text(json.dumps(state))
        return folder

    # ---- the course of a training --------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do what was still to be done when the run was interrupted."""
        trainer = self._trainer
        if trainer._stored is not None:
            self.log.begin(trainer.model, state.log_history, state.max_steps)
        if self._loaded is None:
            return
        trainer._tr_loss = torch.tensor(self._loaded["loss"], device=args.device)
        # The loss of the steps before was, or is still to be, logged; it is not part of this training's mean.
        trainer._total_loss_scalar = -self._loaded["loss"]
        trainer._globalstep_last_logged = self._loaded["last_logged"]
        self._loaded = None
        # The random numbers are those of the step, as evaluation then found them.
        if state.global_step > self._finished_step:
            trainer.control = trainer.callback_handler.on_step_end(args, state, control)
            self._log_save_evaluate()
        else:
            restore_random_states(self.random)
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        epoch_ended = state.epoch == self._epochs or control.should_training_stop
        if epoch_ended and self._epochs > self._finished_epochs:
            trainer.control = trainer.callback_handler.on_epoch_end(args, state, control)
            self._log_save_evaluate()

    def _log_save_evaluate(self) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.grad_norm,
            trainer.model,
            None,
            self._trainer.state.epoch,
            None,
            0.0,
            learning_rate=self.learning_rate,
        )

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Note that what follows belongs to the epoch."""
        self._epoch_ends = True


class TrainerLog:
    """The metrics file of a run, as `memascend report` reads it, with everything that was logged.

    It grows, and a record of the store only has the number of its entries.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Entries that were logged in the present run.
        self.count = 0
        self._meter: Meter | None = None
        self._step = self._tokens = 0

    def begin(self, model: nn.Module, entries: list[dict[str, Any]], steps: int) -> None:
        """Begin with the entries that a run has so far; `steps` is the number of all its steps."""
        lines = self._lines(len(entries))
        kept = sum("logged" in json.loads(line) for line in lines)
        lines += [json.dumps(_record(entry)) + "\n" for entry in entries[kept:]]
        opening = {"record": "resume" if entries else "start", **opening_of(model), "steps": steps}
        self.path.write_text("".join(lines) + json.dumps(opening) + "\n")
        self.count = len(entries)
        self._meter = Meter(model)
        self._step, self._tokens = entries[-1]["step"] if entries else 0, 0

    def count_tokens(self, tokens: int) -> None:
        """Note that a forward pass of so many tokens is taken."""
        self._tokens += tokens

    def figures(self, step: int) -> dict[str, Any]:
        """Return the figures of a step, on average over the steps since the last ones; see `Meter.lap`."""
        assert self._meter is not None, "a training has begun"
        steps, tokens = max(1, step - self._step), self._tokens
        self._step, self._tokens = step, 0
        return _divided(self._meter.lap(tokens), steps)

    def append(self, entry: dict[str, Any], figures: dict[str, Any]) -> None:
        """Add an entry, and the figures of its step."""
        with self.path.open("a") as file:
            file.write(json.dumps(_record(entry) | figures) + "\n")
        self.count += 1

    def read(self, count: int) -> list[dict[str, Any]]:
        """Return the first entries, or those that there are."""
        return [record["logged"] for line in self._lines(count) if "logged" in (record := json.loads(line))]

    def _lines(self, count: int) -> list[str]:
        """Return the lines of the file up to entry `count`; none without entries."""
        lines: list[str] = []
        if not count or not self.path.is_file():
            return lines
        with self.path.open() as file:
            for line in file:
                if not line.endswith("\n"):
                    break  # A killed process has left it unfinished.
                lines.append(line)
                count -= "logged" in json.loads(line)
                if not count:
                    break
        return lines


def _record(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an entry of the Trainer's log."""
    if "loss" in entry:
        named = {"loss": entry["loss"], "grad_norm": entry.get("grad_norm"), "lr": entry.get("learning_rate")}
        return {"record": "step", "step": entry["step"], **named, "logged": entry}
    if "eval_loss" in entry:
        return {"record": "eval", "step": entry["step"], "loss": entry["eval_loss"], "logged": entry}
    return {"record": "log", "step": entry["step"], "logged": entry}


def _divided(lap: dict[str, Any], steps: int) -> dict[str, Any]:
    """Divide what was counted over several steps."""
    for name in ("tokens", "seconds", "ssd_bytes_read", "ssd_bytes_written"):
        lap[name] /= steps
    lap["volumes"] = [[count / steps for count in volume] for volume in lap["volumes"]]
    lap["waited_seconds"] = {kind: seconds / steps for kind, seconds in (lap["waited_seconds"] or {}).items()}
    return lap
