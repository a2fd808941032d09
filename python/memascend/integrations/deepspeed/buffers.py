"""Buffers of exactly the sizes that DeepSpeed's swappers ask for, page-locked when they are first needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.integrations.deepspeed.files import AioHandle
from memascend.integrations.deepspeed.pinned import PINNED

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes of a part in which casts are written.
_CAST_BYTES = 4 << 20


class BufferPool:
    """Buffers in size classes: one class for each number of elements that is asked for.

    A buffer that is returned serves the next request of its class. So a class holds as many as were ever in use at the
    same time, and the pool as much as the tensors that were present together, in place of that many of the largest.
    Beyond `limit_bytes` free buffers of other classes are freed for a new one. A buffer in use is never refused.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Begin without buffers."""
        self.dtype = dtype
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}
        #: Bytes of all buffers, and the plan's bytes for them.
        self.nbytes = 0
        self.limit_bytes: int | None = None

    def lend(self, numel: int) -> torch.Tensor:
        """Return a buffer of `numel` elements, with anything in it."""
        free = self._free.get(numel)
        if free:
            buffer = free.pop()
        else:
            self._make_room(numel * self.dtype.itemsize)
            buffer = PINNED.empty(numel, self.dtype)
            self.nbytes += buffer.nbytes
        self._lent[buffer.data_ptr()] = buffer
        return buffer

    def take_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; it is the one that was lent, or begins where that one does."""
        lent = self._lent.pop(buffer.data_ptr())
        self._free.setdefault(lent.numel(), []).append(lent)

    def _make_room(self, nbytes: int) -> None:
        if self.limit_bytes is None:
            return
        for numel in sorted(self._free, reverse=True):
            while self._free[numel] and self.nbytes + nbytes > self.limit_bytes:
                self.nbytes -= self._free[numel].pop().nbytes


class StateBuffers:
    """In place of `SwapBufferManager`, which allocates `count` buffers of the largest size at once.

    These are allocated when they are needed, of the size that is needed. A returned one is kept for the next request
    unless `keep` is false.
    """

    #: Whether buffers that are returned stay allocated.
    keep = True

    def __init__(self, num_elems: int, count: int, dtype: torch.dtype, aio_handle: Any) -> None:
        """Promise `count` buffers of up to `num_elems` elements."""
        self.num_elems, self.count, self.dtype = num_elems, count, dtype
        self._free: list[torch.Tensor] = []
        self._used: dict[int, torch.Tensor] = {}
        self.gigabytes = dtype.itemsize * num_elems * count / (1 << 30)

    def allocate(self, num_elems: int, count: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """Return `count` buffers of `num_elems` elements, or None if fewer are left."""
        if dtype != self.dtype or num_elems > self.num_elems:
            raise ValueError(f"buffers are of up to {self.num_elems} {self.dtype}, not {num_elems} {dtype}")
        if count > self.count - len(self._used):
            return None
        buffers = []
        for _ in range(count):
            whole = self._take(num_elems)
            buffer = whole.narrow(0, 0, num_elems)
            self._used[id(buffer)] = whole
            buffers.append(buffer)
        return buffers

    def allocate_all(self, num_elems: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        """Return as many buffers as are left."""
        return self.allocate(num_elems, self.count - len(self._used), dtype)

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take buffers back, the objects that `allocate` has returned."""
        for buffer in buffers:
            whole = self._used.pop(id(buffer))
            if self.keep:
                self._free.append(whole)

    def _take(self, num_elems: int) -> torch.Tensor:
        fitting = [buffer for buffer in self._free if buffer.numel() >= num_elems]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        # One that is too small makes room for one that is large enough.
        if self._free and len(self._free) + len(self._used) >= self.count:
            self._free.pop(0)
        return PINNED.empty(num_elems, self.dtype)


class CastWriter:
    """Writes tensors to files in another dtype, through two small buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Write `dtype`."""
        self._numel = _CAST_BYTES // dtype.itemsize
        self._dtype = dtype
        self._slots: list[tuple[torch.Tensor, AioHandle]] = []
        self._turn = 0

    @torch.no_grad()
    def write(self, source: torch.Tensor, filename: str, offset: int = 0) -> None:
        """Start to write a flat tensor to byte `offset` of a file; it may change when this returns."""
        for part in source.split(self._numel):
            buffer, handle = self._next()
            buffer = buffer.narrow(0, 0, part.numel())
            buffer.copy_(part)
            handle.async_pwrite(buffer, filename, offset)
            offset += buffer.nbytes

    def wait(self) -> None:
        """Wait until all is written; raises the first error."""
        for _, handle in self._slots:
            handle.wait()

    def _next(self) -> tuple[torch.Tensor, AioHandle]:
        if not self._slots:
            self._slots = [(PINNED.empty(self._numel, self._dtype), AioHandle()) for _ in range(2)]
        self._turn ^= 1
        slot = self._slots[self._turn]
        slot[1].wait()
        return slot
