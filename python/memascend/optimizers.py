"""The optimizers by name: how the command and the Trainer call each, and its class and algorithm.

The classes are in `memascend.optim`, which imports PyTorch: `--help` does without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_EIGHT_BIT = {"states": "8bit"}


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of the command line."""

    #: Name of the class in `memascend.optim`.
    class_name: str
    #: Its algorithm, for `Rule`.
    algorithm: str
    #: Options that differ from the defaults; `rank` is an option of `apollo_groups`.
    options: dict[str, Any] = field(default_factory=dict)
    #: The values of `TrainingArguments.optim` that mean it, and their options; the first one has none.
    trainer: dict[str, dict[str, Any]] = field(default_factory=dict)


#: By the values of `--optimizer`.
OPTIMIZERS = {
    "adamw": NamedOptimizer(
        "AdamW",
        "adamw",
        trainer={
            "adamw_torch": {},
            "adamw_torch_fused": {},
            "paged_adamw_32bit": {},
            "adamw_torch_8bit": _EIGHT_BIT,
            "adamw_bnb_8bit": _EIGHT_BIT,
            "adamw_8bit": _EIGHT_BIT,
            "paged_adamw_8bit": _EIGHT_BIT,
        },
    ),
    "apollo": NamedOptimizer("Apollo", "apollo", {"rank": 256}, trainer={"apollo_adamw": {}}),
    "apollo-mini": NamedOptimizer("ApolloMini", "apollo", {"rank": 1}),
    "lion": NamedOptimizer(
        "Lion",
        "lion",
        trainer={
            "lion_32bit": {},
            "paged_lion_32bit": {},
            "lion_8bit": _EIGHT_BIT,
            "paged_lion_8bit": _EIGHT_BIT,
        },
    ),
    "sgd": NamedOptimizer("SGD", "sgd momentum", {"momentum": 0.9}, trainer={"sgd": {}}),
}

#: Names of the classes. PyTorch, or another library, has namesakes of most.
CLASS_NAMES = ("Adam", *(one.class_name for one in OPTIMIZERS.values()))
