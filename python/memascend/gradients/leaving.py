"""Gradients on their way from a device: each lives there until it has been copied."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from memascend.errors import MemascendError

if TYPE_CHECKING:
    import torch

    from memascend._memascend import CudaEvent
    from memascend.common.timeline import Timeline


class DeviceToHostCopy(Protocol):
    """A copy from the device that is under way."""

    def copied(self) -> bool:
        """Return whether the device memory is no longer read."""

    def wait_copied(self) -> None:
        """Wait until the device memory is no longer read."""


class LeavingGradients:
    """Copies under way from a device, the oldest first, and the tensors that must live until each has ended."""

    def __init__(self, timeline: Timeline, most_bytes: int) -> None:
        """Have about `most_bytes` on their way at most while another gradient is made."""
        self.most_bytes = most_bytes
        self._timeline = timeline
        #: The copy, the event at which the gradient is computed, its bytes, and the tensors.
        self._copies: deque[tuple[DeviceToHostCopy, CudaEvent, int, tuple[torch.Tensor, ...]]] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, copy: DeviceToHostCopy, ready: CudaEvent, nbytes: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """Have `tensors` live until a copy of `nbytes` of them, which waits for `ready`, has read them."""
        self._copies.append((copy, ready, nbytes, tensors))
        self._nbytes += nbytes

    def hold(self, copy: DeviceToHostCopy, ready: CudaEvent, tensors: tuple[torch.Tensor, ...]) -> None:
        """Add a copy of all of `tensors`, and wait for earlier copies where too many bytes are on their way."""
        self.add(copy, ready, sum(tensor.nbytes for tensor in tensors), tensors)
        self.drop_copied()

    def drop_copied(self) -> None:
        """Drop the tensors that have been copied. Wait for the oldest while too many bytes are on their way."""
        self._release(self.most_bytes)

    def wait(self) -> None:
        """Wait until nothing is on its way."""
        self._release(-1)

    def _release(self, most_bytes: int) -> None:
        while self._copies:
            copy, ready, nbytes, _ = self._copies[0]
            if not copy.copied():
                if self._nbytes <= most_bytes:
                    return
                ready.wait()
                with self._timeline.waiting("d2h"):
                    copy.wait_copied()
            self._copies.popleft()
            self._nbytes -= nbytes

    def close(self) -> None:
        """Wait until no copy reads the device, even if copies fail."""
        while self._copies:
            with suppress(MemascendError):
                self._copies[0][0].wait_copied()
            self._copies.popleft()
        self._nbytes = 0
