"""The room on the drives that a run takes, compared with the free room before anything is read or written."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.errors import DataError
from memascend.forecast.traffic import ssd_space
from memascend.forecast.workload import Workload
from memascend.hardware.drives import is_device
from memascend.options import parse_durability

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from memascend.cli.settings import Settings
    from memascend.layout.units import Unit


def kept_generations(settings: Settings) -> int:
    """Return how many generations the store keeps beside the last steps': the best model, and checkpoints."""
    best = 1 if settings.evaluation and not settings.lora_rank else 0
    return best + (settings.keep_last or 1 if settings.save_every else 0)


def workload_of(settings: Settings) -> Workload:
    """Return the work of a step of a run."""
    period = parse_durability(settings.durability)
    return Workload(
        settings.seq_len,
        settings.batch_size,
        settings.grad_accum,
        settings.optimizer,
        settings.states,
        settings.master,
        recompute=settings.recompute and not settings.in_memory,
        ranks=settings.processes,
        micro_batch_size=settings.micro_batch_size,
        tile_tokens=settings.tile_tokens,
        boundaries=settings.has_boundaries,
        period=1 if period is None else period,  # By itself a run chooses durable steps, where there is the room.
        activations=settings.activations or ("host" if settings.device is None else "recompute"),
    )


def check_space(
    settings: Settings,
    units: Sequence[Unit],
    config: Any,
    work: Workload,
    *,
    reference: tuple[Path, int] | None = None,
    adapts: bool = True,
) -> None:
    """Raise DataError where the drives have no room for weights and states, or for generations beside the last steps'.

    Without the latter the run may do: what it says of it would come at the first evaluation, hours later. Only
    directories of a new store are looked at. `reference` is the path of a copy of the model before the training, and
    its bytes; `adapts` says whether adapters may be trained instead.
    """
    kept = kept_generations(settings)
    folders = _folders(settings.store)
    free = _free_in(folders)
    if settings.resume or settings.replace_store or free is None:
        return
    where = ""
    if reference is not None:
        taken = _taken_by(*reference, folders)
        free = max(0, free - taken)
        where = f" beside the copy of the model before the training ({format_size(taken)})" if taken else ""
    alone = ssd_space(units, config, work)
    where = f"{', '.join(map(str, folders))} has {format_size(free)} free{where}"
    needed = ssd_space(units, config, replace(work, kept=kept)).total()
    # Without room for durable steps a run without --durability does without them, and keeps nothing in the store.
    keeps = kept and work.period and (settings.durability != "auto" or free >= alone.total())
    if keeps and free < needed:
        raise DataError(
            f"the store would take up to {format_size(needed)}, of which {format_size(needed - alone.total())} are for "
            f"{_named(settings)}, and {where}: give another --store, or leave out {_flags(settings)}"
            f"{_lowering(settings)}"
        )
    if not any(map(is_device, settings.store)):
        _check_least(settings, alone, free, where, adapts)


def _taken_by(copy: Path, nbytes: int, folders: Sequence[Path]) -> int:
    """Return the bytes that a copy takes of the room in `folders`. Raises DataError where it has no room itself."""
    folder = _existing(copy)
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < nbytes:
        raise DataError(
            f"the model before the training would be copied to {copy}, which takes {format_size(nbytes)}, and {folder} "
            f"has {format_size(usage.free)} free: free some space there, or give another --store"
        )
    return nbytes if os.stat(folder).st_dev in {os.stat(one).st_dev for one in folders} else 0


def _check_least(settings: Settings, space: Counter[str], free: int, where: str, adapts: bool) -> None:
    """Raise DataError where weights and states have no room, twice where durable steps were asked for."""
    beside = ("gradients", "projections", "activations", "second_slot", "kept")
    least = space.total() - sum(space[kind] for kind in beside)
    twice = settings.durability not in ("auto", "none")
    if free >= (1 + twice) * least:
        return
    instead = "leave out --durability, " if twice and free >= least else ""
    raise DataError(
        f"the store takes at least {format_size((1 + twice) * least)}, and {where}: {instead}free some space, give "
        f"another --store or a second one{_lowering(settings, *(['--lora-rank 16'] if adapts else []))}"
    )


def free_bytes(stores: Sequence[Path]) -> int | None:
    """Return the bytes that are free in the directories of a store; None where there are devices, or nothing tells."""
    return None if any(map(is_device, stores)) else _free_in(_folders(stores))


def _folders(stores: Sequence[Path]) -> list[Path]:
    """Return the directories that are there, of a store's that may not be: one of each filesystem."""
    existing = [folder for folder in map(_existing, stores) if folder.is_dir()]
    return list({os.stat(folder).st_dev: folder for folder in existing}.values())


def _free_in(folders: Sequence[Path]) -> int | None:
    """Return the bytes that are free; None without folders, and on a filesystem in memory whose size reads 0."""
    usages = [shutil.disk_usage(folder) for folder in folders]
    return sum(usage.free for usage in usages) if usages and all(usage.total for usage in usages) else None


def _named(settings: Settings) -> str:
    parts = ["the best model, as --eval keeps it"] if settings.evaluation else []
    return " and ".join([*parts, *(["the checkpoints of --save-every"] if settings.save_every else [])])


def _lowering(settings: Settings, *others: str) -> str:
    """Return the end of a sentence with the options, of those that are not in use, that take less."""
    if settings.lora_rank:
        return ""  # Nothing in the store is trained.
    states = ["--states 8bit"] if settings.states != "8bit" else []
    options = [*states, *(["--no-master"] if settings.master else []), *others]
    return f", or lower what a step takes ({', '.join(options)})" if options else ""


def _flags(settings: Settings) -> str:
    flags = [flag for flag, given in (("--eval", settings.evaluation), ("--save-every", settings.save_every)) if given]
    return " or ".join(flags)


def _existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that is there."""
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
