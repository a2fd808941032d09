"""The exceptions of memascend: all but Abandoned derive from MemascendError, most also from the builtin they refine."""

import errno
from os import PathLike, fsdecode, fspath
from typing import Any


class MemascendError(RuntimeError):
    """Root of every error that memascend raises on purpose."""


class StoreError(MemascendError, OSError):
    """The store's drive, directory or files failed.

    `errno` is set where the system gave one. Other attributes are None where they are unknown: `filename` (the file,
    directory or device), `operation` ("read" or "write"), `offset` and `length` (bytes) of a transfer. `hint` is the
    remedy ("" if none is known).
    """

    def __init__(
        self,
        errno: int | None,
        message: str,
        filename: str | PathLike[str] | None = None,
        operation: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        hint: str = "",
    ) -> None:
        """Take the complete message and the attributes that are known."""
        # Not super(): RuntimeError comes first and would leave `errno` unset.
        OSError.__init__(self, errno, message)
        self.message = message
        self.filename = None if filename is None else fspath(filename)
        self.operation, self.offset, self.length, self.hint = operation, offset, length, hint

    def __str__(self) -> str:
        """Return the message alone: it names the path and repeats the system's own text."""
        return self.message


class HostMemoryError(MemascendError, MemoryError):
    """Host memory could not be reserved or locked."""


class PinnedMemoryError(HostMemoryError):
    """The system page-locks less memory than was asked for, or none."""


class DeviceError(MemascendError):
    """A CUDA device, its driver or its memory is missing, or failed."""


class RankError(MemascendError):
    """The ranks of a group did different things, or one of them does not answer any more."""


class BudgetError(MemascendError, ValueError):
    """A budget of host or device memory is too small for the model; `smallest_bytes` is enough."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        """Take the message and the smallest budget that works, in bytes."""
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class CheckpointError(MemascendError, ValueError):
    """A model directory, a safetensors file or a checkpoint is damaged, incomplete or of another model."""


class DataError(MemascendError, ValueError):
    """The text given cannot be trained on, or an option does not fit the data or the model."""


class OutputError(MemascendError, OSError):
    """The output cannot be written to the path given."""


class UnmeasuredError(MemascendError, ValueError):
    """A forecast needs a rate of this machine that was neither measured nor given."""


class NonFiniteError(MemascendError):
    """The loss or the gradient norm became NaN or infinite."""


class DefectError(MemascendError):
    """A defect of memascend itself: its native code has panicked, in this call or before it.

    Models that were open in the process can only be closed. Each store has the last step that was committed.
    """

    def __init__(self, what: str) -> None:
        """Take the message of the panic, and where it was."""
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        """Return the message: the cause, the state of open models, and how to report it."""
        return (
            f"a defect of memascend: {self.what}. What is open cannot be used any more, and nothing more is committed; "
            "the last committed step of each store is whole: close the model (memascend.close) or end the process, and "
            "go on from there (memascend.resume). Please report this message and what the program did at "
            "https://github.com/memascend/memascend/issues (RUST_BACKTRACE=1 has standard error show the native calls)"
        )


class Abandoned(KeyboardInterrupt):
    """The user gave up on the run: unfinished output is removed."""

    def __init__(self, signal_number: int) -> None:
        """Store the number of the signal, for the exit code."""
        super().__init__(signal_number)
        self.signal_number = signal_number


#: The error of a forked child that uses a model of its parent.
FORKED = (
    "this process was forked from the one that offloaded the model, which alone has its memory, its threads and its "
    "store: read what a DataLoader's worker or another child needs before the fork (weight.detach().clone()), use "
    "num_workers=0, or have the child open a model of its own"
)


def closed_error(runtime: Any, message: str) -> MemascendError:
    """Return the error of using a closed runtime, which says `message`, or that the process is a forked child."""
    return MemascendError(FORKED if runtime.forked else message)


#: The remedy for a store that another program has changed.
INCOMPLETE = "the store is not as a run left it; restore it from a copy, or begin the run anew"


#: The remedy for an error of the system, by its number.
_SYSTEM_REMEDIES = {
    errno.EACCES: "this user may not: change its permissions, or choose another place",
    errno.EPERM: "this user may not: change its permissions, or choose another place",
    errno.ENOENT: "make it first, or choose another place",
    errno.ENOTDIR: "give a path below a directory",
    errno.EISDIR: "give a path of a file",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free space there, or choose another place",
    errno.EDQUOT: "free space there, or choose another place",
    errno.EROFS: "choose another place, or mount it for writing",
    errno.EFBIG: "this process may write no larger files: see `ulimit -f`",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ELOOP: "a link there leads to itself",
}


def system_line(error: OSError, path: str | PathLike[str] | None = None) -> str:
    """Return the message of an error of the system with its path and a remedy, without its number.

    Args:
        error: any OSError.
        path: of the file or directory, where the system gave none.
    """
    if error.errno is None or error.strerror is None:
        return str(error).strip() or type(error).__name__
    named = error.filename if path is None else fspath(path)
    where = "" if named is None else f"{named if isinstance(named, int) else fsdecode(named)}: "
    remedy = _SYSTEM_REMEDIES.get(error.errno)
    return f"{where}{error.strerror}{f' ({remedy})' if remedy else ''}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where the message is empty.

    A line that ends in a colon comes with the next one.
    """
    if isinstance(error, OSError) and not isinstance(error, MemascendError):
        return system_line(error)
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first


def stale(subject: str) -> str:
    """Say that weights changed between a forward pass and its backward pass."""
    return (
        f"{subject} changed since the forward pass whose gradients were asked for: call backward() before "
        "optimizer.step(), or run the forward pass again"
    )
