"""LoRA adapters over a model whose weights stay as they are: made, checked for checkpoints, and gone on with.

The adapters and their optimizer are in memory, so their checkpoints are transformers' Trainer's own, of megabytes.
They lie in the store's directory until the run has ended.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from memascend.common.outputs import sync, writing
from memascend.errors import DataError, first_line
from memascend.formats.adapters import add_as_in, load_adapters
from memascend.formats.json_files import read_json
from memascend.layout.experts import adapted_experts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from memascend.cli.lora import Adapters
    from memascend.cli.settings import Settings

#: The folder of checkpoints in the store's directory. It is deleted with all that it holds: no other has this name.
FOLDER = "memascend-adapters"
#: Steps between checkpoints, without --save-every.
STEPS = 50
#: Checkpoints that are kept at least: a killed process may have left the last one unfinished.
KEPT = 2
#: Rank times this is the scale of an adapter, as in its paper's experiments (alpha = 2 r).
ALPHA_PER_RANK = 2
#: float32: the value, its gradient and two moments.
_BYTES_PER_PARAMETER = 16
_PROGRESS = "progress.json"
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def add_adapters(model: nn.Module, adapters: Adapters, model_dir: Path) -> Any:
    """Return a model of PEFT: `model`, frozen, with adapters that are trained.

    The adapters' files name `model_dir` as the model that they belong to. Raises DataError where the model has no
    modules of the names that are given.
    """
    model.name_or_path = str(model_dir.resolve())  # type: ignore[assignment]
    if adapters.directory is None:
        adapted = _adapted(model, adapters)
    else:
        adapted = load_adapters(model.requires_grad_(False), adapters.directory, trained=True)
    # PEFT would save embeddings that have adapters whole, and write them back from a checkpoint: they stay as they are.
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    return adapted


def config_of(adapters: Adapters) -> Any:
    """Return the `peft.LoraConfig` of new adapters."""
    import peft

    return peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha or ALPHA_PER_RANK * adapters.rank,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets) or "all-linear",
        use_dora=adapters.dora,
        use_rslora=adapters.rslora,
        modules_to_save=list(adapters.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )


def _adapted(model: nn.Module, adapters: Adapters, **options: Any) -> Any:
    """Return a model of PEFT with new adapters.

    Those at every linear layer are at experts too that transformers fuses into one parameter, where PEFT knows the
    architecture, unless experts are read one by one.
    """
    import peft

    model.requires_grad_(False)
    paths = [path for path, _ in model.named_modules()]
    _check_names("--modules-to-save", adapters.modules_to_save, paths)
    config = config_of(adapters)
    if adapters.experts == "pieces" and not adapters.targets:
        _leave_experts_out(config, model)
    with warnings.catch_warnings():
        # PEFT 0.21 gives fused experts the rank of their parts together, and looks for their name among modules.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        try:
            adapted = peft.get_peft_model(model, config, **options)
        except (TypeError, ValueError) as error:
            _check_names("--lora-targets", adapters.targets, paths)
            raise _refused(adapters, error) from error
    if adapters.targets:
        # Of those given, PEFT has taken away the parts of fused experts, which are no modules.
        _check_names("--lora-targets", sorted(adapted.peft_config["default"].target_modules), paths)
    return adapted


def _leave_experts_out(config: Any, model: nn.Module) -> None:
    """Have a configuration for every linear layer name those that PEFT takes for this model, without its experts."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # A PEFT that knows no fused experts.
        return
    convert_peft_config_for_transformers(config, model, None)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim == 2]
    named = config.target_parameters or ()
    config.target_parameters = sorted(name for name in named if any(path.endswith(f".{name}") for path in matrices))
    config.rank_pattern, config.alpha_pattern = {}, {}  # Of the experts.


def _refuse_on_experts(adapted: nn.Module, adapters: Adapters) -> None:
    """Raise DataError where fused experts, which are to be read one by one, have adapters."""
    names = adapted_experts(adapted)
    if not names:
        return
    whose = f"--adapter {adapters.directory}" if adapters.directory else f"--lora-targets {' '.join(adapters.targets)}"
    raise DataError(
        f"{whose} has adapters on {names[0]} of all experts of a layer at once, and --experts pieces reads them one by "
        "one: leave out either"
    )


