"""The room on the drives that a run takes, compared with what is free before anything is read or written."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.errors import DataError
from memascend.forecast.traffic import ssd_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.command.settings import Settings
    from memascend.forecast.traffic import Work
    from memascend.layout.units import Unit


def kept_generations(settings: Settings) -> int:
    """Return how many generations the store keeps beside those of the last steps: the best model, and checkpoints."""
    best = 1 if settings.evaluation and not settings.lora_rank else 0
    return best + (settings.keep_last or 1 if settings.save_every else 0)


def check_space(settings: Settings, units: Sequence[Unit], config: Any, work: Work) -> None:
    """Raise DataError where the drives have no room for what the run keeps beside the last steps.

    Without that the run may do: what it says of it would come at the first evaluation, hours later. Only directories
    of a new store are looked at.
    """
    kept = kept_generations(settings)
    folders = {os.stat(folder).st_dev: folder for folder in map(_existing, settings.store) if folder.is_dir()}
    if not kept or not work.period or settings.resume or settings.replace_store or not folders:
        return
    alone = ssd_space(units, config, work)
    needed = ssd_space(units, config, replace(work, kept=kept)).total()
    free = sum(shutil.disk_usage(folder).free for folder in folders.values())
    # Without room for durable steps a run without --durability does without them, and keeps nothing in the store.
    if free >= needed or (settings.durability == "auto" and free < alone.total()):
        return
    raise DataError(
        f"the store would take up to {format_size(needed)}, of which {format_size(needed - alone.total())} are for "
        f"{_named(settings)}, and {', '.join(map(str, folders.values()))} has {format_size(free)} free: give another "
        f"--store, leave out {_flags(settings)}, or lower what a step takes (--states 8bit, --no-master)"
    )


def free_bytes(stores: Sequence[Path]) -> int | None:
    """Return the bytes that are free in the directories of a store; None where they are devices, or there are none."""
    if not stores or any(path.is_block_device() for path in stores):
        return None
    folders = {os.stat(folder).st_dev: folder for folder in map(_existing, stores)}
    return sum(shutil.disk_usage(folder).free for folder in folders.values())


def _named(settings: Settings) -> str:
    parts = ["the best model, as --eval keeps it"] if settings.evaluation else []
    return " and ".join([*parts, *(["the checkpoints of --save-every"] if settings.save_every else [])])


def _flags(settings: Settings) -> str:
    flags = [flag for flag, given in (("--eval", settings.evaluation), ("--save-every", settings.save_every)) if given]
    return " or ".join(flags)


def _existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that is there."""
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
