"""The fine-tuning run behind the command line: a model directory and text in, a model directory out.

Everything unfinished lives in one hidden directory beside the output, which is renamed into place at the end
and removed in every other case. The training loop itself is the ordinary PyTorch loop of the README.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import memascend
from memascend import MemascendError
from memascend.command import report
from memascend.command.data import Blocks, Documents, Tokenizer, load_tokenizer
from memascend.command.models import copy_side_files, load_in_memory
from memascend.command.report import OutputError
from memascend.common.interrupts import Interrupts
from memascend.common.outputs import clear_away, put_in_place, workspace
from memascend.common.sizes import format_size
from memascend.errors import DataError
from memascend.formats.config import limits, load_config
from memascend.offloading.session import offload_of
from memascend.optim import NAMED
from memascend.residency.cuda import open_device

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENS_TO_CHOOSE_FROM = 1 << 20  # beyond what a run uses, so that a short one does not see one document alone


class NonFiniteError(MemascendError):
    """The loss or the gradient norm became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One fine-tuning run. The defaults are the command line's."""

    model_dir: Path
    data: Sequence[Path]
    out: Path
    store: Sequence[Path] = ()
    host_memory: int | None = None  # bytes
    device: str | None = None  # that of CUDA to compute on; None is the CPU
    device_memory: int | None = None  # bytes
    in_memory: bool = False
    steps: int | None = None  # optimizer steps; without it, `epochs` passes over the data
    epochs: int = 1
    batch_size: int = 1
    seq_len: int = 512
    grad_accum: int = 1
    lr: float = 2e-5
    warmup_steps: int = 0
    schedule: str = "cosine"
    max_grad_norm: float = 1.0  # 0 turns clipping off
    weight_decay: float = 0.01
    seed: int = 0
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    states: str = "float32"
    master: bool = True
    on_nan: str = "stop"
    durability: str = "auto"
    resume: bool = False
    keep_store: bool = False
    recompute: bool = True
    activations: str | None = None
    metrics: Path | None = None
    text_field: str = "text"

    @property
    def computing(self) -> dict[str, Any]:
        """Where and how the model computes, as `memascend.offload` takes it."""
        names = ("device", "device_memory", "recompute", "activations")
        return {name: getattr(self, name) for name in names} | {"batch_tokens": self.batch_size * self.seq_len}

    @property
    def decisive(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on with, to come to the same end."""
        names = (
            *("batch_size", "seq_len", "grad_accum", "lr", "warmup_steps", "schedule", "max_grad_norm", "weight_decay"),
            *("seed", "dtype", "optimizer", "states", "master", "text_field", "steps", "epochs"),
        )
        return {name: getattr(self, name) for name in names}

    def as_record(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        record = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        record["data"] = [str(path) for path in self.data[:16]]
        record["data_paths"] = len(self.data)
        record["store"] = [str(path) for path in self.store]
        return record


@dataclass
class Result:
    """What a run came to."""

    steps: int = 0
    steps_planned: int = 0
    steps_skipped: int = 0
    steps_before: int = 0  # of the run that was resumed
    losses: list[float] = field(default_factory=list)  # the first and the latest
    seconds: float = 0.0
    signal_number: int | None = None  # set when the user ended the run early
    baseline_rss_bytes: int = 0
    peak_rss_bytes: int = 0
    ssd_bytes_read: int = 0
    ssd_bytes_written: int = 0
    parameters: int = 0

    @property
    def peak_above_baseline_bytes(self) -> int:
        """Peak memory of the run itself, without what importing torch and transformers takes."""
        return max(0, self.peak_rss_bytes - self.baseline_rss_bytes)


# Called with "before" and "after" the training, for who wants to look at the model then.
Watch = Callable[[str, torch.nn.Module, Tokenizer], None]


def finetune(settings: Settings, watch: Watch | None = None) -> Result:
    """Run it: write settings.out and the metrics file, or raise an error that tells the user why."""
    with Interrupts() as interrupts, ExitStack() as cleanup:
        try:
            return _finetune(settings, interrupts, cleanup, watch)
        finally:
            interrupts.closing = True


def _finetune(settings: Settings, interrupts: Interrupts, cleanup: ExitStack, watch: Watch | None) -> Result:
    if settings.metrics is not None and os.path.lexists(settings.metrics) and not settings.resume:
        raise OutputError(f"--metrics {settings.metrics} already exists: choose another, or move it away")
    config = load_config(settings.model_dir)  # imports transformers and with it the model's class
    vocab_size, positions = limits(config)
    if positions is not None and settings.seq_len > positions:
        raise DataError(f"--seq-len {settings.seq_len} is more than the model's {positions} positions")
    work = cleanup.enter_context(workspace(settings.out))
    finished, scratch = work / "model", work / "scratch"
    with report.writing(settings.out):
        finished.mkdir()
        scratch.mkdir()
    result = Result(baseline_rss_bytes=report.rss_bytes())
    report.reset_peak_rss()

    tokenizer = load_tokenizer(settings.model_dir, vocab_size)
    documents = Documents(settings.data, scratch=scratch, text_field=settings.text_field)
    cleanup.callback(documents.close)
    resumed = _resume(settings, interrupts, cleanup) if settings.resume else None
    model = resumed.model if resumed else _load_model(settings, config, interrupts, cleanup)
    blocks = _tokenise(settings, documents, tokenizer, scratch, vocab_size)
    cleanup.callback(blocks.close)
    metrics = report.Metrics(settings.metrics or finished / "metrics.jsonl", go_on=settings.resume)
    cleanup.callback(metrics.close)
    if watch is not None:
        watch("before", model, tokenizer)

    _Training(settings, model, blocks, metrics, interrupts, result, resumed).run()
    if watch is not None and interrupts.asked is None:
        watch("after", model, tokenizer)

    _save(model, settings, finished)
    result.signal_number = interrupts.asked
    result.peak_rss_bytes = report.peak_rss_bytes()
    metrics.write("end", **{name: value for name, value in asdict(result).items() if name != "losses"})
    metrics.close()
    with report.writing(settings.out):
        put_in_place(finished, settings.out)
    return result


def _save(model: torch.nn.Module, settings: Settings, finished: Path) -> None:
    """Write the model with what belongs beside it."""
    from safetensors import SafetensorError

    try:
        with report.writing(settings.out):
            memascend.save_pretrained(model, finished)
            copy_side_files(settings.model_dir, finished)
    except SafetensorError as error:  # a model in memory saves itself, and this is how it says that it could not
        raise OutputError(f"cannot write {settings.out}: {error}") from error


def _resume(settings: Settings, interrupts: Interrupts, cleanup: ExitStack) -> memascend.Resumed | None:
    """The run that the store holds, if it holds one; closed with `cleanup`."""
    assert settings.host_memory is not None, "a run that can be resumed has a store"
    clear_away(settings.out)
    if not memascend.can_resume(settings.store):
        print("memascend: note: the store holds no durable step yet: beginning anew", file=sys.stderr, flush=True)
        return None
    resumed = memascend.resume(
        list(settings.store),
        host_memory=settings.host_memory,
        **settings.computing,
        durability=settings.durability,
        keep_store=settings.keep_store or None,
    )
    _close_with(cleanup, resumed.model, settings, interrupts)
    return resumed


def _close_with(cleanup: ExitStack, model: torch.nn.Module, settings: Settings, interrupts: Interrupts) -> None:
    """Close the model at the end; the store stays where the run did not get to its own."""

    def close(error: type[BaseException] | None, *_: object) -> None:
        state = offload_of(model)
        unfinished = error is not None or interrupts.asked is not None
        state.generations.abandon()
        generation = state.runtime.generation
        state.close(failed=unfinished)
        if unfinished and generation:
            where = ", ".join(map(str, settings.store))
            steps = state.generations.durable_steps
            text = f"{where} holds the run after step {steps}: --resume goes on with it; delete it to begin anew"
            print(f"memascend: note: {text}", file=sys.stderr, flush=True)

    cleanup.push(close)


def _load_model(settings: Settings, config: Any, interrupts: Interrupts, cleanup: ExitStack) -> torch.nn.Module:
    """The model in the store, or whole in memory; closed with `cleanup`."""
    if settings.in_memory:
        device = open_device(settings.device)
        model = load_in_memory(settings.model_dir, config, DTYPES[settings.dtype])
        return model if device is None else model.to(device.torch_device)
    bar: report.Progress | None = None

    def loading(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or report.Progress("loading", total, unit="B")
        bar.update(done)

    try:
        model = memascend.from_pretrained(
            settings.model_dir,
            store=list(settings.store),
            host_memory=settings.host_memory,
            dtype=settings.dtype,
            **settings.computing,
            durability=settings.durability,
            keep_store=settings.keep_store or None,
            progress=loading,
        )
    finally:
        if bar is not None:
            bar.close()
    _close_with(cleanup, model, settings, interrupts)
    return model


def _tokenise(settings: Settings, documents: Documents, tokenizer: Tokenizer, scratch: Path, vocab_size: int) -> Blocks:
    """The data as blocks; with a number of steps given, not much more of it than they can use."""
    bar = report.Progress("tokenising", len(documents), unit="document")
    tokens_max = None
    if settings.steps is not None:
        per_step = settings.batch_size * settings.grad_accum * settings.seq_len
        tokens_max = settings.steps * per_step + TOKENS_TO_CHOOSE_FROM
    try:
        return Blocks(
            documents,
            tokenizer,
            scratch=scratch,
            seq_len=settings.seq_len,
            seed=settings.seed,
            vocab_size=vocab_size,
            tokens_max=tokens_max,
            progress=lambda done, _total: bar.update(done),
        )
    finally:
        bar.close()


def schedule_factor(name: str, step: int, warmup_steps: int, steps: int) -> float:
    """What multiplies the learning rate at step 0, 1, ...: a linear warm-up, then constant or down to 0."""
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


class _Training:
    """The loop: gradients of `grad_accum` batches, clipping, a step, a record."""

    def __init__(
        self,
        settings: Settings,
        model: torch.nn.Module,
        blocks: Blocks,
        metrics: report.Metrics,
        interrupts: Interrupts,
        result: Result,
        resumed: memascend.Resumed | None,
    ) -> None:
        self.settings, self.model, self.blocks, self.resumed = settings, model, blocks, resumed
        self.metrics, self.interrupts, self.result = metrics, interrupts, result
        per_step = settings.batch_size * settings.grad_accum
        self.tokens_per_step = per_step * settings.seq_len
        self.steps = settings.steps or math.ceil(settings.epochs * len(blocks) / per_step)
        # What tells other data: how much there is, and how it begins.
        self._data = [blocks.tokens, len(blocks), blocks.batch(0, 1)["input_ids"].flatten().tolist()]
        result.steps_planned = self.steps
        result.parameters = sum(p.numel() for p in model.parameters())

    def run(self) -> None:
        """Train, and leave in the result what came of it. The updates are complete afterwards."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        self.model.train()
        make, _, options = NAMED[settings.optimizer]
        groups = parameter_groups(self.model, settings.weight_decay)
        kept: dict[str, Any] = {"states": settings.states, "master": settings.master, "seed": settings.seed % 2**32}
        if self.resumed and self.resumed.optimizers:
            self.optimizer = self.resumed.optimizer
        else:
            self.optimizer = make(groups, lr=settings.lr, **options, **kept)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: schedule_factor(settings.schedule, step, settings.warmup_steps, self.steps),
        )
        if not settings.in_memory:
            memascend.track(self.model, scheduler=self.scheduler, progress=self)
        self.result.steps_before = self.result.steps
        stats = self._stats()
        self.metrics.write(
            "resume" if self.resumed else "start",
            settings=settings.as_record(),
            machine=report.machine(),
            parameters=self.result.parameters,
            steps=self.steps,
            tokens=self.blocks.tokens,
            blocks=len(self.blocks),
            baseline_rss_bytes=self.result.baseline_rss_bytes,
            store=stats,
        )
        bar = report.Progress("training", self.steps)
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
        self.result.seconds += self.meter.lap()["seconds"]
        for name in report.SSD_COUNTERS:
            # Of the training alone: loading and looking at the model before it move bytes too.
            setattr(self.result, name, self._stats().get(name, 0) - stats.get(name, 0))

    def state_dict(self) -> dict[str, Any]:
        """How far the run has come, for the store."""
        return {
            "steps": self.result.steps,
            "steps_skipped": self.result.steps_skipped,
            "losses": self.result.losses,
            "seconds": self.result.seconds,
            "settings": self.settings.decisive,
            "data": self._data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, if it is the same run.

        Raises DataError where the data or an option is another.
        """
        for name, value in self.settings.decisive.items():
            if state["settings"].get(name, value) != value:
                flag, before = "--" + name.replace("_", "-"), state["settings"][name]
                raise DataError(f"{flag} is {value}, but the run in the store has {before}: --resume needs the same")
        if state["data"] != self._data:
            raise DataError("the data is not that of the run in the store: --resume needs the same files")
        for name in ("steps", "steps_skipped", "losses", "seconds"):
            setattr(self.result, name, state[name])

    def _waited(self) -> dict[str, float] | None:
        """Where the seconds went since this was asked last; of a model in memory nobody knows."""
        return None if self.settings.in_memory else offload_of(self.model).timeline.lap()

    def _stats(self) -> dict[str, Any]:
        return {} if self.settings.in_memory else memascend.stats(self.model)

    def _notes(self, bar: report.Progress, stats: dict[str, Any]) -> None:
        """Say once what is about to run, and anything the store had to do differently."""
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
        self.meter = report.Meter(self._stats)
        self._waited()

    def _step(self, step: int, bar: report.Progress) -> None:
        settings = self.settings
        lr = self.optimizer.param_groups[0]["lr"]
        loss = self._accumulate(step - 1)
        norm = math.nan
        if math.isfinite(loss):
            norm = float(self.optimizer.clip_grad_norm_(settings.max_grad_norm or math.inf))
        skipped = not math.isfinite(norm)
        if skipped:
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
            if settings.on_nan == "stop":
                raise NonFiniteError(
                    f"step {step} of {self.steps}: {what}; --out was not written (--on-nan skip goes on)"
                )
            bar.note(f"memascend: note: step {step}: {what}; skipped")
            self.result.steps_skipped += 1
        else:
            self.optimizer.step()
            self.scheduler.step()
            self.result.losses[1:] = [loss]
        self.optimizer.zero_grad()
        # Kept in the store with the step, which is when the next pass begins.
        self.result.steps = step

        lap, waited = self.meter.lap(), self._waited()
        self.result.seconds += lap["seconds"]
        record = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": lr,
            "skipped": skipped,
            "tokens": self.tokens_per_step,
            "tokens_per_s": self.tokens_per_step / lap["seconds"],
            **lap,
            "waited_seconds": waited,
            "peak_rss_bytes": report.peak_rss_bytes(),
        }
        self.metrics.write("step", **record)
        bar.update(step, report.step_text({**record, "loss": loss}))

    def _accumulate(self, step: int) -> float:
        """Forward and backward of one step's batches; the mean loss, or the first one that is not finite."""
        count = self.settings.grad_accum
        mean = 0.0
        for micro in range(count):
            batch = self.blocks.batch(step * count + micro, self.settings.batch_size)
            batch = {name: tensor.to(self.model.device, non_blocking=True) for name, tensor in batch.items()}
            loss = self.model(**batch, use_cache=False).loss
            (loss / count if count > 1 else loss).backward()
            # Only now: a device would have nothing to do while its answer is waited for.
            value = loss.item()
            if not math.isfinite(value):
                return value
            mean += value / count
        return mean
