"""A recipe from the command's settings to the model that is written: what `memascend finetune --task` does."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import memascend
from memascend.cli import adapters
from memascend.cli.dtypes import choose_dtype
from memascend.cli.ended import INTERRUPTED_NAME, note_interrupted
from memascend.cli.errors import note
from memascend.cli.lora import Adapters
from memascend.cli.recipes.arguments import arguments_of
from memascend.cli.recipes.course import Course, Stopped
from memascend.cli.recipes.record import Record, last_checkpoint, record_before
from memascend.cli.recipes.rows import divided as divided_rows
from memascend.cli.recipes.rows import load_rows
from memascend.cli.space import check_space, workload_of
from memascend.common.interrupts import Interrupts
from memascend.common.outputs import writing
from memascend.errors import CheckpointError, DataError, MemascendError, OutputError, first_line
from memascend.forecast.traffic import divided
from memascend.formats.config import load_config
from memascend.formats.tokenizers import load_tokenizer
from memascend.formats.weights import empty_model_of
from memascend.hardware.drives import is_device
from memascend.options import REPLACE
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.recipes.tasks import Task
    from memascend.cli.settings import Settings

#: Tells in OUT that the run has finished.
FINISHED = "memascend-task.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended that wrote a model."""

    steps: int
    #: The signal that ended it before its last step.
    signal_number: int | None = None


