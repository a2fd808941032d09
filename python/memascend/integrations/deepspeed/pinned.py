"""DeepSpeed's `pin_memory` operator: page-locked tensors, known to every handle of the process."""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right, insort
from threading import Lock
from typing import TYPE_CHECKING

import torch

from memascend._memascend import HostBuffer
from memascend.errors import PinnedMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE = 4096


class PinnedTensors:
    """The page-locked memory that DeepSpeed has asked for: exactly as many bytes, rounded up to a page of 4096.

    Memory goes back to the system with the last tensor that uses it: `free` before only forgets that it is pinned, so
    that a tensor that is left over does not dangle.
    """

    def __init__(self) -> None:
        """Begin without memory."""
        self._lock = Lock()
        #: First addresses, in order, and the address behind the last byte of each.
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._allocator = "auto"

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            return sum(end - start for start, end in self._ends.items())

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a pinned tensor of `numel` zeros.

        Where the system locks no more memory, ordinary memory takes its place, with a warning once.

        Raises:
            HostMemoryError: there is no memory.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        try:
            buffer = HostBuffer(nbytes, self._allocator, True)
        except PinnedMemoryError as error:
            self._allocator = "pageable"
            warnings.warn(f"memascend: DeepSpeed's buffers are not page-locked from here on: {error}", stacklevel=3)
            buffer = HostBuffer(nbytes, self._allocator, True)
        tensor = torch.frombuffer(buffer, dtype=dtype, count=numel)
        start = tensor.data_ptr()
        with self._lock:
            insort(self._starts, start)
            self._ends[start] = start + nbytes
        # The tensor's storage is the only owner of the buffer.
        weakref.finalize(buffer, self.free, start).atexit = False
        return tensor

    def carve(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Return a tensor for each number of elements and dtype, all in one piece of pinned memory.

        Each begins at a page.
        """
        pages = [-(-numel * dtype.itemsize // _PAGE) for numel, dtype in sizes]
        whole = self.empty(sum(pages) * _PAGE, torch.uint8)
        pieces = whole.split([count * _PAGE for count in pages])
        return [
            piece[: numel * dtype.itemsize].view(dtype) for piece, (numel, dtype) in zip(pieces, sizes, strict=True)
        ]

    def free(self, address: int) -> bool:
        """Forget the pinned memory that begins at `address`; whether there was any."""
        with self._lock:
            if self._ends.pop(address, None) is None:
                return False
            del self._starts[bisect_right(self._starts, address) - 1]
            return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in pinned memory, CUDA's included."""
        if tensor.device.type != "cpu":
            return False
        if torch.cuda.is_available() and tensor.is_pinned():
            return True
        address = tensor.data_ptr()
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            return index >= 0 and address < self._ends[self._starts[index]]


#: Shared by all handles of the process.
PINNED = PinnedTensors()


class PinHandle:
    """`deepspeed.ops.pin_memory`'s `pin_handle`."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned tensor of `num_elem` elements of the example's dtype."""
        return PINNED.empty(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Give a pinned tensor up; False if it is none."""
        return PINNED.free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Give the pinned tensor at `address` up; False if there is none."""
        return PINNED.free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether `buffer` lies in pinned memory."""
        return PINNED.holds(buffer)
