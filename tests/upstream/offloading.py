"""Our classes, as the tests of other libraries make them: every model that they are given is offloaded."""

from __future__ import annotations

import gc
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn

import memascend
from memascend.formats.json_files import read_json
from memascend.integrations import transformers as ours_for_transformers
from memascend.integrations import trl as ours_for_trl
from memascend.integrations.named_checkpoints import MANIFEST
from memascend.integrations.transformers import TrainerMixin
from memascend.session.api import find_offload

HOST_MEMORY = "64MiB"
#: The models that a test has offloaded, each with its store. Tests read parameters of models that they have dropped.
_models: list[tuple[nn.Module, Path]] = []
_folders: list[Path] = []
#: Whether the test that runs resumes a run.
resuming = False


def new_store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="memascend-upstream-"))
    _folders.append(folder)
    return folder


def close_all() -> None:
    if not _models:
        return
    for model, _ in _models:
        _close(model)
    _models.clear()
    gc.collect()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()


def _close(model: nn.Module) -> None:
    session = find_offload(model)
    if session is not None and not session.runtime.closed:
        memascend.close(model)


def _store_of_checkpoints(folder: str | None) -> Path | None:
    """Return the store that checkpoints in a Trainer's folder are in."""
    for file in Path(folder or "").glob(f"checkpoint-*/{MANIFEST}") if folder else ():
        return Path(read_json(file)["models"][0]["store"][0])
    return None


def _arguments(args: Any) -> None:
    """Say where the model goes, as a user would: to a store of its own, or to the store of the resumed run."""
    store = _store_of_checkpoints(args.output_dir) if resuming else None
    args.store = [str(store if store is not None and store.is_dir() else new_store())]
    args.host_memory, args.keep_store, args.weights_dtype = HOST_MEMORY, True, "float32"


@dataclass
class TrainingArguments(ours_for_transformers.MemascendArguments):
    """transformers' arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _arguments(self)


@dataclass
class SFTConfig(ours_for_trl.SFTConfig):
    """TRL's arguments of the SFTTrainer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _arguments(self)


class Opening(TrainerMixin):
    """Keeps models open to the end of the test, or to the resumption of their run."""

    def __init__(self, *given: Any, **named: Any) -> None:
        args = named.get("args", given[1] if len(given) > 1 else None)
        if isinstance(args, ours_for_transformers.OffloadArguments):
            for model, store in _models:
                if args.store == [str(store)] and model is not named.get("model", given[0] if given else None):
                    _close(model)
            gc.collect()
        super().__init__(*given, **named)
        session = find_offload(self.model)
        if session is not None:
            _models.append((self.model, Path(session.paths[0])))

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        super().log(logs, *others, **named)
        # Tests compare the histories of two runs: seconds and bytes differ.
        last = self.state.log_history[-1]
        for name in [name for name in last if name.startswith("memascend/")]:
            del last[name]


class Trainer(Opening, ours_for_transformers.Trainer):
    """transformers' Trainer."""


class SFTTrainer(Opening, ours_for_trl.SFTTrainer):
    """TRL's SFTTrainer."""


class DPOTrainer(Opening, ours_for_trl.DPOTrainer):
    """TRL's DPOTrainer."""


class RewardTrainer(Opening, ours_for_trl.RewardTrainer):
    """TRL's RewardTrainer."""


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):
    """Loads models as transformers does, and offloads them: PEFT's tests put adapters on them afterwards."""

    @classmethod
    def from_pretrained(cls, *given: Any, **named: Any) -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(*given, **named)
        store = new_store()
        memascend.offload(model, store=store, host_memory=HOST_MEMORY, durability="none")
        _models.append((model, store))
        return model