def steps_of_finished(out: Path) -> int | None:
    """Return the steps of the run that has finished in `out`, or None."""
    try:
        return int(json.loads((out / FINISHED).read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run(task: Task, settings: Settings, trainer_options: Mapping[str, Any]) -> Outcome:
    """Train, and write the model to `settings.out`, as it is after the last step or when a signal ends the run.

    Raises DataError for impossible options, OutputError where OUT is there already, Abandoned for a signal before the
    first step, and for a second one.
    """
    with Interrupts() as interrupts, ExitStack() as cleanup:
        try:
            return _run(task, settings, trainer_options, interrupts, cleanup)
        finally:
            interrupts.closing = True


def _run(
    task: Task, settings: Settings, given: Mapping[str, Any], interrupts: Interrupts, cleanup: ExitStack
) -> Outcome:
    out = settings.out
    if os.path.lexists(out) and not (out.is_dir() and (settings.resume or not any(out.iterdir()))):
        raise OutputError(
            f"--out {out} already exists: choose another, move it away, or give --resume to go on with it"
        )
    classes = task.load()
    before = record_before(settings)
    settings = _with_dtype(settings, before)
    _check_space(task, settings)
    rows, held_out = _rows(task, settings)
    record = Record(task, settings, given, rows)
    changes = record.changes_since(before, settings.change)
    trainer = _trainer(task, classes, settings, given, (rows, held_out), cleanup)
    base = _base(trainer.model)
    cleanup.callback(_close, base)
    if not settings.lora_rank:
        memascend.track(base, **{Record.NAME: record})
    trainer.add_callback(Course(settings, interrupts, record, changes))
    try:
        return _train(task, settings, trainer, interrupts)
    except ValueError as error:
        if not given:  # Then it is no option that the trainer has refused, and the error is unexpected.
            raise
        raise _refusal(task, given, error) from error


def _train(task: Task, settings: Settings, trainer: Any, interrupts: Interrupts) -> Outcome:
    """Train to the end, or until a signal, and write the model."""
    out, base, signal_number = settings.out, _base(trainer.model), None
    with writing(out):
        (out / FINISHED).unlink(missing_ok=True)
    checkpoint = last_checkpoint(settings) if settings.resume else None
    goes_on = settings.resume and not settings.lora_rank
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else goes_on or None)
    except Stopped as stopped:
        signal_number = stopped.signal_number
        # Reporters end as after the last step.
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    interrupts.graceful = False
    steps = int(trainer.state.global_step)
    with writing(out):
        trainer.save_model(str(out))  # Commits the last step, whatever the durability.
        if signal_number is not None:
            note_interrupted(out, settings, steps)
            return Outcome(steps, signal_number)
        (out / INTERRUPTED_NAME).unlink(missing_ok=True)
        (out / FINISHED).write_text(json.dumps({"task": task.name, "steps": steps}))
    memascend.close(base)
    if settings.lora_rank and not settings.save_every:
        for path in adapters.checkpoints_in(out):
            shutil.rmtree(path)
    return Outcome(steps)


def _trainer(
    task: Task,
    classes: tuple[type, type],
    settings: Settings,
    given: Mapping[str, Any],
    data: tuple[Any, Any],
    cleanup: ExitStack,
) -> Any:
    """Return the trainer with the model that it has opened. A reference is closed with `cleanup`."""
    trainer_class, arguments_class = classes
    rows, held_out = data
    arguments = arguments_of(arguments_class, task, settings, given, held_out is not None)
    tokenizer = _tokenizer(settings)
    options: dict[str, Any] = {"processing_class": tokenizer}
    if task.name == "classify":
        from memascend.cli.recipes.classify import labelled, trainer_of

        trainer_class, labels = trainer_of(trainer_class, rows)
        rows, held_out = (labelled(one, labels, tokenizer, settings.seq_len) for one in (rows, held_out))
    if task.name == "embed":
        options = {"loss": _ranking_loss()}
    if settings.lora_rank:
        options["peft_config"] = adapters.config_of(Adapters.of(settings))
    if task.compares and not settings.lora_rank and not getattr(arguments, "precompute_ref_log_probs", False):
        options["ref_model"] = reference = _reference(task, settings)
        cleanup.callback(memascend.close, reference)
    with writing(settings.out):
        settings.out.mkdir(parents=True, exist_ok=True)
    try:
        trainer = trainer_class(
            str(settings.model_dir), args=arguments, train_dataset=rows, eval_dataset=held_out, **options
        )
    except ValueError as error:
        raise _refusal(task, given, error) from error
    if task.name == "embed":
        trainer.model.max_seq_length = settings.seq_len
        if trainer.model.tokenizer.pad_token is None:
            trainer.model.tokenizer.pad_token = trainer.model.tokenizer.eos_token
    return trainer


def _refusal(task: Task, given: Mapping[str, Any], error: ValueError) -> Exception:
    """Return the error that tells a user what a trainer has refused; an error of memascend as it is."""
    if isinstance(error, MemascendError):
        return error
    options = f" with --trainer-options {' '.join(f'{name}={value}' for name, value in given.items())}" if given else ""
    return DataError(f"--task {task.name}{options}: {first_line(error)}")


def _ranking_loss() -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss


def _with_dtype(settings: Settings, before: dict[str, Any]) -> Settings:
    """Replace a dtype "auto" by the stored run's, or else by the one that suits checkpoint and machine."""
    if settings.dtype != "auto":
        return settings
    if "settings" in before:
        return replace(settings, dtype=before["settings"]["dtype"])
    config = load_config(settings.model_dir, settings.dequantize)
    device = None if settings.device is None else torch.device(settings.device)
    choice = choose_dtype("auto", settings.model_dir, config, device)
    note(f"training in {choice.reason}")
    return replace(settings, dtype=choice.dtype)


def _check_space(task: Task, settings: Settings, *, copied: bool = False) -> None:
    """Raise DataError where the drives have no room for the store, and for a copy of the reference if it is `copied`.

    The base of adapters is only read, and is judged as it is opened.
    """
    if settings.lora_rank or settings.resume or settings.replace_store:
        return
    try:
        config = load_config(settings.model_dir, settings.dequantize)
    except CheckpointError:  # No causal model: its opener judges it.
        return
    if not hasattr(config.get_text_config(), "hidden_size"):
        return
    model = empty_model_of(config, settings.model_dir, getattr(torch, settings.dtype))
    units = divided(model, False, settings.gradients)
    if task.whole:  # It has another head, or none.
        looked_up = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        units = [unit for unit in units if not unit.is_head or any(p.parameter in looked_up for p in unit.places)]
    reference = (_reference_path(settings), sum(unit.stored_nbytes for unit in units)) if copied else None
    kept = replace(settings, evaluation=())  # No best model.
    check_space(kept, units, config, workload_of(settings), reference=reference, adapts=not task.whole)


def _reference_path(settings: Settings) -> Path:
    return Path(f"{settings.store[0]}-reference")


def _rows(task: Task, settings: Settings) -> tuple[Any, Any]:
    """Return the rows to train on, and those to evaluate on, or None."""
    rows = load_rows("--data", settings.data, task)
    if isinstance(settings.evaluation, float):
        return divided_rows(rows, settings.evaluation, settings.seed)
    return rows, load_rows("--eval", settings.evaluation, task) if settings.evaluation else None


def _close(base: Any) -> None:
    """Close the model of a run that did not finish: its store keeps the last durable step."""
    session = find_offload(base)
    if session is not None and not session.closed:
        session.close(failed=True)


def _base(model: Any) -> Any:
    """Return the offloaded model that adapters may be over."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tokenizer(settings: Settings) -> Any:
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _reference(task: Task, settings: Settings) -> Any:
    """Open the model before the training beside the store, with the least memory.

    It is read from its own files, also where it is quantised there; from a copy where these cannot be read in place.
    """
    if is_device(settings.store[0]):
        raise DataError(
            "the model is compared with itself before the training, which is read through a directory: give --store "
            "one, or --lora-rank, or precompute_ref_log_probs=true by --trainer-options"
        )
    opening = partial(
        memascend.from_pretrained,
        settings.model_dir,
        store=_reference_path(settings),
        host_memory=None,
        dtype=settings.dtype,
        dequantize=settings.dequantize,
        device=settings.device,
        keep_store=REPLACE,
    )
    with suppress(CheckpointError):
        return opening(frozen="files")
    _check_space(task, settings, copied=True)
    return opening(frozen="store")
