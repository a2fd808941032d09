"""The training loop of the command line: the ordinary PyTorch loop, with a record of every step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import memascend
from memascend.command import metrics
from memascend.command.changes import Changes, Position, apply_changes, effects, find_changes
from memascend.command.data import Blocks
from memascend.command.exits import note
from memascend.command.saves import save_periodically
from memascend.command.settings import Result, Settings
from memascend.command.tables import step_text
from memascend.common.interrupts import Interrupts
from memascend.common.progress import Progress
from memascend.common.sizes import format_size
from memascend.errors import DataError, NonFiniteError
from memascend.optim import NAMED, OffloadedOptimizer
from memascend.report import figures


def schedule_factor(name: str, step: int, warmup_steps: int, steps: int) -> float:
    """Return the factor of the learning rate at step 0, 1, ...: a linear warm-up, then constant or down to 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if name == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return max(0.0, 1.0 - done) if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases; frozen parameters in neither."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Training:
    """The loop: gradients of `grad_accum` batches, clipping, a step, a record."""

    def __init__(
        self,
        settings: Settings,
        model: Any,
        blocks: Blocks,
        records: metrics.Metrics,
        interrupts: Interrupts,
        result: Result,
        resumed: memascend.Resumed | None,
        forecast: dict[str, Any],
    ) -> None:
        self.settings, self.model, self.blocks, self.resumed = settings, model, blocks, resumed
        self.metrics, self.interrupts, self.result = records, interrupts, result
        self.forecast = forecast  # What the run was expected to take, for the metrics.
        self._offloaded = None if settings.in_memory else model
        per_step = settings.batch_size * settings.grad_accum
        self.tokens_per_step = per_step * settings.seq_len
        self._per_step = per_step
        self._position, self._changes = Position(), Changes()
        self.steps = self._position.length(settings, len(blocks))
        # Identifies the data: its size, and how it begins.
        self._data = [blocks.tokens, len(blocks), blocks.batch(0, 1)["input_ids"].flatten().tolist()]
        self._records_before: Path | None = None
        result.steps_planned = self.steps
        result.parameters = sum(p.numel() for p in model.parameters())

    def run(self) -> None:
        """Train, and record steps, losses and time in the result. All updates are complete on return."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        self.model.train()
        self.optimizer = self._optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: schedule_factor(settings.schedule, step, settings.warmup_steps, self.steps),
        )
        if not settings.in_memory:
            memascend.track(self.model, scheduler=self.scheduler, progress=self)
        if self._changes:
            self._change()
        self.result.steps_before = self.result.steps
        opening = figures.opening(self._offloaded)
        stats = opening["store"]
        run = {"parameters": self.result.parameters, "tokens": self.blocks.tokens, "blocks": len(self.blocks)}
        if settings.resume:
            named = settings.metrics is not None
            self.metrics.keep(self.result.steps, run, before=self._records_before, named=named)
        self.metrics.write(
            "resume" if self.resumed else "start",
            settings=settings.as_record(),
            **run,
            steps=self.steps,
            changes=self._changes,
            baseline_rss_bytes=self.result.baseline_rss_bytes,
            forecast=self.forecast,
            **opening,
        )
        bar = Progress("training", self.steps)
        try:
            self._notes(bar, stats)
            self.interrupts.graceful = True
            for step in range(self.result.steps + 1, self.steps + 1):
                self._step(step, bar)
                if self.interrupts.asked is not None:
                    break
        finally:
            bar.close()
        self.optimizer.flush()
        if self.result.steps_skipped == self.result.steps > 0:
            raise NonFiniteError(f"all {self.result.steps} steps were skipped for a non-finite loss or gradient")
        self.result.seconds += self.meter.lap(0)["seconds"]
        ended = figures.stats_of(self._offloaded)
        for name in figures.SSD_COUNTERS:
            # Of the training alone: loading the model and evaluating it before moved bytes too.
            setattr(self.result, name, ended.get(name, 0) - stats.get(name, 0))

    def _optimizer(self) -> OffloadedOptimizer:
        """The resumed run's optimizer, or a new one."""
        if self.resumed and self.resumed.optimizers:
            return self.resumed.optimizer
        settings = self.settings
        make, _, options = NAMED[settings.optimizer]
        storage: dict[str, Any] = {"states": settings.states, "master": settings.master, "seed": settings.seed % 2**32}
        return make(parameter_groups(self.model, settings.weight_decay), lr=settings.lr, **options, **storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the run, for the store."""
        return {
            "steps": self.result.steps,
            "steps_skipped": self.result.steps_skipped,
            "losses": self.result.losses,
            "seconds": self.result.seconds,
            "settings": self.settings.decisive,
            "save_dtype": self.settings.save_dtype,
            "data": self._data,
            "tokens_max": self.blocks.tokens_max,
            "position": [self._position.steps, self._position.sequences],
            "records": str((self.settings.metrics or self.settings.out / metrics.METRICS_NAME).absolute()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the saved progress.

        Raises DataError where the data differs from that of the saved run, or an option that was not to be changed.
        """
        self._changes = find_changes(state["settings"], self.settings)
        if state["data"] != self._data:
            raise DataError("the data is not that of the run in the store: --resume needs the same files")
        for name in ("steps", "steps_skipped", "losses", "seconds"):
            setattr(self.result, name, state[name])
        self._position = Position(*state.get("position", (0, 0)))
        if self._changes:
            per_step = state["settings"]["batch_size"] * state["settings"]["grad_accum"]
            self._position = Position(self.result.steps, self._position.sequence(self.result.steps, per_step))
        self.result.steps_planned = self.steps = self._position.length(self.settings, len(self.blocks))
        # Where an interrupted run has put its metrics, as far as that is known.
        self._records_before = Path(state["records"]) if "records" in state else None

    def _change(self) -> None:
        """Go on with other settings than before, and say what that does."""
        for line in effects(self._changes, self.result.steps, self._position, self.steps, self.blocks):
            note(line)
        settings = self.settings
        factor = schedule_factor(settings.schedule, self.scheduler.last_epoch, settings.warmup_steps, self.steps)
        apply_changes(self._changes, settings, self.optimizer, self.scheduler, factor)

    def _notes(self, bar: Progress, stats: dict[str, Any]) -> None:
        """Print one line on the run that begins, and the store's notices."""
        parts = [f"{self.result.parameters / 1e6:,.1f}M parameters in {self.settings.dtype}"]
        if stats:
            direct = "direct I/O" if stats["direct_io"] else "buffered I/O"
            parts.append(f"{stats['engine']}, {direct}")
            parts.append(f"host memory {format_size(stats['host_bytes_budget'])}")
            if "device_bytes_budget" in stats:
                parts.append(f"{self.settings.device} {format_size(stats['device_bytes_budget'])}")
        parts.append(f"{self.steps} steps of {self.tokens_per_step:,} tokens")
        if self.resumed:
            parts.append(f"going on after step {self.result.steps}")
        bar.note("; ".join(parts))
        for notice in stats.get("notices", ()):
            bar.note(f"memascend: note: {notice}")
        self.meter = figures.Meter(self._offloaded)

    def _step(self, step: int, bar: Progress) -> None:
        settings = self.settings
        lr = self.optimizer.param_groups[0]["lr"]
        loss = self._accumulate(step - 1)
        norm = math.nan
        if math.isfinite(loss):
            norm = float(self.optimizer.clip_grad_norm_(settings.max_grad_norm or math.inf))
        skipped = not math.isfinite(norm)
        if skipped:
            reason = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            if settings.on_nan == "stop":
                raise NonFiniteError(
                    f"step {step} of {self.steps}: {reason}; --out was not written (--on-nan skip goes on)"
                )
            bar.note(f"memascend: note: step {step}: {reason}; skipped")
            self.result.steps_skipped += 1
        else:
            self.optimizer.step()
            self.scheduler.step()
            self.result.losses[1:] = [loss]
        self.optimizer.zero_grad()
        # The store records the progress with the step, when the next pass begins.
        self.result.steps = step
        save_periodically(self.model, step, settings.save_every, settings.keep_last)

        lap = self.meter.lap(self.tokens_per_step)
        self.result.seconds += lap["seconds"]
        record = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": lr,
            "skipped": skipped,
            **lap,
        }
        self.metrics.write("step", **record)
        bar.update(step, step_text({**record, "loss": loss}))

    def _accumulate(self, step: int) -> float:
        """Run forward and backward of one step's batches; return the mean loss, or the first that is not finite."""
        count = self.settings.grad_accum
        mean = 0.0
        for micro in range(count):
            size = self.settings.batch_size
            batch = self.blocks.rows(self._position.sequence(step, self._per_step) + micro * size, size)
            batch = {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in batch.items()}
            loss = self.model(**batch, use_cache=False).loss
            (loss / count if count > 1 else loss).backward()
            # Only after the backward pass is launched: item() waits for the device.
            value = loss.item()
            if not math.isfinite(value):
                return value
            mean += value / count
        return mean
