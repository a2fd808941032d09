"""Masters and moments that stay in memory between steps, in chunks, where `host_memory` has room for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.integrations.deepspeed.files import AioHandle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


@dataclass
class ResidentChunk:
    """A chunk's masters and moments, and the files that they belong to."""

    states: list[torch.Tensor]
    #: The file of each, and the first element of the chunk in all of them.
    paths: list[str]
    start: int
    #: Whether memory holds the newest values, and whether the files do.
    is_current: bool = False
    is_written: bool = True


class KeptStates:
    """The chunks that stay in memory. Files have them only once `write` was called.

    Kept bytes are neither read nor written in a step: 2 bytes less through the SSD for each byte of memory.
    """

    def __init__(self) -> None:
        """Begin without chunks."""
        #: Bytes that may be kept.
        self.room_bytes = 0
        self._chunks: dict[tuple[str, int], ResidentChunk] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(state.nbytes for chunk in self._chunks.values() for state in chunk.states)

    def add(self, name: str, chunk: ResidentChunk) -> None:
        """Keep a chunk of the sub-group of that name from now on."""
        self._chunks[name, chunk.start] = chunk

    def get(self, name: str, start: int) -> ResidentChunk | None:
        """Return the chunk of a sub-group that begins at element `start`, if it is kept."""
        return self._chunks.get((name, start))

    def write(self, name: str | None = None) -> None:
        """Write the bytes that the files of a sub-group, or of all, do not have yet.

        Raises:
            StoreError: a transfer failed; the unwritten bytes are still to be written.
        """
        handle = AioHandle()
        behind = [chunk for chunk in self._of(name) if chunk.is_current and not chunk.is_written]
        for chunk in behind:
            for state, path in zip(chunk.states, chunk.paths, strict=True):
                handle.async_pwrite(state, path, chunk.start * state.itemsize)
        handle.wait()
        for chunk in behind:
            chunk.is_written = True

    def hand_over(self, name: str) -> None:
        """Write the chunks of a sub-group and read them again in the next step: its files may change until then."""
        self.write(name)
        self.forget(name)

    def forget(self, name: str | None = None) -> None:
        """Read the chunks of a sub-group, or all, again in the next step: the files have other values."""
        for chunk in self._of(name):
            chunk.is_current, chunk.is_written = False, True

    def _of(self, name: str | None) -> list[ResidentChunk]:
        return [chunk for (owner, _), chunk in self._chunks.items() if name in (None, owner)]


def spread(nbytes: Sequence[int], room: int) -> Iterable[int]:
    """Yield the indices of chunks that stay within `room`, spread over the step so that the drive is never long idle.

    `nbytes`: of each chunk, in the order of a step.
    """
    share = min(1.0, room / sum(nbytes)) if nbytes else 0.0
    passed = kept = 0
    for index, size in enumerate(nbytes):
        passed += size
        if kept + size <= share * passed:
            kept += size
            yield index