def _check_names(flag: str, names: Sequence[str], paths: Sequence[str]) -> None:
    """Raise DataError for a name that no module has at the end of its path."""
    for name in names:
        if not name or not any(path == name or path.endswith(f".{name}") for path in paths):
            raise DataError(f"{flag} {name!r}: no module of the model has that name")


def _refused(adapters: Adapters, error: Exception) -> DataError:
    """Return the error of adapters that PEFT does not make."""
    told = first_line(error)
    if adapters.targets and told.startswith("Target module "):
        return DataError(
            f"--lora-targets {' '.join(adapters.targets)}: PEFT adds adapters to linear layers and embeddings alone: "
            "give the names of such modules (q_proj)"
        )
    if adapters.modules_to_save and (isinstance(error, TypeError) or not adapters.targets):
        return DataError(f"--modules-to-save {' '.join(adapters.modules_to_save)}: {told}")
    return DataError(f"PEFT does not make such adapters for this model: {told}")


def experts_without(model: nn.Module) -> list[str]:
    """Return the names of fused experts' weights to which `add_adapters` has given no adapters."""
    adapted = {id(module.get_param()) for module in _on_experts(model)}
    return [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        if "experts" in name
        for parameter_name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim == 3 and id(parameter) not in adapted
    ]


def begin(settings: Settings) -> None:
    """Import PEFT, and see that nothing of another run is lost.

    Raises DataError where the store keeps a run that is not to go on.
    """
    import peft  # noqa: F401

    checkpoint = None if settings.resume else last_checkpoint(settings)
    if checkpoint is not None:
        steps = recorded(checkpoint)[0]["steps"]
        raise DataError(
            f"{checkpoint.parent} holds a run after step {steps}: --resume goes on with it; delete it to begin anew"
        )


def memory_bytes(model: nn.Module, adapters: Adapters) -> int:
    """Return the bytes that adapters of a model without values take with gradients and states.

    Raises DataError as `add_adapters` does, and where they are on experts that are to be read one by one.
    """
    empty = copy.deepcopy(model)
    if adapters.directory is None:
        adapted = _adapted(empty, adapters, low_cpu_mem_usage=True)
    else:
        adapted = add_as_in(adapters.directory, empty.requires_grad_(False), trained=True, low_cpu_mem_usage=True)
    if adapters.experts == "pieces":
        _refuse_on_experts(adapted, adapters)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad) * _BYTES_PER_PARAMETER


def _on_experts(adapted: nn.Module) -> list[Any]:
    """Return PEFT's modules around parameters."""
    return [module for module in adapted.modules() if hasattr(module, "get_param")]


def has_checkpoints(settings: Settings) -> bool:
    """Return whether the run keeps checkpoints."""
    return settings.lora_rank is not None and bool(settings.store) and settings.keeps_store


def checkpoints_of(settings: Settings) -> Path:
    """Return the folder of the run's checkpoints."""
    return settings.store[0] / FOLDER


def finish_checkpoint(folder: Path, progress: dict[str, Any], entries: int) -> None:
    """Write the run's progress to a checkpoint of the Trainer: only then is it whole."""
    with writing(folder):
        for path in folder.iterdir():
            sync(path)
        temporary = folder / f"{_PROGRESS}.tmp"
        temporary.write_text(json.dumps({"progress": progress, "entries": entries}))
        sync(temporary)
        os.replace(temporary, folder / _PROGRESS)
        sync(folder)
        sync(folder.parent)  # Earlier checkpoints are deleted next.


def last_checkpoint(settings: Settings) -> Path | None:
    """Return the last checkpoint that is whole, or None. Those after it, which are not, are deleted."""
    if not has_checkpoints(settings) or not checkpoints_of(settings).is_dir():
        return None
    for path in reversed(checkpoints_in(checkpoints_of(settings))):
        if is_whole(path):
            return path
        shutil.rmtree(path)
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, whole or not, the first one first."""
    found = {int(named[1]): path for path in folder.iterdir() if (named := _CHECKPOINT.fullmatch(path.name))}
    return [path for _, path in sorted(found.items())]


def is_whole(checkpoint: Path) -> bool:
    """Return whether all of a checkpoint was written."""
    return (checkpoint / _PROGRESS).is_file()


def recorded(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """Return the progress of a checkpoint's run, and the entries of its metrics file."""
    entry = read_json(checkpoint / _PROGRESS)
    return entry["progress"], entry["entries"]
