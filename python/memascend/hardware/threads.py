"""How many threads work at once, chosen together from the processors that this process really has.

`MEMASCEND_THREADS` sets any of them in one place, as "torch=8,update=4,waits=yield".

Where a device computes, three quarters of the processors update, since nothing else computes there for long. Where the
CPU computes, an update takes time from the threads that a loop's end waits for, so a quarter of the cores update.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from memascend.errors import DataError
from memascend.hardware.processors import Processors, processors

VARIABLE = "MEMASCEND_THREADS"
#: The share of the processors that update weights. Beside a device nothing else computes on them for long: of 16
#: beside an H200, 12 updated 1.3 times as fast as 8 and as fast as 16 (docs/measurements.md). Beside a model that
#: computes on the CPU the update takes them from PyTorch's threads: with fewer than 8 cores one does it.
UPDATE_SHARE_BESIDE_DEVICE, UPDATE_SHARE = 3 / 4, 1 / 4
#: How PyTorch's threads wait for each other: see `memascend.hardware.waits`.
WAITS = ("auto", "spin", "yield")
#: Variables that have OpenMP start other numbers of threads than there are processors.
_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """The settings in `MEMASCEND_THREADS`: numbers of threads, None for automatic ones, and one of `WAITS`."""

    torch: int | None = None
    update: int | None = None
    waits: str = "auto"


def settings() -> ThreadSettings:
    """Return the settings in `MEMASCEND_THREADS`. Raises DataError, a ValueError, where that has another form."""
    chosen: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        name, _, value = part.partition("=")
        if name == "waits" and value in WAITS:
            chosen[name] = value
        elif name in ("torch", "update") and value.isascii() and value.isdigit() and int(value) > 0:
            chosen[name] = int(value)
        else:
            raise DataError(
                f"{VARIABLE} has {part!r}: give torch=N and update=N, numbers of threads, and waits= one of "
                f"{', '.join(WAITS)}, each at most once and separated by commas"
            )
    return ThreadSettings(**chosen)


def update_threads(beside_device: bool, given: int | None = None) -> int:
    """Return how many threads update weights: as `given` by an option or the environment, else chosen.

    Neither changes a bit. Raises ValueError for less than one, DataError as `settings` does.
    """
    if given is not None:
        if given < 1:
            raise ValueError(f"compute_threads={given}: at least one thread updates weights")
        return given
    chosen = settings().update
    if chosen is not None:
        return chosen
    here = processors()
    if beside_device:
        return max(1, int(here.threads / _processes(here) * UPDATE_SHARE_BESIDE_DEVICE))
    return max(1, int(here.cores / _processes(here) * UPDATE_SHARE))


def torch_threads() -> int:
    """Return how many threads PyTorch is to compute with on the CPU, where the program may choose them.

    PyTorch's own number, unless the quota of time pays for fewer. Another number may change bits of products and sums.
    """
    chosen = settings().torch
    if chosen is not None:
        return chosen
    threads = torch.get_num_threads()
    if any(name in os.environ for name in _NUMBERS):
        return threads
    return min(threads, processors().threads)


def set_torch_threads() -> None:
    """Have PyTorch compute with `torch_threads`: for a program of our own, the command line. Libraries leave them."""
    threads = torch_threads()
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _processes(here: Processors) -> int:
    """Return how many processes of one launch share the processors, by torchrun's LOCAL_WORLD_SIZE.

    A process that was given processors of its own shares them with none.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(told)) if here.whole and told.isascii() and told.isdigit() else 1
