"""The command in several processes that a launcher has started: the first one speaks for all.

Of PyTorch's private names this module uses `distributed_c10d._get_default_store`, the key-value store by which the
processes have found each other.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.cli.settings import Settings

#: Counts the processes that have asked to tell an error.
_TOLD = "memascend/told"
#: Is there when the first process has left the command.
_LEFT = "memascend/left"
#: How long the others wait for that after an error.
LAST_WORDS_SECONDS = 5.0
#: The standard error of a process that is silent.
_silenced: list[Any] = []


def processes() -> int:
    """Return how many processes were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """Return how many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this process is the one that writes and speaks for all."""
    return processes() == 1 or os.environ.get("RANK", "0") == "0"


@contextmanager
def first_speaks(launched: bool) -> Iterator[None]:
    """Have the other processes print nothing, if the command is one that trains over those that were `launched`.

    All are in one group from here on. After an error the others stay until the first has left: a launcher ends all of
    them when one has ended, and the first may not have spoken yet.
    """
    if not launched or processes() == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if is_first():
        try:
            yield
        finally:
            with suppress(RuntimeError):
                store.set(_LEFT, "")
        return
    with _silent():
        _silenced.append(sys.__stderr__)
        yield
    with suppress(RuntimeError):  # The first process holds the store, and is gone.
        end = time.monotonic() + LAST_WORDS_SECONDS
        while dist.is_initialized() and not store.check([_LEFT]) and time.monotonic() < end:
            time.sleep(0.05)


@contextmanager
def _silent() -> Iterator[None]:
    """Drop the output of this process."""
    streams = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nothing:
        sys.stdout = sys.stderr = nothing
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


@contextmanager
def one_speaks() -> Iterator[None]:
    """Have one process alone print an error of all: the one that comes first."""
    if not _comes_first():
        with _silent():
            yield
        return
    stream = sys.stderr
    sys.stderr = _silenced[0] if _silenced else stream
    try:
        yield
    finally:
        sys.stderr = stream


def _comes_first() -> bool:
    """Return whether no other process has an error to tell yet."""
    distributed: Any = sys.modules.get("torch.distributed")
    if processes() == 1 or distributed is None or not distributed.is_initialized():
        return is_first()
    with suppress(RuntimeError, ValueError):  # The process that holds the store is gone.
        return distributed.distributed_c10d._get_default_store().add(_TOLD, 1) == 1
    return True


@contextmanager
def together() -> Iterator[None]:
    """Have all processes end a run at once: a launcher ends the others when one has ended by a signal."""
    yield
    import torch.distributed as dist

    if processes() > 1:
        dist.barrier()
        dist.destroy_process_group()


def conflict(settings: Settings) -> str | None:
    """Return why a run cannot be divided over the processes, or None."""
    if processes() == 1:
        return None
    there = f"{processes()} processes were launched (WORLD_SIZE)"
    apart = any("{rank}" in str(path) for path in settings.store)
    for refused, instead in (
        (settings.in_memory, "--in-memory trains in one: start one process, or give --store and --host-memory"),
        (settings.lora_rank, "--lora-rank trains in one: start one process, or leave it out"),
        (settings.device, "a GPU computes in one: leave --device out, or start one process"),
        (settings.host_memory == "auto", "--host-memory auto is for one: give a size such as 8GiB for each process"),
        (settings.update != "forward", f"--update {settings.update} is for one: leave it out"),
        (settings.gradients != "auto", f"--gradients {settings.gradients} is for one: leave it out"),
        (
            settings.evaluation and settings.durability == "none",
            "the best model is kept in the stores: leave --durability none out, or --eval",
        ),
        (
            settings.store and processes_here() > 1 and not apart,
            "each has a store of its own: write {rank} for its number, as in --store '/nvme{rank}'",
        ),
    ):
        if refused:
            return f"{there}, and {instead}"
    return None
