"""Clocks and pinned memory that the probe's parts share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import memascend

MIB = 2**20
#: Host memory by the way it is had; `torch` is PyTorch's pinned memory, `registered-4k` has no huge pages.
HOST_KINDS = ("torch", "cuda", "registered", "registered-4k", "pageable")


def host_memory(kind: str, nbytes: int) -> torch.Tensor:
    """Return touched host memory of one of `HOST_KINDS`: shape [nbytes], uint8."""
    if kind == "torch":
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    elif kind == "pageable":
        memory = torch.empty(nbytes, dtype=torch.uint8)
    elif kind == "registered-4k":
        memory = memascend.empty_pinned(nbytes, torch.uint8, allocator="registered", huge_pages=False)
    else:
        memory = memascend.empty_pinned(nbytes, torch.uint8, allocator=kind)
    return memory.fill_(1)


def wall_seconds(function: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Return the mean seconds of a call by the host's clock, over at least `seconds` and `least` calls.

    The device is idle before each call and waited for after it; one call before warms up.
    """
    function()
    torch.cuda.synchronize()
    began, calls = time.perf_counter(), 0
    while calls < least or time.perf_counter() - began < seconds:
        function()
        torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - began) / calls


def device_seconds(function: Callable[[], object], rounds: int, calls: int = 5) -> float:
    """Return the least of `rounds` mean times of a call by the device's clock, each of `calls` in a row."""
    function()
    taken = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000 / calls)
    return min(taken)


def rate(amount: float, seconds: float) -> float | None:
    """Return `amount` a second; None where the clock saw no time pass."""
    return amount / seconds if seconds > 0 else None
