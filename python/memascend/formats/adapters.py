"""Directories of adapters, as PEFT writes them: recognised, read, and the model that they belong to."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, MemascendError, first_line
from memascend.formats.hub import download, is_id
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

#: PEFT's name for the file that describes a directory's adapters.
CONFIG_NAME = "adapter_config.json"
#: The names of the file with their weights; a directory has one of them.
_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
#: PEFT's name for the adapters of a model that has no others.
_ADAPTER = "default"
#: Errors whose messages are for the user already.
_OWN = (MemascendError, MemoryError, OSError)


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds adapters and no model."""
    with suppress(PermissionError):  # A directory of another user's: the one who opens it says so.
        return (directory / CONFIG_NAME).is_file() and not (directory / "config.json").is_file()
    return False


def is_model(directory: Path) -> bool:
    """Return whether a directory holds a model."""
    with suppress(PermissionError):
        return (directory / "config.json").is_file()
    return False


def model_of(directory: Path, tell: Callable[[str], None]) -> Path:
    """Return the directory of the model that adapters belong to, which is downloaded where it is a model of the hub.

    Raises CheckpointError where it is not known, is gone or cannot be downloaded.
    """
    config = read_json(directory / CONFIG_NAME)
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{directory / CONFIG_NAME} names no model (base_model_name_or_path)")
    if Path(named).is_dir():
        return Path(named)
    if not Path(named).is_absolute() and is_id(named):
        tell(f"{directory} holds adapters of {named}: taking it from the Hugging Face hub")
        return download(named)
    raise CheckpointError(
        f"{directory} holds adapters of {named}, which is gone: put the model there, or its present place into "
        f"base_model_name_or_path of {CONFIG_NAME}"
    )


def copied_modules(directory: Path) -> list[str]:
    """Return the names of modules that adapters in a directory have whole copies of."""
    config = read_json(directory / CONFIG_NAME)
    copied = config.get("modules_to_save") if isinstance(config, dict) else None
    return list(map(str, copied if isinstance(copied, list) else [copied] if copied else []))


def add_as_in(directory: Path, model: nn.Module, *, trained: bool, **options: Any) -> Any:
    """Return a model of PEFT: `model` with new adapters like those in a directory. `options` are of get_peft_model.

    Raises CheckpointError where the model has no modules for them.
    """
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(directory))
        if getattr(config, "megatron_config", None) is not None:  # PEFT would import any module that it names
            raise CheckpointError(f"{directory} holds adapters for layers of Megatron, which memascend has none of")
        if config.task_type == "CAUSAL_LM" and not hasattr(model, "prepare_inputs_for_generation"):
            raise _misfit(directory, f"they are of a causal language model, and the model is a {type(model).__name__}")
        config.inference_mode = not trained
        return peft.get_peft_model(model, config, **options)
    except _OWN:
        raise
    except Exception as error:  # PEFT reads values of any kind, and raises any class
        raise _misfit(directory, _said(error)) from error


def load_adapters(model: nn.Module, directory: Path, *, trained: bool) -> Any:
    """Return a model of PEFT: `model` with the adapters in a directory, all of them and no others.

    Raises CheckpointError where they belong to another model, or their file is missing or damaged.
    """
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    if not any((directory / name).is_file() for name in _WEIGHTS_NAMES):
        raise CheckpointError(f"{directory} holds no weights of adapters ({_WEIGHTS_NAMES[0]})")
    adapted = add_as_in(directory, model, trained=trained)
    try:
        found = adapted.load_adapter(str(directory), _ADAPTER, is_trainable=trained)
    except _OWN:
        raise
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{directory} holds weights that cannot be read: {first_line(error)}") from error
    except Exception as error:
        raise _misfit(directory, _said(error)) from error
    if found.missing_keys:
        raise _misfit(directory, f"their file has no {found.missing_keys[0]}")
    if found.unexpected_keys:
        raise _misfit(directory, f"their file has {found.unexpected_keys[0]}, which {CONFIG_NAME} has no place for")
    _check_numbers(adapted, directory)
    return adapted


def _check_numbers(adapted: nn.Module, directory: Path) -> None:
    """Raise CheckpointError for adapters with weights or scales that are no finite numbers: no answer would be one."""
    for name, weight in adapted.named_parameters():
        if _ADAPTER in name.split(".") and not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{directory} holds weights that are infinite or no numbers ({name}): they are damaged, or their "
                "training went wrong"
            )
    for name, module in adapted.named_modules():
        scaling = getattr(module, "scaling", None)
        scale = scaling.get(_ADAPTER) if isinstance(scaling, dict) else None
        if isinstance(scale, float) and not math.isfinite(scale):
            raise CheckpointError(f"{directory / CONFIG_NAME}: the scale of {name} (lora_alpha) is no finite number")


def _said(error: Exception) -> str:
    """Return the line of an error of PEFT or PyTorch that names the misfit."""
    if isinstance(error, TypeError | ValueError):
        return first_line(error)
    last = first_line(error) if not str(error).strip() else str(error).strip().splitlines()[-1].strip()
    # PyTorch names the tensors from the second line on. A KeyError says the key alone.
    return last if isinstance(error, RuntimeError) else f"{type(error).__name__}: {last}"


def _misfit(directory: Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{directory} holds adapters that do not fit the model: {detail}")
