"""A small run of transformers' Trainer, in memory, offloaded, and interrupted at any moment.

As a program, `python trainer_runs.py FOLDER` begins or goes on with the run in FOLDER, and writes its result there.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_models
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import memascend
from memascend.integrations.transformers import MemascendArguments, Trainer
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from torch import nn

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "logging_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
VOCABULARY = 256


def build() -> LlamaForCausalLM:
    """Return a model with dropout, so that random numbers matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **tiny_models.SMALLEST_DECODER | {"vocab_size": VOCABULARY}, tie_word_embeddings=False, attention_dropout=0.1
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def data(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make(
    model: Any, folder: Path, offload: bool | None = None, cls: type = Trainer, callbacks: Any = (), **arguments: Any
) -> Any:
    """Return a Trainer in `folder`; with `offload`, one that offloads the model itself."""
    arguments = ARGUMENTS | arguments
    if offload:
        args: Any = MemascendArguments(str(folder), **{"host_memory": "64MiB"} | arguments)
    else:
        args = TrainingArguments(str(folder), **arguments)
    return cls(model, args, train_dataset=data(), eval_dataset=data(4), callbacks=list(callbacks))


def interrupted(trainer: Any) -> None:
    """Train until the interruption, and leave the store as a crash would."""
    try:
        trainer.train()
    except Interrupted:
        offload_of(trainer.model).close(failed=True)
    else:
        raise AssertionError("the run was not interrupted")


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return the log, without times and figures, and without the mean loss of one process."""
    return [
        {name: value for name, value in entry.items() if not re.search("runtime|per_second|memascend/", name)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in memascend.parameters_of(model)}


class Interrupted(Exception):
    """Ends a run, as a crash would."""


class InterruptAt(TrainerCallback):
    """Interrupts a run at a step's event."""

    def __init__(self, step: int, event: str) -> None:
        def interrupt(_args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == step:
                raise Interrupted

        setattr(self, event, interrupt)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = make(str(folder / "model"), folder / "out", offload=True, save_total_limit=2, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=True)
    digest = hashlib.sha256()
    for name, value in sorted(weights(trainer.model).items()):
        digest.update(name.encode() + value.view(torch.uint8).numpy().tobytes())
    result = {"weights": digest.hexdigest(), "log": logged(trainer), "best": trainer.state.best_global_step}
    (folder / "result.new").write_text(json.dumps(result))
    (folder / "result.new").rename(folder / "result.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
