"""transformers' Trainer as the command line runs it: the data of a run in its order, its output and its checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from torch.utils.data import Dataset
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import memascend
from memascend.cli import adapters
from memascend.cli.changes import apply_changes
from memascend.cli.data.chat_masking import IGNORED
from memascend.cli.saves import save_periodically
from memascend.errors import NonFiniteError
from memascend.integrations.trainer_arguments import apollo_groups_with_decay
from memascend.integrations.transformers import Trainer
from memascend.optim import NAMED, Apollo

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.cli.changes import Changes
    from memascend.cli.data import TokenBlocks
    from memascend.cli.run_log import RunLog
    from memascend.cli.settings import Settings


class Run(Protocol):
    """The attributes of a run that the loop reads, and the events that it tells."""

    #: The name of the run's progress in a record.
    NAME: str
    settings: Settings
    log: RunLog
    #: The number of all steps.
    steps: int
    #: Options that are others than before, of a run that goes on; entries of its metrics file.
    changes: Changes
    entries: int
    #: Whether the evaluation after the last step is still to be taken, of a run without durable steps.
    evaluation_is_due: bool

    def state_dict(self) -> dict[str, Any]:
        """Return the progress."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""

    def epoch(self, steps: int) -> float:
        """Return how many times the run has gone through its data after so many steps."""

    def opened(self) -> None:
        """Note that all is ready for the first step."""

    def is_ending(self) -> bool:
        """Return whether the run is to end after this step."""

    def agreed(self, reason: str | None) -> str | None:
        """Return the reason for which all processes leave the present step out, if there is one."""

    def stepped(self, step: int) -> None:
        """Note that a step was taken."""

    def skipped(self, text: str) -> None:
        """Note that the step is left out."""

    def evaluating(self, done: int, batches: int) -> None:
        """Note how many of the batches of an evaluation are done."""

    def evaluated(self, step: int, loss: float) -> None:
        """Note an evaluation."""

    def saved(self) -> None:
        """Note that a checkpoint holds the progress."""


class EvaluationEnded(Exception):
    """The run was to end while it evaluated."""


class OrderedSequences(Dataset):
    """Sequences in the order in which they are taken."""

    def __init__(self, blocks: TokenBlocks, length: int, number: Callable[[int], int]) -> None:
        """Take `length` sequences of `blocks`, each with the number that `number` has for its index."""
        self._blocks, self._length, self._number = blocks, length, number

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._blocks.row(self._number(index))


