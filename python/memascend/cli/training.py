"""A training run of the command line: transformers' Trainer over blocks of tokens, its progress and its records."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli import adapters
from memascend.cli.changes import Changes, DataPosition, effects, find_changes
from memascend.cli.errors import note
from memascend.cli.loop import EvaluationEnded, HeldOut, Loop, LoopArguments, OrderedSequences
from memascend.cli.metrics import hidden_records
from memascend.cli.tables import step_text
from memascend.cli.within import WithinStep
from memascend.common.outputs import clear_away
from memascend.common.progress import Progress
from memascend.common.sizes import format_size
from memascend.errors import Abandoned, DataError, MemascendError, NonFiniteError
from memascend.report.counters import SSD_COUNTERS
from memascend.report.figures import stats_of
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from memascend.cli.best import BestModel
    from memascend.cli.data import TokenBlocks
    from memascend.cli.run_log import RunLog
    from memascend.cli.settings import Result, Settings
    from memascend.common.interrupts import Interrupts
    from memascend.ranks.group import Ranks

#: The names of schedules that are others in transformers, whose "constant" leaves out the warm-up.
SCHEDULES = {"constant": "constant_with_warmup"}
#: Messages of backends where another process is gone.
_CONNECTION = re.compile(r"gloo|[Cc]onnection|Broken pipe|[Tt]imed out")
#: Evaluations of a run, without --eval-steps.
EVALUATIONS = 10


class Training:
    """A run of `Loop`, and its record in the store, or in a checkpoint."""

    #: The name of this in a record.
    NAME = "progress"

    def __init__(
        self,
        settings: Settings,
        model: Any,
        blocks: TokenBlocks,
        held_out: TokenBlocks | None,
        log: RunLog,
        best: BestModel,
        interrupts: Interrupts,
        result: Result,
    ) -> None:
        self.settings, self.model, self.blocks, self.held_out = settings, model, blocks, held_out
        self.log, self.best, self.interrupts, self.result = log, best, interrupts, result
        #: The expected memory and traffic of the run, for the metrics.
        self.forecast: dict[str, Any] = {}
        #: When the run began, in ISO 8601: the time that chat templates write.
        self.clock = ""
        self.tokens_per_step = settings.sequences_per_step * settings.seq_len
        self.changes: Changes = {}
        self._position = DataPosition()
        self.steps = self._position.length(settings, len(blocks))
        # Identifies the data: its size, and how it begins.
        self._data = [blocks.tokens, len(blocks), _beginning(blocks)]
        self._held_out = None if held_out is None else [held_out.tokens, len(held_out), _beginning(held_out)]
        self.evaluation_is_due = False
        #: A hidden file with the records of the run before, which another --out has copied; not needed at the end.
        self.left: Path | None = None
        #: Entries of the metrics file that the run has from before.
        self.entries = 0
        self._resumed = False
        self._offloaded = None if settings.in_memory else model
        self._stats_before: dict[str, Any] = {}
        #: Notices that were printed.
        self._noted: set[str] = set()
        self._bar: Progress | None = None
        self._within: WithinStep | None = None
        result.steps_planned = self.steps
        result.parameters = sum(p.numel() for p in model.parameters())

    # ---- its progress --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run, for the store."""
        return {
            "steps": self.result.steps,
            "steps_skipped": self.result.steps_skipped,
            "losses": self.result.losses,
            "evaluations": self.result.evaluations,
            "seconds": self.result.seconds,
            "settings": self.settings.decisive,
            "save_dtype": self.settings.save_dtype,
            "data": self._data,
            "tokens_max": self.blocks.tokens_max,
            "position": [self._position.steps, self._position.sequences],
            "held_out": self._held_out,
            "clock": self.clock,
            "evaluation_is_due": self.evaluation_is_due,
            "records": str(self.settings.metrics_file.absolute()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: `resume` has restored the state before there was a Trainer."""

    def resume(self, state: dict[str, Any], entries: int) -> None:
        """Go on from a recorded state, after which the metrics file had `entries` entries.

        Raises DataError where the data differs from the saved run's, or an option that was not to be changed.
        """
        self.changes = find_changes(state["settings"], self.settings)
        if state["data"] != self._data:
            raise DataError("the data is not that of the run in the store: --resume needs the same files")
        result = self.result
        for name in ("steps", "steps_skipped", "losses", "evaluations", "seconds"):
            setattr(result, name, state[name])
        if state["held_out"] != self._held_out:
            if result.evaluations:
                note("--eval is on other data than before: the best model is chosen among what follows")
            result.evaluations = []
        result.steps_before = result.steps
        self.saved()
        self.evaluation_is_due = state["evaluation_is_due"]
        self._position = DataPosition(*state["position"])
        if self.changes:
            before = state["settings"]
            per_step = before["batch_size"] * before["grad_accum"] * before.get("processes", 1)
            self._position = DataPosition(result.steps, self._position.sequence(result.steps, per_step))
        result.steps_planned = self.steps = self._position.length(self.settings, len(self.blocks))
        for line in effects(self.changes, result.steps, self.steps, self._position, self.blocks):
            note(line)
        # Where an interrupted run has put its metrics, or a killed one.
        before = Path(state["records"])
        if not before.is_file():
            clear_away(before.parent.parent)
            self.left = before = hidden_records(before.parent)
        self.log.keep(entries, self._identity(), before=before, named=self.settings.metrics is not None)
        self.entries = entries
        self._resumed = True

    def begin_anew(self) -> None:
        """Begin, where a run was to go on that has recorded nothing of itself yet.

        Raises OutputError where the metrics file that the user has named is not of a run of this model and data.
        """
        self.log.keep(0, self._identity(), before=None, named=True)

    def epoch(self, steps: int) -> float:
        """Return how many times the run has gone through its data after so many steps."""
        return self._position.sequence(steps, self._per_step) / len(self.blocks)

    # ---- the run -------------------------------------------------------------------------------------------

    def run(self, folder: Path, checkpoint: Path | None = None) -> None:
        """Train, and record steps, losses and time in the result. All updates are complete on return.

        Args:
            folder: where the Trainer may write.
            checkpoint: the Trainer's checkpoint to go on from, where the progress is not in a store.
        """
        self._compare()
        result = self.result
        self.log.about, self.log.on_record = self._about, self._show
        use_cache = getattr(self.model.config, "use_cache", None)
        evaluation = None
        if self.held_out is not None:
            evaluation = HeldOut(self.held_out, self.settings.batch_size * self.settings.processes)
        loop = Loop(
            self,
            self.model,
            self._arguments(folder, first=checkpoint is None and not self._resumed),
            train_dataset=OrderedSequences(self.blocks, self.steps * self._per_step, self._sequence),
            eval_dataset=evaluation,
            data_collator=self.blocks.padded,
        )
        try:
            loop.train(str(checkpoint) if checkpoint is not None else self._resumed or None)
        except EvaluationEnded:
            if not result.steps:
                raise Abandoned(self.interrupts.asked or 0) from None
            loop.leave()
        except RuntimeError as error:
            # The Trainer's own collectives, which tell the backend's error alone.
            if self._ranks is None or isinstance(error, MemascendError) or not _CONNECTION.search(str(error)):
                raise
            raise self._ranks.lost("train", error) from error
        finally:
            if self._within is not None:
                self._within.close()
            if self._bar is not None:
                self._bar.close()
            if use_cache is not None:
                self.model.config.use_cache = use_cache  # The Trainer turns it off, also in the files of the model.
        loop.flush()
        if result.steps_skipped == result.steps > 0:
            raise NonFiniteError(f"all {result.steps} steps were skipped for a non-finite loss or gradient")
        result.seconds += self.log.lap()["seconds"]
        ended = stats_of(self._offloaded)
        for name in SSD_COUNTERS:
            # Of the training alone: loading the model and evaluating it before moved bytes too.
            setattr(result, name, ended.get(name, 0) - self._stats_before.get(name, 0))

    @property
    def _per_step(self) -> int:
        return self.settings.sequences_per_step

    def _sequence(self, index: int) -> int:
        """Return which sequence comes at an index of the run, if steps had always been of the present size."""
        taken = index - self._position.steps * self._per_step
        return self.blocks.number(self._position.sequences + taken)

    def _arguments(self, folder: Path, first: bool) -> LoopArguments:
        settings = self.settings
        evaluating = self.held_out is not None
        return LoopArguments(
            output_dir=str(folder),
            compute_device=settings.device or "cpu",
            use_cpu=settings.device is None,
            dataloader_pin_memory=settings.device is not None,
            seed=settings.seed,
            max_steps=self.steps,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.grad_accum,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            label_names=["labels"],
            learning_rate=settings.lr,
            lr_scheduler_type=SCHEDULES.get(settings.schedule, settings.schedule),
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            logging_steps=1,
            disable_tqdm=True,
            report_to=list(settings.report_to) or "none",
            run_name=settings.out.name,
            prediction_loss_only=True,
            eval_strategy="steps" if evaluating else "no",
            eval_steps=(settings.eval_steps or math.ceil(self.steps / EVALUATIONS)) if evaluating else None,
            eval_on_start=evaluating and first,
            save_strategy="steps" if adapters.has_checkpoints(settings) else "no",
            save_steps=settings.save_every or adapters.STEPS,
            save_total_limit=max(adapters.KEPT, settings.keep_last or 0),
        )

    def opened(self) -> None:
        """Note that all is ready for the first step."""
        self._stats_before = stats_of(self._offloaded)
        self._bar = Progress("training", self.steps)
        self._notes(self._bar)
        if self._offloaded is not None and self.settings.recompute:
            self._within = WithinStep(self.model, self._show_within)
        self.interrupts.graceful = True

    def _identity(self) -> dict[str, Any]:
        """Return the fields by which the first record of the metrics file is known as the run's."""
        return {"parameters": self.result.parameters, "tokens": self.blocks.tokens, "blocks": len(self.blocks)}

    def _about(self, opening: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the first record of the metrics file."""
        return {
            "settings": self.settings.as_record(),
            **self._identity(),
            "changes": self.changes,
            "baseline_rss_bytes": self.result.baseline_rss_bytes,
            "forecast": self.forecast,
        }

    def _notes(self, bar: Progress) -> None:
        """Print one line on the run that begins, and the notices so far."""
        stats = self._stats_before
        parts = [f"{self.result.parameters / 1e6:,.1f}M parameters in {self.settings.dtype}"]
        if stats:
            direct = "direct I/O" if stats["direct_io"] else "buffered I/O"
            parts.append(f"{stats['engine']}, {direct}")
            auto = " (auto)" if stats["host_memory_auto"] else ""
            parts.append(f"host memory {format_size(stats['host_bytes_budget'])}{auto}")
            if "device_bytes_budget" in stats:
                parts.append(f"{self.settings.device} {format_size(stats['device_bytes_budget'])}")
        parts.append(f"{self.steps} steps of {self.tokens_per_step:,} tokens")
        if self._resumed:
            parts.append(f"going on after step {self.result.steps}")
        bar.note("; ".join(parts))
        self._note_notices(bar)

    def _note_notices(self, bar: Progress) -> None:
        """Print the store's notices, and the model's, that were not printed yet."""
        session = None if self._offloaded is None else find_offload(self._offloaded)
        for notice in () if session is None else session.all_notices:
            if notice not in self._noted:
                self._noted.add(notice)
                bar.note(f"memascend: note: {notice}")

    # ---- events of the loop --------------------------------------------------------------------------------

    def is_ending(self) -> bool:
        """Return whether the run is to end after this step. Over processes all ask, and one signal is enough."""
        ranks = self._ranks
        if ranks is not None:
            asked = torch.tensor([self.interrupts.asked or 0])
            self.interrupts.asked = int(ranks.all_gather("ask whether the run is to end", asked).max()) or None
        return self.interrupts.asked is not None

    def agreed(self, reason: str | None) -> str | None:
        """Return why the present step is to be left out, as the first process says that has a reason; None for none."""
        ranks = self._ranks
        if ranks is None:
            return reason
        told = [text.strip() for text in ranks.all_gather_object("tell whether the loss is finite", reason or "")]
        return next((text for text in told if text), None)

    @property
    def _ranks(self) -> Ranks | None:
        session = None if self._offloaded is None else find_offload(self._offloaded)
        return None if session is None else session.membership.ranks

    def _compare(self) -> None:
        """Raise DataError on all processes where one has other data, or options that decide, than the first."""
        if self._ranks is None:
            return
        mine = json.dumps([self.settings.decisive, self._data, self._held_out])
        told = [json.loads(text) for text in self._ranks.all_gather_object("compare data and options", mine)]
        for process, of_process in enumerate(told):
            if of_process != told[0]:
                raise DataError(
                    f"process {process} has other data or options than process 0: give all of them the same files and "
                    "the same command line"
                )

    def stepped(self, step: int) -> None:
        """Note that a step was taken."""
        assert self._bar is not None, "the run has begun"
        self.result.steps = step
        self._note_notices(self._bar)
        if self._within is not None:
            self._within.stepped()

    def _show_within(self, share: str) -> None:
        """Show how far the step is that follows those that were taken; an evaluation shows its batches."""
        assert self._bar is not None, "the run has begun"
        if self.model.training:
            self._bar.pulse(f"step {self.result.steps + 1}: {share}")

    def skipped(self, text: str) -> None:
        """Note that the step is left out."""
        assert self._bar is not None, "the run has begun"
        self._bar.note(f"memascend: note: {text}")
        self.result.steps_skipped += 1

    def evaluating(self, done: int, batches: int) -> None:
        """Show how far an evaluation is."""
        assert self._bar is not None, "the run has begun"
        if self._within is not None:
            self._within.forget()
        if done < batches:
            self._bar.update(self.result.steps, [f"evaluating {done}/{batches}"])

    def evaluated(self, step: int, loss: float) -> None:
        """Note an evaluation, and keep the model if it is the best one so far. At step 0 there is nothing to keep."""
        assert self._bar is not None, "the run has begun"
        found = {"step": step, "loss": loss}
        first, *best = self.result.evaluations or [found]
        is_best = step > 0 and not (best and best[0]["loss"] <= loss) and math.isfinite(loss)
        text = f"step {step}: loss {loss:.4f} on held-out data" + (", the least so far" if is_best else "")
        self._bar.note(text)
        self._bar.update(self.result.steps)  # without the batches of the evaluation
        if is_best:
            best = [found] if self.best.save(step) else []
        self.result.evaluations = [first, *best]

    def saved(self) -> None:
        """Note that a run which goes on has the present progress, and with it the best model so far."""
        for best in self.result.evaluations[1:]:
            self.best.recorded = best["step"]

    def _show(self, record: dict[str, Any]) -> None:
        """Take the figures of a step that was recorded."""
        if record["record"] != "step":
            return
        assert self._bar is not None, "the run has begun"
        self.result.seconds += record["seconds"]
        loss = math.nan if record["loss"] is None else record["loss"]
        if not record["skipped"]:
            self.result.losses[1:] = [loss]
        self._bar.update(record["step"], step_text({**record, "loss": loss}))


def _beginning(blocks: TokenBlocks) -> list[int]:
    """Return the ids of the sequence that comes first."""
    return blocks.batch(0, 1)["input_ids"].flatten().tolist()
