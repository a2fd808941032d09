"""The arguments of a recipe's trainer, from the command's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from memascend.cli.adapters import KEPT, STEPS
from memascend.cli.training import SCHEDULES
from memascend.common.choices import meant
from memascend.errors import DataError
from memascend.optimizers import OPTIMIZERS
from memascend.options import REPLACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.recipes.tasks import Task
    from memascend.cli.settings import Settings

#: The optimizers that a trainer has, too.
_OPTIMIZERS = {name: one for name, one in OPTIMIZERS.items() if one.trainer}
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


def arguments_of(
    arguments_class: type, task: Task, settings: Settings, given: Mapping[str, Any], evaluates: bool
) -> Any:
    """Return the trainer's arguments. Raises DataError for one that it has not, or that the command sets."""
    known = {one.name: one.default for one in fields(arguments_class) if one.init}
    for name, value in given.items():
        if name in _SET_BY:
            raise DataError(f"--trainer-options {name} is what {_SET_BY[name]} says: give that")
        if name not in known:
            raise DataError(f"--trainer-options: {arguments_class.__name__} has no {name}{meant(name, known)}")
        if isinstance(known[name], int | float) and not isinstance(value, int | float | None):
            raise DataError(f"--trainer-options {name}={value} is no number, as its default {known[name]} is")
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
        "lr_scheduler_type": SCHEDULES.get(settings.schedule, settings.schedule),
        "max_grad_norm": settings.max_grad_norm,
        "weight_decay": settings.weight_decay,
        "seed": settings.seed,
        "optim": optim,
        "optim_args": optim_args,
        "logging_steps": 1,
        "save_strategy": "steps" if settings.save_every or settings.lora_rank else "no",
        "save_steps": settings.save_every or STEPS,
        "save_total_limit": max(KEPT, settings.keep_last or 0) if settings.lora_rank else settings.keep_last,
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
    named = _OPTIMIZERS[settings.optimizer]
    # The trainer divides the parameters of APOLLO by itself.
    told += [f"{option}={value}" for option, value in named.options.items() if option != "rank"]
    return next(iter(named.trainer)), ",".join(told) or None
