"""A recipe from the command's settings to the model that is written: what `memascend finetune --task` does."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import memascend
from memascend.cli.adapters import config_of
from memascend.cli.dtypes import choose_dtype
from memascend.cli.errors import note
from memascend.cli.lora import Adapters
from memascend.cli.recipes.rows import divided, load_rows
from memascend.common.choices import meant
from memascend.common.outputs import writing
from memascend.errors import DataError, OutputError
from memascend.formats.config import load_config
from memascend.hardware.drives import is_device
from memascend.options import REPLACE
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.recipes.tasks import Task
    from memascend.cli.settings import Settings

#: Tells in OUT that the run has finished.
FINISHED = "memascend-task.json"
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "lion": "lion_32bit",
    "sgd": "sgd",
    "apollo": "apollo_adamw",
}
#: Arguments of a trainer that options of the command set.
_SET_BY = {
    "learning_rate": "--lr",
    "max_steps": "--steps",
    "num_train_epochs": "--epochs",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--grad-accum",
    "max_length": "--seq-len",
    "output_dir": "--out",
    "seed": "--seed",
    "optim": "--optimizer",
    "lr_scheduler_type": "--schedule",
    "warmup_steps": "--warmup-steps",
    "weight_decay": "--weight-decay",
    "max_grad_norm": "--max-grad-norm",
    "save_steps": "--save-every",
    "save_total_limit": "--keep-last",
    "eval_steps": "--eval-steps",
    "report_to": "--report-to",
    "use_cpu": "--device",
    "weights_dtype": "--dtype",
}


def steps_of_finished(out: Path) -> int | None:
    """Return the steps of the run that has finished in `out`, or None."""
    try:
        return int(json.loads((out / FINISHED).read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run(task: Task, settings: Settings, trainer_options: Mapping[str, Any]) -> int:
    """Train, write the model to `settings.out`, and return the steps taken.

    Raises DataError for impossible options, OutputError where OUT is there already.
    """
    out = settings.out
    if os.path.lexists(out) and not (out.is_dir() and (settings.resume or not any(out.iterdir()))):
        raise OutputError(
            f"--out {out} already exists: choose another, move it away, or give --resume to go on with it"
        )
    trainer_class, arguments_class = task.load()
    config = load_config(settings.model_dir, settings.dequantize)
    if settings.dtype == "auto":
        device = None if settings.device is None else torch.device(settings.device)
        choice = choose_dtype("auto", settings.model_dir, config, device)
        note(f"training in {choice.reason}")
        settings = replace(settings, dtype=choice.dtype)
    rows, held_out = load_rows("--data", settings.data, task), None
    if isinstance(settings.evaluation, float):
        rows, held_out = divided(rows, settings.evaluation, settings.seed)
    elif settings.evaluation:
        held_out = load_rows("--eval", settings.evaluation, task)
    arguments = _arguments(arguments_class, task, settings, trainer_options, held_out is not None)
    tokenizer = _tokenizer(settings)
    options: dict[str, Any] = {"processing_class": tokenizer}
    if task.name == "classify":
        from memascend.cli.recipes.classify import labelled, trainer_of

        trainer_class, labels = trainer_of(trainer_class, rows)
        rows, held_out = (labelled(one, labels, tokenizer, settings.seq_len) for one in (rows, held_out))
    if settings.lora_rank:
        options["peft_config"] = config_of(Adapters.of(settings))
    reference = None
    if task.compares and not settings.lora_rank and not getattr(arguments, "precompute_ref_log_probs", False):
        reference = _reference(settings)
        options["ref_model"] = reference
    trainer: Any = None
    try:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        trainer = trainer_class(
            str(settings.model_dir), args=arguments, train_dataset=rows, eval_dataset=held_out, **options
        )
        trainer.train(resume_from_checkpoint=settings.resume or None)
        with writing(out):
            trainer.save_model(str(out))
            (out / FINISHED).write_text(json.dumps({"task": task.name, "steps": trainer.state.global_step}))
        steps = int(trainer.state.global_step)
        memascend.close(_base(trainer.model))
        trainer = None
        return steps
    finally:
        if trainer is not None:  # The store keeps the last durable step.
            offload_of(_base(trainer.model)).close(failed=True)
        if reference is not None:
            memascend.close(reference)


def _base(model: Any) -> Any:
    """Return the offloaded model that adapters may be over."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tokenizer(settings: Settings) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_dir)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{settings.tokenizer_dir} has no tokenizer that transformers reads: give --tokenizer DIR"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _reference(settings: Settings) -> Any:
    """Open the model before the training, read from its own files, beside the store, with the least memory."""
    if is_device(settings.store[0]):
        raise DataError(
            "the model is compared with itself before the training, which is read through a directory: give --store "
            "one, or --lora-rank, or precompute_ref_log_probs=true by --trainer-options"
        )
    store = Path(f"{settings.store[0]}-reference")
    return memascend.from_pretrained(
        settings.model_dir,
        store=store,
        host_memory=None,
        dtype=settings.dtype,
        frozen="files",
        device=settings.device,
        keep_store=REPLACE,
    )


