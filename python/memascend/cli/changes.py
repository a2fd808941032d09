"""A resumed run whose options were changed on purpose: which may change, and the effect on the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.optim.lr_scheduler import LambdaLR

    from memascend.cli.data import TokenBlocks
    from memascend.cli.settings import Settings
    from memascend.optim import OffloadedOptimizer

#: Changes of settings by name: (before, after).
Changes = dict[str, tuple[Any, Any]]

#: Settings that decide which sequences a step takes.
_SIZES = ("batch_size", "grad_accum", "processes")
#: Settings that decide how long a run is, and the learning rate of each step.
RATES = ("steps", "epochs", "lr", "warmup_steps", "schedule")
CHANGEABLE = (*_SIZES, *RATES, "micro_batch_size", "tile_tokens", "max_grad_norm", "weight_decay")


@dataclass(frozen=True)
class DataPosition:
    """Where a run was in its data when the size of its steps was last changed."""

    steps: int = 0
    sequences: int = 0  # that those steps have taken

    def sequence(self, step: int, per_step: int) -> int:
        """Return the first sequence of step `step`, counted from 0, where each has taken `per_step` since."""
        return self.sequences + (step - self.steps) * per_step

    def length(self, settings: Settings, blocks: int) -> int:
        """Return the steps of the whole run over `blocks` sequences an epoch."""
        left = settings.epochs * blocks - self.sequences
        return settings.steps or self.steps + max(0, math.ceil(left / settings.sequences_per_step))


def find_changes(before: dict[str, Any], settings: Settings) -> Changes:
    """Return the settings that differ from the stored run's.

    Raises DataError, naming the option, for one that may not differ.
    """
    before = {
        "processes": 1,
        "micro_batch_size": None,
        "tile_tokens": None,
        "boundaries": "off",
        "base_bits": None,
        "lora_alpha": None,
        "lora_dropout": 0.0,
        "lora_targets": [],
        "dora": False,
        "rslora": False,
        "modules_to_save": [],
        "adapter": None,
        "experts": "whole",
    } | before  # A run of before there could be others.
    return compare(before, settings.decisive, CHANGEABLE if settings.change else (), CHANGEABLE)


def compare(
    before: dict[str, Any], now: dict[str, Any], allowed: Collection[str], changeable: Collection[str]
) -> Changes:
    """Return the settings that differ from the stored run's; those that it has no value of do not.

    Args:
        before: the settings of the run in the store.
        now: the settings of the command.
        allowed: names of those that may differ.
        changeable: names of those that may differ with --change.

    Raises DataError, naming the option, for one that may not differ.
    """
    changes: Changes = {}
    for name, value in now.items():
        if before.get(name, value) == value:
            continue
        if name not in allowed:
            needed = "--resume needs the same"
            if name in changeable:
                needed += ", and --resume --change goes on with the new one"
            raise DataError(f"{_flag(name)} is {value}, but the run in the store has {before[name]}: {needed}")
        changes[name] = (before[name], value)
    return changes


def effects(
    changes: Changes, done: int, steps: int, position: DataPosition | None = None, blocks: TokenBlocks | None = None
) -> list[str]:
    """Return a line on the effect of each change on a run of `steps`, which has taken `done` of them to `position`.

    `position` and `blocks` are of a run whose sizes may change.

    Raises DataError where the run is longer already than it is to be.
    """
    if steps < done:
        raise DataError(f"the run in the store has taken {done} steps, more than the {steps} that it is to have now")
    kept = f"the first {done} steps stay as they were"
    lines = []
    for name, (before, after) in changes.items():
        what = f"from step {done + 1} on; {kept}"
        if name in _SIZES:
            assert position is not None and blocks is not None, "the sizes of this run may change"
            epoch, place = divmod(position.sequences, len(blocks))
            what = (
                f"the data goes on where it was, at sequence {place + 1} of {len(blocks)} in epoch {epoch + 1}; {kept}"
            )
        elif name in ("steps", "epochs"):
            what = f"{steps} steps in all; a schedule other than constant has other learning rates {what}"
            if blocks is not None and blocks.tokens_max is not None and blocks.tokens >= blocks.tokens_max:
                what += f"; the data stays the {blocks.tokens:,} tokens that were chosen for the steps before"
        lines.append(f"{_flag(name)} {before} -> {after}: {what}")
    return lines


def apply_changes(changes: Changes, settings: Settings, optimizer: OffloadedOptimizer, scheduler: LambdaLR) -> None:
    """Give the resumed optimizer, and its scheduler of the new length, the new settings."""
    if changes.keys() & {*RATES, *_SIZES}:
        rates = [settings.lr * factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler.base_lrs, scheduler._last_lr = [settings.lr] * len(rates), [*rates]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"], group["lr"] = settings.lr, rate
    if "weight_decay" in changes:
        optimizer.param_groups[0]["weight_decay"] = settings.weight_decay  # The Trainer's second group has none.


def _flag(name: str) -> str:
    return "the number of processes" if name == "processes" else "--" + name.replace("_", "-")
