"""The exceptions of memascend. All derive from MemascendError; most also from the builtin they refine."""

from os import PathLike, fspath


class MemascendError(RuntimeError):
    """Root of every error that memascend raises on purpose."""


class StoreError(MemascendError, OSError):
    """The store's drive, directory or files failed.

    `errno` is set where the system gave one, and what is known of the rest: `filename` (the file, directory or device),
    `operation` ("read" or "write"), `offset` and `length` (bytes) of a transfer, and `hint`, what to do about it ("" if
    nothing is known).
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
        """Keep what is known beside a message that is already complete."""
        # Not super(): RuntimeError comes first and would leave `errno` unset.
        OSError.__init__(self, errno, message)
        self.message = message
        self.filename = None if filename is None else fspath(filename)
        self.operation, self.offset, self.length, self.hint = operation, offset, length, hint

    def __str__(self) -> str:
        """Return the message alone: it names the path and says what the system said."""
        return self.message


class HostMemoryError(MemascendError, MemoryError):
    """Host memory could not be reserved or locked."""


class PinnedMemoryError(HostMemoryError):
    """The system page-locks less memory than was asked for, or none."""


class DeviceError(MemascendError):
    """A CUDA device, its driver or its memory is missing, or failed."""


class BudgetError(MemascendError, ValueError):
    """A budget of host or device memory cannot hold what the model needs; `smallest_bytes` can."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        """Keep the smallest budget that works, in bytes."""
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class CheckpointError(MemascendError, ValueError):
    """A model directory or a safetensors file is not what it should be."""


class DataError(MemascendError, ValueError):
    """The data or an option of a command cannot be used for what was asked."""


class UnmeasuredError(MemascendError, ValueError):
    """A rate that a prediction needs was neither measured nor given."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type's name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
