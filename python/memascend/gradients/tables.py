"""The gradient of a table that a device makes: its blocks come down one after another, while the next ones are made.

The thread that launches the backward pass does that, so where the plan has room for it, ahead of caches, the gradient
is made at once instead: the device measures it, and the thread of captures moves it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from memascend.errors import MemascendError
from memascend.memory_plan.in_parts import BLOCK_BUFFERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from memascend._memascend import CudaEvent, GradientRanges, LeaseBuffer
    from memascend.hardware.cuda import ComputeDevice
    from memascend.streaming.streamer import Streamer


class _Leaving(NamedTuple):
    """A block on its way from the device, where it has to live until then."""

    block: torch.Tensor
    lease: LeaseBuffer
    done: CudaEvent


def add_from_device(
    ranges: GradientRanges, blocks: Iterable[torch.Tensor], streamer: Streamer, device: ComputeDevice
) -> None:
    """Add the blocks of a gradient, (n, width) each and in order, to the ranges that are captured.

    A block is copied to a buffer for blocks of tables while the next one is made, and added from there. When this
    returns, or raises, nothing is on its way any more.
    """
    assert device.link is not None
    leaving: deque[_Leaving] = deque()

    def add_oldest() -> None:
        block, lease, done = leaving[0]
        with streamer.timeline.waiting("d2h"):
            done.wait()
        ranges.add(lease.address, block.numel())
        leaving.popleft()

    try:
        for block in blocks:
            if len(leaving) == BLOCK_BUFFERS:
                add_oldest()
            contiguous = block.contiguous()
            lease = streamer.lease_block()
            source = contiguous.data_ptr(), contiguous.nbytes, lease.address
            leaving.append(_Leaving(contiguous, lease, device.link.download([source], device.record())))
            del block, contiguous, lease
        while leaving:
            add_oldest()
    finally:
        while leaving:
            with suppress(MemascendError):
                leaving[-1].done.wait()
            leaving.pop()
