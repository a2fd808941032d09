"""Programs of ranks that lose one, and the continuation after it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rank_runs import OPTIONS, Run, batch, build, offload

import memascend
from memascend.durability.commits import CommitLog
from memascend.layout import tables
from memascend.ranks.group import Ranks

if TYPE_CHECKING:
    from pathlib import Path


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_nothing(_: CommitLog) -> None:
    pass


def _die_if_due(generations: CommitLog, *_: Any) -> None:
    if generations._phases.record is not None:
        die()


def sleep(*_: Any, **__: Any) -> None:
    time.sleep(60)


def train_until_lost(
    rank: int,
    ranks: int,
    folder: Path,
    victim: int,
    moment: str,
    steps: int,
    kind: str = "mixture",
    store: Any = None,
    **training: Any,
) -> Any:
    """Train durably until one rank is lost.

    It is killed as it begins to commit the last step ("commit"), as it is to gather a unit ("gather"), or, without that
    commit, where all ranks meet to have it ("meet"); or it stops as it is to gather a unit ("hang").
    """
    model = offload(build(kind=kind), folder, keep_store=True, **({} if store is None else {"store": store}))
    run = Run(model, ranks, range(rank, ranks, ranks), **training).go(steps)
    if rank == victim and moment in ("commit", "meet"):
        CommitLog.start = die if moment == "commit" else start_nothing  # type: ignore[method-assign]
        CommitLog.wait_committed = _die_if_due  # type: ignore[method-assign]
    elif rank == victim:
        Ranks.gather = die if moment == "gather" else sleep  # type: ignore[method-assign]
    try:
        run.go(steps + 1, steps)
    finally:
        memascend.close(model)


def resume_with_tables(rank: int, ranks: int, folder: Path) -> Any:
    """Resume where the head is large enough for its loss to have been computed in pieces."""
    tables.TABLE_BYTES_MIN = 1024**2
    return resume(rank, ranks, folder, 1)


def resume(
    rank: int,
    ranks: int,
    folder: Path,
    steps: int,
    micro: int = 1,
    name: str = "store",
    tag: str | None = None,
    dtype: str = "float32",
    described: bool = False,
    kind: str = "mixture",
    store: Any = None,
) -> Any:
    """Go on with a run; `described` says that its store can make the model."""
    model = None if described else build(dtype, seed=5, kind=kind)
    options = {name: value for name, value in OPTIONS.items() if name != "fused_loss"}
    store = store or f"{folder}/{name}{{rank}}"
    if options.get("device_memory") == "least":
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.resume(store, model=model, tag=tag, **options | {"device_memory": 1})
        options["device_memory"] = too_small.value.smallest_bytes
    resumed = memascend.resume(store, model=model, tag=tag, **options)
    before = dict(memascend.parameters_of(resumed.model))
    run = Run(resumed.model, ranks * micro, range(rank, ranks * micro, ranks), optimizer=resumed.optimizer)
    result = run.go(steps, resumed.steps).result() | {"steps": resumed.steps, "before": before}
    result["tags"] = [tag for tag, _, _ in memascend.checkpoints(resumed.model)]
    memascend.close(resumed.model)
    return result


def train_or_resume(rank: int, ranks: int, folder: Path, steps: int, kind: str = "mixture", **training: Any) -> Any:
    """Act as a script that is started again, whatever stopped it."""
    if memascend.can_resume(f"{folder}/store{{rank}}"):
        return resume(rank, ranks, folder, steps, kind=kind)
    # A rank may have the first step that another one lost.
    shutil.rmtree(folder / f"store{rank}", ignore_errors=True)
    model = offload(build(kind=kind), folder, keep_store=True)
    result = Run(model, ranks, range(rank, ranks, ranks), **training).go(steps).result()
    memascend.close(model)
    return result


def give_up(rank: int, ranks: int, folder: Path) -> Any:
    """Have one rank end with an error of its own, which its process outlives."""
    model = offload(build(), folder)
    try:
        if rank == 1:
            raise OSError("no such batch")
        Run(model, ranks, range(rank, ranks, ranks)).go(1)
    finally:
        memascend.close(model)
        if rank == 1:
            time.sleep(2)


def go_astray(rank: int, ranks: int, folder: Path) -> Any:
    """Have one rank evaluate once more than the others."""
    model = offload(build(), folder)
    Run(model, ranks, range(rank, ranks, ranks)).go(1)
    if rank == 1:
        with torch.no_grad():
            model(batch(0))
    Run(model, ranks, range(rank, ranks, ranks)).go(1)
