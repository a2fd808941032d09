"""Options of the command that a task of a trainer has no use for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.cli.recipes.tasks import TASKS
from memascend.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.cli.settings import Settings

#: Settings of the command's own loop and data, with their flags.
_OWN_LOOP = {
    "in_memory": "--in-memory",
    "metrics": "--metrics",
    "weights": "--weights",
    "bytes": "--bytes",
    "as_text": "--as-text",
    "show_data": "--show-data",
    "adapter": "--adapter",
    "base_bits": "--base-bits",
    "modules_to_save": "--modules-to-save",
    "tbw": "--tbw",
    "force": "--force",
}
#: Settings whose value must be the default, with their flags.
_DEFAULTS = {
    "text_field": ("text", "--text-field"),
    "loss_on": ("completion", "--loss-on"),
    "packing": (True, "--no-packing"),
    "boundaries": ("auto", "--boundaries"),
    "on_nan": ("stop", "--on-nan"),
    "update": ("forward", "--update"),
    "experts": ("whole", "--experts"),
    "spare_memory": ("auto", "--spare-memory"),
}


def conflict_of_task(task: str | None, settings: Settings, trainer_options: Sequence[str]) -> str | None:
    """Return the reason why the options cannot be used with `--task`, or None."""
    found = TASKS.get(task or "")
    if found is None:
        return "--trainer-options works only with the tasks " + ", ".join(TASKS) if trainer_options else None
    flag = next((flag for name, flag in _OWN_LOOP.items() if getattr(settings, name)), None)
    flag = flag or next((f for name, (value, f) in _DEFAULTS.items() if getattr(settings, name) != value), None)
    if flag is not None:
        return f"{flag} works only with the tasks sft and pretrain: leave it out with --task {task}"
    if settings.processes > 1:
        return f"--task {task} trains in one process: start it without a launcher"
    if settings.device not in (None, "cuda", "cuda:0"):
        return f"--task {task} computes on the first device: give --device cuda, with CUDA_VISIBLE_DEVICES for another"
    if task == "embed" and settings.tokenizer is not None:
        return "--task embed takes the tokenizer of MODEL_DIR: leave out --tokenizer"
    if settings.lora_rank and found.whole:
        return f"--task {task} {found.whole}: leave out --lora-rank"
    return None


def parsed(given: Sequence[str]) -> dict[str, Any]:
    """Return options of the form NAME=VALUE, with values as YAML has them. Raises DataError for another form."""
    import yaml  # type: ignore[import-untyped]

    values = {}
    for word in given:
        name, separator, value = word.partition("=")
        if not separator or not name.isidentifier():
            raise DataError(f"--trainer-options {word!r} is not of the form NAME=VALUE, such as beta=0.2")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise DataError(f"--trainer-options {name}: {value!r} is no value that YAML has") from error
    return values
