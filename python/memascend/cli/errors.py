"""How the command ends: exit codes, and errors as one line on standard error."""

from __future__ import annotations

import errno
import sys

from memascend.errors import (
    BudgetError,
    CheckpointError,
    DataError,
    DeviceError,
    MemascendError,
    OutputError,
    StoreError,
    UnmeasuredError,
    system_line,
)

#: Errors that a standard stream gives where its drive is full, or it was closed.
_OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
FAILED, BAD_INPUT, SIGNALLED = 1, 2, 128  # exit codes; a signal's number is added to the last


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    text = str(error).strip() or type(error).__name__
    for note in getattr(error, "__notes__", ()):
        text += f"\n{note}"
    bad_input = (BudgetError, CheckpointError, DeviceError, StoreError, DataError, OutputError, UnmeasuredError)
    if isinstance(error, bad_input):
        return BAD_INPUT, text
    if isinstance(error, MemascendError):
        return FAILED, text
    if isinstance(error, ImportError):
        return FAILED, f"{text}: install what the command line needs with `pip install 'memascend[cli]'`"
    if isinstance(error, MemoryError):
        return FAILED, f"out of memory: {text}"
    if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, of a device
        return FAILED, text
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return FAILED, "the reader of this command's output has closed it"
    if isinstance(error, OSError):
        # Without a path it is a standard stream: files are written by functions that name them.
        what = "standard output or input" if error.filename is None and error.errno in _OF_STREAMS else None
        return FAILED, system_line(error, what)
    first = text.splitlines()[0]
    return FAILED, f"unexpected {type(error).__name__}: {first} (MEMASCEND_TRACEBACK=1 shows where)"


def tell(message: str) -> None:
    """Print one line on standard error, under the command's name."""
    print(f"memascend: {message}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Print one line that the user should know of, on standard error."""
    tell(f"note: {message}")