def _arguments(arguments_class: type, task: Task, settings: Settings, given: Mapping[str, Any], evaluates: bool) -> Any:
    """Return the trainer's arguments. Raises DataError for one that it has not, or that the command sets."""
    known = {one.name for one in fields(arguments_class) if one.init}
    for name in given:
        if name in _SET_BY:
            raise DataError(f"--trainer-options {name} is what {_SET_BY[name]} says: give that")
        if name not in known:
            raise DataError(f"--trainer-options: {arguments_class.__name__} has no {name}{meant(name, known)}")
    optim, optim_args = _optimizer(settings)
    values: dict[str, Any] = {
        "output_dir": str(settings.out),
        "store": [str(path) for path in settings.store],
        "host_memory": settings.host_memory if isinstance(settings.host_memory, str) else f"{settings.host_memory}B",
        "device_memory": None if settings.device_memory is None else f"{settings.device_memory}B",
        "weights_dtype": settings.dtype,
        "dequantize": settings.dequantize,
        "durability": "auto" if settings.lora_rank else settings.durability,
        "recompute": settings.recompute,
        "activations": settings.activations,
        "micro_batch_size": settings.micro_batch_size,
        "tile_tokens": None if settings.tile_tokens is None else str(settings.tile_tokens),
        "gradients": settings.gradients,
        "keep_store": REPLACE if settings.replace_store else settings.keep_store or None,
        "use_cpu": settings.device is None,
        "bf16": False,  # The weights are in `dtype`, and no autocast is needed.
        "max_steps": settings.steps or -1,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.grad_accum,
        "learning_rate": settings.lr,
        "warmup_steps": settings.warmup_steps,
        "lr_scheduler_type": settings.schedule,
        "max_grad_norm": settings.max_grad_norm,
        "weight_decay": settings.weight_decay,
        "seed": settings.seed,
        "optim": optim,
        "optim_args": optim_args,
        "logging_steps": 1,
        "save_strategy": "steps" if settings.save_every else "no",
        "save_steps": settings.save_every or 500,
        "save_total_limit": settings.keep_last,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": settings.eval_steps or 0.1,  # of the run, as in the command's own loop
        "report_to": list(settings.report_to),
    }
    if "max_length" in known:
        values["max_length"] = settings.seq_len
    try:
        return arguments_class(**values | dict(given))
    except (TypeError, ValueError) as error:
        raise DataError(f"--task {task.name}: {error}") from error


def _optimizer(settings: Settings) -> tuple[str, str | None]:
    """Return `optim` and `optim_args` of the trainer's arguments."""
    if settings.optimizer not in _OPTIMIZERS:
        raise DataError(f"--optimizer {settings.optimizer} is not for --task: take {', '.join(_OPTIMIZERS)}")
    told = []
    if settings.states != "float32":
        told.append(f"states={settings.states}")
    if not settings.master:
        told.append("master=False")
    if settings.optimizer == "sgd":
        told.append("momentum=0.9")
    return _OPTIMIZERS[settings.optimizer], ",".join(told) or None
