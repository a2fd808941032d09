"""The options of adapters, as the command line has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import DataError
from memascend.formats.adapters import CONFIG_NAME
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Options that describe adapters beside their rank, and are nothing without it.
_OPTIONS = ("lora_alpha", "lora_dropout", "lora_targets", "dora", "rslora", "modules_to_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters that are made, or trained further."""

    rank: int
    #: Their scale times the rank; None is twice the rank.
    alpha: int | None = None
    dropout: float = 0.0
    #: The modules that get them, by the ends of their names; none is every linear layer but the head.
    targets: Sequence[str] = ()
    dora: bool = False
    rslora: bool = False
    #: Modules whose copies are trained whole.
    modules_to_save: Sequence[str] = ()
    #: The adapters that are trained further, with their own options.
    directory: Path | None = None
    #: How the experts of a mixture are read. One by one ("pieces") they have no adapters.
    experts: str = "whole"

    @classmethod
    def of(cls, chosen: Any) -> Adapters:
        """Return the adapters of `chosen`: the settings of a run, or the arguments of a plan."""
        return cls(
            rank=chosen.lora_rank,
            alpha=chosen.lora_alpha,
            dropout=chosen.lora_dropout,
            targets=chosen.lora_targets,
            dora=chosen.dora,
            rslora=chosen.rslora,
            modules_to_save=chosen.modules_to_save,
            directory=getattr(chosen, "adapter", None),
            experts=chosen.experts,
        )


def lone_option(chosen: Any) -> str | None:
    """Return the flag of an option of adapters that was given, or None."""
    given = next((name for name in _OPTIONS if getattr(chosen, name)), None)
    return None if given is None else "--" + given.replace("_", "-")


def rank_of(directory: Path) -> int:
    """Return the rank of the adapters in a directory. Raises DataError where it holds none, or others than LoRA's."""
    path = directory / CONFIG_NAME
    config = read_json(path) if path.is_file() else None
    rank = config.get("r") if isinstance(config, dict) and config.get("peft_type") == "LORA" else None
    if not isinstance(rank, int) or rank < 1:
        raise DataError(f"--adapter {directory} holds no adapters of LoRA: give a directory that PEFT wrote")
    return rank
