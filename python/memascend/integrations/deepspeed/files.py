"""DeepSpeed's `async_io` operator: tensors to and from files, through one ring for the whole process."""

from __future__ import annotations

import os
import warnings
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import FileEngine, FileTransfers
from memascend.errors import StoreError
from memascend.integrations.deepspeed.pinned import PinHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    Path = str | os.PathLike[str]

#: Offsets and lengths that DeepSpeed rounds to, for each part of a request.
ALIGNMENT = 512

_engine_lock = Lock()
_engine: tuple[int, FileEngine] | None = None


def engine() -> FileEngine:
    """Return the engine of this process; a forked one gets an engine of its own."""
    global _engine
    with _engine_lock:
        if _engine is None or _engine[0] != os.getpid():
            made = FileEngine()
            if made.notice is not None and _engine is None:
                warnings.warn(f"memascend: DeepSpeed's files: {made.notice}", stacklevel=3)
            _engine = (os.getpid(), made)
        return _engine[1]


class AioHandle(PinHandle):
    """`deepspeed.ops.aio`'s `aio_handle`: transfers are started in any number and waited for together.

    The options are kept for callers that ask for them. They change nothing: the engine is shared, keeps up to 128
    transfers in flight and cuts large ones as the drive likes them. A buffer may be any dense tensor, pinned or not,
    on any device, and a file offset any number of bytes. A contiguous tensor in host memory is transferred where it
    lies.

    Transfers run side by side, but none overtakes an earlier one of the same handle that it has bytes of a file in
    common with, unless both read: after a step that was skipped DeepSpeed writes the next gradients behind the last.

    Unlike in DeepSpeed's own operator, a transfer that fails raises, in `wait()` or in the call that waits, after all
    others have ended: a StoreError (an OSError) that names the file and the remedy.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        """Take the options of DeepSpeed's section "aio"."""
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._transfers = FileTransfers(engine())
        self._lock = Lock()
        #: Of each file, the bytes of transfers that may be under way, and whether they are written.
        self._under_way: dict[str, list[tuple[int, int, bool]]] = {}
        #: Transfers that were waited for early, and the first failure of them.
        self._early = 0
        self._failure: StoreError | None = None
        #: Work that remains with bytes that were read, and checks that were asked for.
        self._afterwards: list[Callable[[], None]] = []

    def get_block_size(self) -> int:
        """Return the option."""
        return self._options[0]

    def get_queue_depth(self) -> int:
        """Return the option."""
        return self._options[1]

    def get_single_submit(self) -> bool:
        """Return the option."""
        return self._options[2]

    def get_overlap_events(self) -> bool:
        """Return the option."""
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        """Return the option."""
        return self._options[4]

    def get_alignment(self) -> int:
        """Return the bytes that DeepSpeed rounds buffers to; any number would do."""
        return ALIGNMENT * self._options[4]

    def read(self, buffer: torch.Tensor, filename: Path, validate: bool, file_offset: int = 0) -> int:
        """Read `buffer` from the file and wait; 0."""
        self._read(buffer, filename, file_offset, validate)
        self.wait()
        return 0

    def write(self, buffer: torch.Tensor, filename: Path, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` to the file and wait; 0."""
        self._write(buffer, filename, file_offset, validate)
        self.wait()
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: Path,
        validate: bool,
        asynchronous: bool | None = None,
        file_offset: int = 0,
        **named: bool,
    ) -> int:
        """Read `buffer` from the file. Return 0 at once if the fourth argument, `async`, is true, else `wait()`."""
        at_once = _asynchronous(asynchronous, named)
        self._read(buffer, filename, file_offset, validate)
        return 0 if at_once else self.wait()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: Path,
        validate: bool,
        asynchronous: bool | None = None,
        file_offset: int = 0,
        **named: bool,
    ) -> int:
        """Write `buffer` to the file. Return 0 at once if the fourth argument, `async`, is true, else `wait()`."""
        at_once = _asynchronous(asynchronous, named)
        self._write(buffer, filename, file_offset, validate)
        return 0 if at_once else self.wait()

    def sync_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """Read `buffer` from the file and wait; how many transfers were waited for."""
        self._read(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """Write `buffer` to the file and wait; how many transfers were waited for."""
        self._write(buffer, filename, file_offset)
        return self.wait()

    def async_pread(self, buffer: torch.Tensor, filename: Path, file_offset: int = 0) -> int:
        """Start to read `buffer` from the file; 0."""
        self._read(buffer, filename, file_offset)
        return 0

    def async_pwrite(
        self, buffer: torch.Tensor, filename: Path | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start to write `buffer` to the file, given by its name or by a descriptor that stays open; 0."""
        given = fd if filename is None else filename
        if given is None:
            raise TypeError("async_pwrite needs a filename or fd")
        self._write(buffer, f"/proc/self/fd/{given}" if isinstance(given, int) else given, file_offset)
        return 0

    def wait(self) -> int:
        """Wait until every transfer that was started has ended; how many they were.

        Raises:
            StoreError: the first failure.
        """
        with self._lock:
            self._end()
            count, self._early = self._early, 0
            failure, self._failure = self._failure, None
            afterwards, self._afterwards = self._afterwards, []
        if failure is not None:
            raise failure
        for action in afterwards:
            action()
        return count

    def _read(self, buffer: torch.Tensor, filename: Path, offset: int, validate: bool = False) -> None:
        target = buffer if _is_plain(buffer) else torch.empty(buffer.shape, dtype=buffer.dtype)
        self._start("read", target, filename, offset, validate)
        if target is not buffer:
            self._later(lambda: _copy(target, buffer))

    def _write(self, buffer: torch.Tensor, filename: Path, offset: int, validate: bool = False) -> None:
        source = buffer if _is_plain(buffer) else buffer.detach().cpu().contiguous()
        self._start("write", source, filename, offset, validate)

    def _start(self, operation: str, tensor: torch.Tensor, filename: Path, offset: int, validate: bool) -> None:
        if offset < 0:
            raise ValueError(f"a file offset is not negative: {offset}")
        name, ours = os.fspath(filename), (offset, offset + tensor.nbytes, operation == "write")
        with self._lock:
            if any(_in_order(ours, other) for other in self._under_way.get(name, ())):
                self._end()
            self._under_way.setdefault(name, []).append(ours)
            self._transfers.start(operation, filename, offset, tensor.data_ptr(), tensor.nbytes, tensor)
        if validate:
            self._later(lambda: _compare(tensor, filename, offset))

    def _end(self) -> None:
        """Wait until started transfers have ended; `wait` tells of them."""
        try:
            self._early += self._transfers.wait()
        except StoreError as error:
            self._failure = self._failure or error
        self._under_way.clear()

    def _later(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._afterwards.append(action)


def aio_read(buffer: torch.Tensor, filename: Path, *_: Any) -> int:
    """Read `buffer` from the file and wait; 0."""
    return AioHandle().read(buffer, filename, False)


def aio_write(buffer: torch.Tensor, filename: Path, *_: Any) -> int:
    """Write `buffer` to the file and wait; 0."""
    return AioHandle().write(buffer, filename, False)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` to `dest`; 0."""
    _copy(src, dest)
    return 0


def _asynchronous(given: bool | None, named: dict[str, bool]) -> bool:
    # "async" is a keyword of Python, so that callers can only give it by position or in a dictionary.
    if given is None:
        given = named.pop("async", None)
    if given is None or named:
        raise TypeError(f"pread and pwrite take buffer, filename, validate, async, file_offset; got {sorted(named)}")
    return given


def _in_order(one: tuple[int, int, bool], other: tuple[int, int, bool]) -> bool:
    """Return whether two transfers have bytes in common that one of them writes."""
    return one[0] < other[1] and other[0] < one[1] and (one[2] or other[2])


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


@torch.no_grad()
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _compare(tensor: torch.Tensor, filename: Path, offset: int) -> None:
    """Check that the file holds the bytes of `tensor`."""
    with open(filename, "rb") as file:
        file.seek(offset)
        found = bytearray(file.read(tensor.nbytes))
    expected = tensor.detach().reshape(-1).view(torch.uint8)
    if len(found) != tensor.nbytes or not torch.equal(torch.frombuffer(found, dtype=torch.uint8), expected):
        raise StoreError(None, f"{os.fspath(filename)} does not hold what was transferred at {offset}", filename)
