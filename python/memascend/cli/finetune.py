"""The fine-tuning run behind the command line: a model directory and text in, a model directory out.

Everything unfinished lies in one hidden directory beside the output, which is renamed into place at the end
and removed in every other case. The training loop is in `training`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import memascend
from memascend._memascend import ClosedStore
from memascend.cli import adapters, distributed
from memascend.cli.best import BestModel
from memascend.cli.boundaries import with_boundaries
from memascend.cli.data import ByteTokenizer, Tokenizer, load_tokenizer
from memascend.cli.data.show import shown
from memascend.cli.dataset import Reader
from memascend.cli.dtypes import choose_dtype
from memascend.cli.ended import is_interrupted, note_interrupted
from memascend.cli.errors import note
from memascend.cli.lora import Adapters
from memascend.cli.metrics import METRICS_NAME, hidden_records, take_over_records
from memascend.cli.models import load_in_memory, round_gradients
from memascend.cli.reporters import prepare_reporters
from memascend.cli.run_log import RunLog
from memascend.cli.settings import Result, Settings
from memascend.cli.space import check_space, workload_of
from memascend.cli.training import Training
from memascend.cli.writes import for_steps, forecast_traffic, text_of
from memascend.common.interrupts import Interrupts
from memascend.common.outputs import KEPT, put_in_place, workspace, writing
from memascend.common.progress import Progress
from memascend.common.sizes import AUTO, format_size
from memascend.errors import CheckpointError, DataError, MemascendError, OutputError
from memascend.forecast.activations import KeptLayers, lent
from memascend.forecast.total_memory import MemoryTotal, in_memory_bytes, longest_sequence, pytorch_memory
from memascend.forecast.traffic import divided, projection_bytes
from memascend.formats.config import limits, load_config
from memascend.formats.side_files import copy_side_files
from memascend.formats.weights import empty_model_of
from memascend.hardware import waits
from memascend.hardware.cuda import open_device
from memascend.hardware.memory_limits import resident_memory
from memascend.hardware.threads import update_threads
from memascend.integrations.trainer_position import TrainerPosition
from memascend.layout.bits import PUBLISHED
from memascend.layout.frozen_bits import quantise_units
from memascend.layout.registry import ranks_of
from memascend.layout.units import partition
from memascend.memory_plan.auto_budget import least_of
from memascend.memory_plan.estimates import waiting_inputs
from memascend.memory_plan.host import make_plan
from memascend.options import REPLACE
from memascend.ranks.group import Ranks
from memascend.ranks.locations import paths_of
from memascend.ranks.rank_errors import broadcast_from_rank0, raise_on_all_ranks
from memascend.recovery.resume import read_record
from memascend.report.figures import peak_rss_bytes, reset_peak_rss, stats_of
from memascend.session.api import offload_of
from memascend.session.runtime import when_free

if TYPE_CHECKING:
    from memascend.forecast.workload import Workload

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: Within this time a launcher forwards a signal that a terminal has sent to its processes too.
LAUNCHER_SECONDS = 2.0
TOKENS_TO_CHOOSE_FROM = 1 << 20  # beyond a run's own, so that a short run sees several documents

#: Called with "before" and "after" around the training, to look at the model.
Watch = Callable[[str, torch.nn.Module, Tokenizer], None]


def finetune(settings: Settings, watch: Watch | None = None) -> Result:
    """Run the fine-tuning: write settings.out and the metrics file, or raise an error that names the cause."""
    end = "writing the model so far" if settings.keeps_out else "ending"
    several = settings.processes > 1
    with (
        Interrupts(
            end, speaks=distributed.is_first(), patience_seconds=LAUNCHER_SECONDS if several else 0
        ) as interrupts,
        ExitStack() as cleanup,
    ):
        try:
            return _finetune(settings, interrupts, cleanup, watch)
        finally:
            interrupts.closing = True


def _finetune(settings: Settings, interrupts: Interrupts, cleanup: ExitStack, watch: Watch | None) -> Result:
    if settings.metrics is not None and os.path.lexists(settings.metrics) and not settings.resume:
        raise OutputError(f"--metrics {settings.metrics} already exists: choose another, or move it away")
    prepare_reporters(settings.report_to, settings.out)
    # Imports transformers and with it the model's class.
    config = load_config(settings.model_dir, settings.dequantize)
    progress, entries = _progress_before(settings)
    settings = _with_dtype(settings, config, progress)
    settings = with_boundaries(settings, config, progress.get("settings", {}))
    vocab_size, positions = limits(config)
    if positions is not None and settings.seq_len > positions:
        raise DataError(f"--seq-len {settings.seq_len} is more than the model's {positions} positions")
    # The model so far of a run that a signal ended stays until the run has finished, or ends so again.
    replaces = bool(progress) and is_interrupted(settings)
    work = cleanup.enter_context(workspace(settings.out, replaces=replaces, shared=settings.processes > 1))
    finished, scratch, kept = work / "model", work / "scratch", work / KEPT
    with writing(settings.out):
        for folder in (finished, scratch, kept):
            folder.mkdir()
    if settings.lora_rank:
        adapters.begin(settings)
    result = Result(baseline_rss_bytes=resident_memory())
    forecast = _check_memory(settings, config, result.baseline_rss_bytes)
    reset_peak_rss()

    clock = progress.get("clock") or _now(settings)
    as_bytes, time_of_run = settings.bytes, datetime.fromisoformat(clock)
    tokenizer = load_tokenizer(settings.tokenizer_dir, vocab_size, as_bytes=as_bytes, clock=time_of_run)
    if isinstance(tokenizer, ByteTokenizer):
        note("training on the bytes of the text, one token each, without a tokenizer")
    reader = Reader(settings, tokenizer, vocab_size, scratch)
    cleanup.callback(reader.close)
    documents, evaluated = reader.documents(settings.data, settings.weights), reader.evaluated()
    # A run that can be resumed, however it ends, keeps its records.
    records = settings.metrics or (kept if settings.store else finished) / METRICS_NAME
    if settings.store and settings.metrics is None:
        cleanup.push(partial(_keep_records, settings, records))
    tokens_max = progress.get("tokens_max", _tokens_for(settings))
    resumed = _resume(settings, interrupts, cleanup, records) if settings.resume and not settings.lora_rank else None
    model = resumed.model if resumed else _load_model(settings, config, interrupts, cleanup)
    if resumed:
        # Of the step that it goes on from: over processes, a store may have had a newer one.
        progress, entries = _recorded(offload_of(model).commit_log.unclaimed_states)
    blocks, held_out = reader.divided(documents, tokens_max, evaluated)
    if settings.show_data:
        print("\n".join(shown(blocks, tokenizer, settings.show_data)), flush=True)
    log = RunLog(records, go_on=settings.resume)
    if watch is not None:
        watch("before", model, tokenizer)

    keeps_checkpoints = adapters.has_checkpoints(settings)
    best_folder = adapters.checkpoints_of(settings) if keeps_checkpoints else work
    best = BestModel(model, best_folder / BestModel.TAG, partial(_save, model, settings))
    training = Training(settings, model, blocks, held_out, log, best, interrupts, result)
    training.forecast, training.clock = forecast, clock
    if progress:
        training.resume(progress, entries)
    elif settings.resume and settings.metrics is not None:
        training.begin_anew()
    _note_course(training, begins=resumed is None)
    training.run(best_folder, adapters.last_checkpoint(settings) if settings.resume else None)
    store = stats_of(None if settings.in_memory else model)
    interrupts.graceful = False  # No step follows: a signal abandons it, and the store keeps the run.
    result.signal_number = interrupts.asked if training.is_ending() else None
    written = False
    if result.evaluations[1:] and interrupts.asked is None:
        best_step = result.evaluations[1]["step"]
        written = best.restore(best_step, result.steps, finished, keep_last=settings.leaves_store)
    if watch is not None and interrupts.asked is None:
        watch("after", model, tokenizer)

    if not written:
        _save(model, settings, finished)
    result.peak_rss_bytes = peak_rss_bytes()
    outcome = {name: value for name, value in asdict(result).items() if name != "losses"}
    log.write({"record": "end", "time": time.time(), **outcome, "store": store})
    with raise_on_all_ranks(None if settings.in_memory else ranks_of(model.parameters()), "write --out", Exception):
        if distributed.is_first():
            with writing(settings.out):
                if records.parent == kept:
                    shutil.copyfile(records, finished / METRICS_NAME)
                if result.signal_number is not None and settings.keeps_out:
                    note_interrupted(finished, settings, result.steps)
            _put_in_place(settings, finished, training.left, replaces)
    if interrupts.asked is None and not settings.leaves_store:
        best.delete()
    if interrupts.asked is None and keeps_checkpoints:
        shutil.rmtree(best_folder)
    return result


def _note_course(training: Training, *, begins: bool) -> None:
    """Say where the course of a run, which `begins` or goes on, would surprise: its warm-up, and what it writes."""
    settings, forecast = training.settings, training.forecast
    if settings.warmup_steps >= training.steps:
        note(
            f"the learning rate never reaches --lr: --warmup-steps is {settings.warmup_steps} of {training.steps} steps"
        )
    if endurance := forecast.get("endurance"):
        left = training.steps - training.result.steps
        forecast["endurance"] = endurance = for_steps(endurance, left, begins=begins)
        if warning := text_of(endurance, settings.tbw_share, begins=begins):
            note(warning)


def _put_in_place(settings: Settings, finished: Path, left: Path | None, replaces: bool) -> None:
    """Have the model directory appear, and remove the metrics of the run before."""
    with writing(settings.out):
        put_in_place(finished, settings.out, replaces=replaces)
    for file in {hidden_records(settings.out), left or hidden_records(settings.out)}:
        with suppress(OSError):  # The run is complete.
            file.unlink(missing_ok=True)


def _with_dtype(settings: Settings, config: Any, progress: dict[str, Any]) -> Settings:
    """Replace a dtype "auto" by the stored run's, or else by the one that suits checkpoint and machine."""
    if settings.dtype != "auto":
        return settings
    if "settings" in progress:
        return replace(settings, dtype=progress["settings"]["dtype"], save_dtype=progress.get("save_dtype"))
    device = open_device(settings.device)

    def choose() -> list[str | None]:
        choice = choose_dtype("auto", settings.model_dir, config, None if device is None else device.torch_device)
        return [choice.dtype, choice.saved, choice.reason]

    # By the machine of the first process: others might have another processor.
    dtype, saved, reason = broadcast_from_rank0(_launched(settings), "choose a dtype", choose)
    note(f"training in {reason}")
    return replace(settings, dtype=dtype, save_dtype=saved)