class HeldOut(Dataset):
    """Sequences to evaluate on, as many as fill the last batch: those beyond the held-out ones count for nothing.

    Where processes take a batch each, accelerate would else give some of the first sequences twice.
    """

    def __init__(self, blocks: TokenBlocks, batch: int) -> None:
        """Take all of `blocks`, for batches of so many sequences over all processes."""
        self._blocks, self._length = blocks, -(-len(blocks) // batch) * batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._blocks.row(min(index, len(self._blocks) - 1))
        if index >= len(self._blocks):
            row["labels"] = torch.full_like(row["labels"], IGNORED)
        return row


@dataclass
class LoopArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` of a run on one device."""

    compute_device: str = field(default="cpu", metadata={"help": "the device"})

    @property
    def device(self) -> torch.device:
        """The device of the run, where transformers' is the first one."""
        assert self._setup_devices is not None, "sets up what else there is of a process"
        return torch.device(self.compute_device)

    @property
    def n_gpu(self) -> int:
        """The number of devices, where transformers' counts the machine's."""
        return 0 if self.compute_device == "cpu" else 1


class Loop(Trainer):
    """The Trainer of a run. A `Run` has its records, its progress and its length."""

    _tells_of_memory = False

    def __init__(self, run: Run, model: Any, args: LoopArguments, **named: Any) -> None:
        """Take the arguments of `Trainer`, with the run."""
        self._run = run
        self._reason: str | None = None
        self._is_evaluating = False
        super().__init__(model, args, **named)
        self.remove_callback(PrinterCallback)
        self.add_callback(Events(run, self))

    @property
    def _keeps_log(self) -> bool:
        return True

    def _open_log(self) -> Any:
        return self._run.log

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        """Return the optimizer's class and options, of the command's arguments."""
        settings = self._run.settings
        make, _, options = NAMED[settings.optimizer]
        storage = {"states": settings.states, "master": settings.master, "seed": settings.seed % 2**32}
        nonfinite = "skip" if settings.update == "forward" else "propagate"
        options = {"lr": settings.lr, "nonfinite": nonfinite, **options, **storage}
        if issubclass(make, Apollo):
            # The Trainer's own groups do not tell matrices from others.
            options["params"] = apollo_groups_with_decay(model, args.weight_decay, options.pop("rank"))
        return make, options

    def _init_training_state(self, max_steps: int, *others: Any, **named: Any) -> Any:
        begun = super()._init_training_state(max_steps, *others, **named)
        self.state.compute_steps(self.args, max_steps)  # A run that goes on may evaluate and save at other steps.
        return begun

    def _prepare_for_training(self, *others: Any, **named: Any) -> Any:
        prepared = super()._prepare_for_training(*others, **named)
        run = self._run
        if self._stored is not None:
            memascend.track(self.model, **{run.NAME: run})
        if run.changes:
            apply_changes(run.changes, run.settings, self.optimizer.optimizer, self.lr_scheduler)
        run.log.count = run.entries
        run.opened()
        return prepared

    def training_step(self, *others: Any, **named: Any) -> torch.Tensor:
        """Take a step as `Trainer.training_step` does, and note a loss that is not finite."""
        loss = super().training_step(*others, **named)
        # Only after the backward pass is launched: it waits for the device.
        for value in self._losses.tolist() or [loss.item()]:
            if not math.isfinite(value) and self._reason is None:
                self._reason = f"the loss is {value}"
        return loss

    def _get_grad_norm(self, *others: Any, **named: Any) -> Any:
        is_applied = self._run.settings.update == "backward"  # by the backward pass: there is no norm to take
        if is_applied:
            norm = self._position.grad_norm = math.nan
        else:
            norm = super()._get_grad_norm(*others, **named)
        self._reason = self._run.agreed(self._reason)
        if self._reason is None and not is_applied and not math.isfinite(norm):
            self._reason = f"the gradient norm is {norm}"
        self._run.log.skipped = self._reason is not None
        if self._reason is None:
            return norm
        step = self.state.global_step + 1
        if self._run.settings.on_nan == "stop":
            raise NonFiniteError(
                f"step {step} of {self._run.steps}: {self._reason}; --out was not written (--on-nan skip goes on)"
            )
        self._run.skipped(f"step {step}: {self._reason}; skipped")
        self.optimizer.zero_grad()
        self.lr_scheduler.last_epoch -= 1  # The schedule counts the steps that were taken.
        return norm

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        """Evaluate a batch as `Trainer.prediction_step` does. Raises EvaluationEnded in a run that is to end."""
        if self._run.is_ending():
            raise EvaluationEnded
        found = super().prediction_step(model, inputs, *others, **named)
        self._batches_done += 1
        self._run.evaluating(self._batches_done, self._batches)
        tokens = int((inputs["labels"][:, 1:] != IGNORED).sum())  # The first token of a sequence is not predicted.
        if tokens:
            self._evaluated += torch.tensor([found[0].item() * tokens, tokens], dtype=torch.float64)
        return found

    def evaluation_loop(self, dataloader: Any, *others: Any, metric_key_prefix: str = "eval", **named: Any) -> Any:
        """Evaluate as `Trainer.evaluation_loop` does, with the mean over all tokens as the loss.

        The Trainer takes the mean over batches, which depends on the sequences in each.
        """
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # the sum of the losses of tokens, and their number
        self._is_evaluating, self._batches_done, self._batches = True, 0, len(dataloader)
        try:
            output = super().evaluation_loop(dataloader, *others, metric_key_prefix=metric_key_prefix, **named)
        finally:
            self._is_evaluating = False
        sums = self.accelerator.gather(self._evaluated[None].to(self.args.device)).sum(0)
        # As the Trainer has it, in float32, in which the order of the sums of several processes is not seen.
        output.metrics[f"{metric_key_prefix}_loss"] = (sums[0] / sums[1]).float().item()
        return output

    def _get_num_items_in_batch(self, *others: Any, **named: Any) -> Any:
        # Else the loss of a batch is divided by the tokens that all processes have in theirs.
        return None if self._is_evaluating else super()._get_num_items_in_batch(*others, **named)

    def leave(self) -> None:
        """End a run within an evaluation. It is taken when the run goes on."""
        if self.args.save_strategy == "steps":
            self._run.evaluation_is_due = True
            self._save_checkpoint(self.model, None)

    def evaluate_as_due(self) -> None:
        """Take the evaluation that an interrupted run has left, if there is one."""
        if self._run.evaluation_is_due:
            self._run.evaluation_is_due = False
            self._evaluate(None, None)

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        """Log as `Trainer.log` does, with the epochs of the data. The log is in the metrics file alone."""
        if "loss" in logs and self._reason is not None:
            logs["loss"], self._reason = math.nan, None
        epoch, self.state.epoch = self.state.epoch, self._run.epoch(self.state.global_step)
        try:
            super().log(logs, *others, **named)
        finally:
            self.state.epoch = epoch
        self.state.log_history.clear()

    def _evaluate(self, *others: Any, **named: Any) -> Any:
        metrics = super()._evaluate(*others, **named)
        self._position.finish()  # A run that goes on from the best model does not evaluate it again.
        self._run.evaluated(self.state.global_step, metrics["eval_loss"])
        return metrics

    def _maybe_log_save_evaluate(self, *others: Any, **named: Any) -> None:
        step, logged = self.state.global_step, self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*others, **named)
        settings = self._run.settings
        if step > logged and self._stored is not None:
            save_periodically(self.model, step, settings.save_every, settings.keep_last)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        adapters.finish_checkpoint(folder, self._run.state_dict(), self._run.log.count)
        self._run.saved()

    def flush(self) -> None:
        """Wait until all updates are complete."""
        optimizer = self._own_optimizer()
        if optimizer is not None:
            optimizer.flush()


class Events(TrainerCallback):
    """Ends the run where it was asked for, and evaluates and saves at its end."""

    def __init__(self, run: Run, loop: Loop) -> None:
        self._run, self._loop = run, loop

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Do the rest of the step before."""
        self._loop.evaluate_as_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note a step."""
        self._run.stepped(state.global_step)
        asked = self._run.is_ending()
        control.should_training_stop |= asked
        control.should_save |= asked and args.save_strategy == "steps"
        last = args.eval_strategy == "steps" and state.global_step >= state.max_steps
        due = control.should_evaluate or last
        self._run.evaluation_is_due = due and asked  # In a checkpoint: a store's run takes its last step again.
        control.should_evaluate = due and not asked
