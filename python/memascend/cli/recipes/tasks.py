"""The tasks of `memascend finetune --task`: their trainers, and the columns that their data has."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from memascend.errors import DataError

#: Tasks of the command's own training loop, by the data that each is of.
OWN = {"sft": "prompts with completions, or conversations", "pretrain": "text"}

#: Packages of trainers, and what of memascend installs them.
_EXTRAS = {"trl": "trl", "datasets": "trl", "peft": "trl", "accelerate": "trl", "sentence_transformers": "embed"}
_NEW_HEAD = "trains a new head with the model"


@dataclass(frozen=True, slots=True)
class Task:
    """A task that a trainer carries out."""

    name: str
    module: str
    #: Names of the trainer and of its arguments in `memascend.integrations.<module>`.
    trainer: str
    arguments: str
    #: Columns that the data has.
    columns: tuple[str, ...]
    #: Columns that it may have besides.
    others: tuple[str, ...] = ()
    #: Whether the model that is trained is compared with the model before the training.
    compares: bool = False
    #: Why adapters cannot be trained in place of the model; empty where they can.
    whole: str = ""

    def load(self) -> tuple[type, type]:
        """Return the classes of the trainer and of its arguments. Raises DataError where a package is missing."""
        try:
            module: Any = importlib.import_module(f"memascend.integrations.{self.module}")
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(error.name or "")
            if extra is None:
                raise
            raise DataError(f"--task {self.name} needs {error.name}: pip install 'memascend[{extra}]'") from error
        return getattr(module, self.trainer), getattr(module, self.arguments)


TASKS = {
    task.name: task
    for task in (
        Task("dpo", "trl", "DPOTrainer", "DPOConfig", ("chosen", "rejected"), ("prompt",), compares=True),
        Task("kto", "trl", "KTOTrainer", "KTOConfig", ("prompt", "completion", "label"), compares=True),
        Task("orpo", "trl_orpo", "ORPOTrainer", "ORPOConfig", ("prompt", "chosen", "rejected")),
        Task("reward", "trl", "RewardTrainer", "RewardConfig", ("chosen", "rejected"), ("prompt",), whole=_NEW_HEAD),
        Task("classify", "transformers", "Trainer", "MemascendArguments", ("text", "label"), whole=_NEW_HEAD),
        Task(
            "embed",
            "sentence_transformers",
            "SentenceTransformerTrainer",
            "SentenceTransformerTrainingArguments",
            ("anchor", "positive"),
            ("negative",),
            whole="trains the whole encoder",
        ),
    )
}
#: Values of --task.
NAMES = (*OWN, *TASKS)