def _now(settings: Settings) -> str:
    """Return the time of the first process, which chat templates write from the first day of a run to its last."""
    return broadcast_from_rank0(_launched(settings), "tell the time", lambda: datetime.now().isoformat())


def _launched(settings: Settings) -> Ranks | None:
    """Return the processes that the run is divided over, if there are several."""
    return Ranks.of(None) if settings.processes > 1 else None


def _progress_before(settings: Settings) -> tuple[dict[str, Any], int]:
    """Return the record of the run that goes on, and the entries of its metrics; empty for one that begins."""
    if not settings.resume:
        return {}, 0
    if settings.lora_rank:
        checkpoint = adapters.last_checkpoint(settings)
        return ({}, 0) if checkpoint is None else adapters.recorded(checkpoint)
    if not memascend.can_resume(settings.store):
        return {}, 0
    tracked = read_record(paths_of(list(settings.store)))["tracked"]
    if Training.NAME not in tracked and TrainerPosition.NAME in tracked:
        where = ", ".join(map(str, settings.store))
        raise DataError(f"{where} holds a run of another trainer: go on with that, or give another --store")
    return _recorded(tracked)


def _recorded(tracked: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the record of a run, and the entries of its metrics."""
    return tracked.get(Training.NAME, {}), tracked.get(TrainerPosition.NAME, {}).get("logged", 0)


def _check_memory(settings: Settings, config: Any, interpreter: int) -> dict[str, Any]:
    """Say how much host memory the run takes in all, and refuse a run for which there is not enough.

    Returns that memory, and the bytes that a step moves to and from the SSD, for the metrics. Raises DataError.
    """
    dtype = DTYPES[settings.dtype]
    model = empty_model_of(config, settings.model_dir, dtype)
    trained = 0  # bytes of adapters with their gradients and states, which are in memory
    if settings.lora_rank:
        trained = adapters.memory_bytes(model, Adapters.of(settings))
        model.requires_grad_(False)
    asked = settings.gradients, settings.processes, settings.experts, settings.update
    units = divided(model, False, *asked)
    if settings.base_bits:
        quantise_units(model, units, settings.base_bits)
    work = workload_of(settings)
    expected: dict[str, Any] = {}
    kept_bytes = 0
    name = "model" if settings.in_memory else "planned"
    if settings.host_memory is not None:
        # A budget that follows the machine takes the rest; nothing is refused unless the least is too much.
        automatic = settings.host_memory == AUTO
        on_device = settings.device is not None
        options: dict[str, Any] = {
            "update": settings.update,
            "on_device": on_device,
            "threads": update_threads(on_device),
        }
        if on_device and work.activations == "host":
            options["inputs"] = waiting_inputs(units, config, work.tokens, work.layer_tokens)
        lends = settings.spare_memory == "activations"
        plan = least_of(units) if automatic else make_plan(units, int(settings.host_memory), **options, lends=lends)
        if lends:
            plan = lent(plan, units, config, work)
        held, name = plan.total + plan.freed_blocks_bytes, "at least" if automatic else name
        kept_bytes = KeptLayers.of(plan, units, config, work).total_bytes
        if not settings.lora_rank and hasattr(config.get_text_config(), "hidden_size"):
            here = replace(settings, store=[Path(path) for path in paths_of(list(settings.store))])
            check_space(here, units, config, work)
            expected = forecast_traffic(model, units, plan, config, work, here)
    else:
        held = in_memory_bytes(units, work) if settings.device is None else 0

    def estimated(of: Workload) -> int | None:
        projections = projection_bytes(units, of)
        found = pytorch_memory(
            config, settings.model_dir, dtype, of, in_memory=settings.in_memory, projections=projections
        )
        return None if found is None else found["estimated_bytes"]

    beside: int | None = 0
    if settings.device is None:
        beside = estimated(work)
    whole = MemoryTotal.of(held + trained, beside, interpreter, name, distributed.processes_here())
    whole = whole.with_activations(kept_bytes)
    note(f"host memory {whole.text()}")
    expected["host_memory"] = whole.as_dict()
    if whole.fits:
        return expected
    longest = longest_sequence(work, whole, estimated)
    fitting = f" (about {longest} tokens fit)" if longest else ""
    problem = (
        f"the run takes {format_size(whole.total)} of host memory, but this process can have only "
        f"{format_size(whole.available)} ({whole.bound}): give --micro-batch-size or --tile-tokens auto, or lower "
        f"--batch-size{'' if settings.in_memory else ', --host-memory'} or --seq-len{fitting}"
    )
    if not settings.force:
        raise DataError(f"{problem}, or give --force to begin all the same")
    note(f"{problem}, or the kernel may end the run")
    return expected


def _keep_records(settings: Settings, records: Path, error: type[BaseException] | None, *_: object) -> None:
    """Keep the metrics of a run that failed and can be resumed; everything else that is unfinished is removed."""
    with suppress(OSError, MemascendError):  # the error of the run itself is on its way
        if not distributed.is_first():
            return
        # Not `can_resume`, which all processes call.
        there = when_free(lambda: ClosedStore.is_there(paths_of(list(settings.store))))
        resumable = adapters.last_checkpoint(settings) is not None or there
        if error is not None and records.is_file() and resumable:
            os.replace(records, hidden_records(settings.out))


def _save(model: Any, settings: Settings, finished: Path) -> None:
    """Write the model or its adapters, with the tokenizer and other side files."""
    from safetensors import SafetensorError

    try:
        with writing(settings.out):
            if settings.lora_rank:
                model.save_pretrained(finished)
            else:
                memascend.save_pretrained(model, finished, settings.save_dtype)
            if distributed.is_first():
                copy_side_files(settings.model_dir, finished, note, tokenizer=settings.tokenizer)
            if settings.lora_rank:
                (finished / "config.json").unlink(missing_ok=True)  # The base model's.
    except SafetensorError as error:  # a model in memory saves itself, with safetensors
        raise OutputError(f"cannot write {settings.out}: {error}") from error


def _resume(settings: Settings, interrupts: Interrupts, cleanup: ExitStack, records: Path) -> memascend.Resumed | None:
    """Return the stored run, or None; its model is closed with `cleanup`, its metrics are put at `records`."""
    assert settings.host_memory is not None, "a run that can be resumed has a store"
    if settings.metrics is None and distributed.is_first():
        take_over_records(settings.out, records)
    if not memascend.can_resume(settings.store):
        print("memascend: note: the store holds no durable step yet: beginning anew", file=sys.stderr, flush=True)
        return None
    computing = settings.computing
    if settings.change:  # None would be as before.
        computing["micro_batch_size"] = settings.micro_batch_size or settings.batch_size
        computing["tile_tokens"] = settings.tile_tokens or settings.batch_size * settings.seq_len
    resumed = memascend.resume(
        list(settings.store),
        host_memory=settings.host_memory,
        **computing,
        durability=settings.durability,
        keep_store=settings.keep_store or None,
    )
    _close_with(cleanup, resumed.model, settings, interrupts)
    return resumed


def _close_with(cleanup: ExitStack, model: torch.nn.Module, settings: Settings, interrupts: Interrupts) -> None:
    """Close the model at the end of `cleanup`; keep the store of a run that did not finish."""

    def close(error: type[BaseException] | None, *_: object) -> None:
        state = offload_of(model)
        unfinished = error is not None or interrupts.asked is not None
        state.commit_log.abandon()
        generation = state.runtime.store.generation
        # A signal ends all processes alike.
        state.close(failed=unfinished, resumes=error is None)
        checkpoint = adapters.last_checkpoint(settings)
        steps = state.commit_log.durable_steps
        if checkpoint is not None:
            steps = adapters.recorded(checkpoint)[0]["steps"]
        if unfinished and (generation or checkpoint is not None) and settings.keeps_store:
            where = ", ".join(map(str, settings.store))
            text = f"{where} holds the run after step {steps}: --resume goes on with it; --replace-store begins anew"
            print(f"memascend: note: {text}", file=sys.stderr, flush=True)

    cleanup.push(close)


def _load_model(settings: Settings, config: Any, interrupts: Interrupts, cleanup: ExitStack) -> torch.nn.Module:
    """Return the model in the store or in memory, with adapters if there are to be any; closed with `cleanup`."""
    if settings.in_memory:
        waits.watch(lambda: True)  # as an open store does
        device = open_device(settings.device)
        model = load_in_memory(settings.model_dir, config, DTYPES[settings.dtype])
        memascend.fuse_loss(model)  # as the offloaded model computes it
        model = model if device is None else model.to(device.torch_device)
    elif settings.lora_rank:
        model = _load_frozen(settings, config, interrupts, cleanup)
    else:
        model = _load_into_store(settings, interrupts, cleanup)
    if settings.lora_rank:
        torch.manual_seed(settings.seed)
        model = adapters.add_adapters(model, Adapters.of(settings), settings.model_dir)
        if settings.experts == "whole" and (bare := adapters.experts_without(model)):
            note(
                f"{bare[0]} and others like it get no adapters, since PEFT does not know the experts of "
                f"{config.model_type}: train them from Python, with target_parameters= of peft.LoraConfig"
            )
    if settings.in_memory and settings.micro_batch_size:
        memascend.run_in_slices(model, settings.micro_batch_size)
    if settings.in_memory and settings.tile_tokens:
        memascend.run_in_tiles(model, settings.tile_tokens)
    if settings.in_memory and settings.gradients == "bfloat16":
        round_gradients(model)
    return model


def _load_frozen(settings: Settings, config: Any, interrupts: Interrupts, cleanup: ExitStack) -> torch.nn.Module:
    """Return the model for adapters: in its files, if these have the dtype of the training, else in the store.

    A large vocabulary's logits are made in pieces only from the store, and take more memory than anything else: its
    tables are there, and layers that are quantised in the files are read from these. With --base-bits what stays in 16
    bits is in the store.
    """
    if settings.base_bits:
        return _load_into_store(settings, interrupts, cleanup, frozen="store", frozen_bits=settings.base_bits)
    if settings.experts == "pieces":  # From the store alone.
        return _load_into_store(settings, interrupts, cleanup, frozen="store")
    units = partition(empty_model_of(config, settings.model_dir, DTYPES[settings.dtype]))
    if not any(unit.is_table for unit in units):
        with suppress(CheckpointError):
            return _load_into_store(settings, interrupts, cleanup, frozen="files")
    elif settings.dequantize:
        with suppress(CheckpointError):
            return _load_into_store(settings, interrupts, cleanup, frozen="store", frozen_bits=PUBLISHED)
    return _load_into_store(settings, interrupts, cleanup, frozen="store")


def _load_into_store(
    settings: Settings,
    interrupts: Interrupts,
    cleanup: ExitStack,
    frozen: str | None = None,
    frozen_bits: int | Literal["published"] | None = None,
) -> torch.nn.Module:
    """Return the model in the store, read from its files; see `memascend.from_pretrained` on `frozen`."""
    assert settings.host_memory is not None, "a run with a store has a budget"
    bar: Progress | None = None

    def loading(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or Progress("loading", total, unit="B")
        bar.update(done)

    try:
        model = memascend.from_pretrained(
            settings.model_dir,
            store=list(settings.store),
            host_memory=settings.host_memory,
            dtype=settings.dtype,
            **settings.computing,
            gradients=settings.gradients,
            frozen=frozen,
            frozen_bits=frozen_bits,
            dequantize=settings.dequantize,
            durability="none" if frozen else settings.durability,
            keep_store=REPLACE if settings.replace_store else settings.keep_store or None,
            progress=loading,
        )
        offload_of(model).keep_store = settings.keep_store or None
    finally:
        if bar is not None:
            bar.close()
    _close_with(cleanup, model, settings, interrupts)
    return model


def _tokens_for(settings: Settings) -> int | None:
    """Return, with a number of steps given, not many more tokens than they use. A run that goes on keeps its number."""
    if settings.steps is None:
        return None
    return settings.steps * settings.sequences_per_step * settings.seq_len + TOKENS_TO_CHOOSE_FROM
