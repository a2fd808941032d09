"""Where transformers' Trainer is within its run, as every durable step records it."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from memascend.durability.record import random_states, restore_random_states
from memascend.report.figures import Meter
from memascend.report.figures import opening as opening_of
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

#: Logs, and the figures of steps, one JSON object a line.
LOG_NAME = "metrics.jsonl"


class TrainerPosition(TrainerCallback):
    """The Trainer's own state, tracked by `memascend.track`.

    A durable step is recorded before its figures are logged, the model evaluated and a checkpoint saved. A run that is
    resumed there first does the rest of that step's work.
    """

    #: The name of this in a record.
    NAME = "trainer"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.log: TrainerLog = trainer._open_log()
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        #: The states of random number generators after that was done for the last step.
        self.random: dict[str, Any] = {}
        self._epoch_ends = False
        self._finished_step = self._finished_epochs = 0
        self._loaded: dict[str, Any] | None = None

    def begin(self) -> None:
        """Begin a training, or one that is resumed: then `load_state_dict` follows."""
        self._finished_step = self._finished_epochs = self.log.count = 0
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
        """Restore a result of `state_dict`."""
        self._loaded = recorded
        self.log.count = recorded["logged"]
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
        """Do the work that was left when the run was interrupted."""
        trainer = self._trainer
        if trainer._keeps_log:
            offloaded = trainer.model if find_offload(trainer.model) is not None else None
            self.log.begin(offloaded, state.log_history, state.max_steps, state.global_step)
        if self._loaded is None:
            return
        trainer._tr_loss = torch.tensor(self._loaded["loss"], device=args.device)
        # The loss of the steps before was, or is still to be, logged; it is not part of this training's mean.
        trainer._total_loss_scalar = -self._loaded["loss"]
        trainer._globalstep_last_logged = self._loaded["last_logged"]
        self._loaded = None
        # The random numbers are the step's, as evaluation then found them.
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
        """Note that the following steps belong to the epoch."""
        self._epoch_ends = True


class TrainerLog:
    """The metrics file of a run, as `memascend report` reads it, with everything that was logged.

    It grows, and a record of the store only has the number of its entries.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Entries of the run that were logged so far.
        self.count = 0
        self._meter: Meter | None = None
        self._step = self._tokens = 0

    def begin(self, model: nn.Module | None, entries: list[dict[str, Any]], steps: int, step: int = 0) -> None:
        """Begin with the entries that a run has so far.

        Args:
            model: the offloaded model; None for one in memory, which has no counters.
            entries: the entries, for those that the file lacks.
            steps: the number of all steps of the run.
            step: that which the run goes on from, whatever the log has of it.
        """
        self.count = max(self.count, len(entries))
        kept = self._cut(self.count)
        self.write(*map(self._record, entries[kept:]))
        opening = opening_of(model)
        self.write({"record": "resume" if self.count else "start", **opening, "steps": steps} | self._about(opening))
        self._meter = Meter(model)
        self._step, self._tokens = step, 0

    def _about(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the first record, with `opening`'s on the machine, the plan and the store."""
        return {}

    def count_tokens(self, tokens: int) -> None:
        """Note that a forward pass of so many tokens is taken."""
        self._tokens += tokens

    def figures(self, step: int) -> dict[str, Any]:
        """Return the figures of a step, on average over the steps since the last ones; see `Meter.lap`."""
        assert self._meter is not None, "a training has begun"
        steps, tokens = max(1, step - self._step), self._tokens
        self._step, self._tokens = step, 0
        return _divided(self._meter.lap(tokens), steps)

    def lap(self) -> dict[str, Any]:
        """Return the figures of the work since the last ones, without tokens that are trained on."""
        return {} if self._meter is None else self._meter.lap(0)

    def append(self, entry: dict[str, Any], figures: dict[str, Any]) -> None:
        """Add an entry, and the figures of its step."""
        self.write(self._record(entry) | figures)
        self.count += 1

    def write(self, *records: dict[str, Any]) -> None:
        """Append records, at once visible to a reader."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def read(self, count: int) -> list[dict[str, Any]]:
        """Return the first entries, or those that there are."""
        return [record["logged"] for record, _ in self._records(count) if is_entry(record)]

    def _cut(self, count: int) -> int:
        """Cut off the entries after entry `count`, and return the number of entries that are left."""
        kept = kept_bytes = 0
        for record, end in self._records(count):
            kept, kept_bytes = kept + is_entry(record), end
        with self.path.open("ab") as file:
            file.truncate(kept_bytes)
        return kept

    def _records(self, count: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the records of the file up to entry `count`, each with where its line ends; none without entries."""
        end = 0
        with self.path.open("rb") if count and self.path.is_file() else nullcontext(()) as lines:
            for line in lines:
                record = parsed(line)
                if record is None:
                    break  # A killed process has left it unfinished.
                end += len(line)
                yield record, end
                count -= is_entry(record)
                if not count:
                    break

    def _record(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the record of an entry of the Trainer's log."""
        if "loss" in entry:
            named = {"loss": entry["loss"], "grad_norm": entry.get("grad_norm"), "lr": entry.get("learning_rate")}
            return {"record": "step", "step": entry["step"], **named, "logged": entry}
        if "eval_loss" in entry:
            return {"record": "eval", "step": entry["step"], "loss": entry["eval_loss"], "logged": entry}
        return {"record": "log", "step": entry["step"], "logged": entry}


def is_entry(record: dict[str, Any]) -> bool:
    """Return whether a record is of something that was logged, and not of how a run began or ended."""
    return record["record"] in ("step", "eval", "log")


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None for one that was left unfinished or holds none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "record" in record else None


def _divided(lap: dict[str, Any], steps: int) -> dict[str, Any]:
    """Divide counts over several steps."""
    if steps == 1:
        return lap
    for name in ("tokens", "seconds", "ssd_bytes_read", "ssd_bytes_written", "network_bytes_sent"):
        if name in lap:
            lap[name] /= steps
    lap["volumes"] = [[count / steps for count in volume] for volume in lap["volumes"]]
    if lap["waited_seconds"] is not None:
        lap["waited_seconds"] = {kind: seconds / steps for kind, seconds in lap["waited_seconds"].items()}
    return lap
