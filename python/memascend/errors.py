"""The exceptions of memascend. All derive from MemascendError; most also from the builtin they refine."""


class MemascendError(RuntimeError):
    """Root of every error that memascend raises on purpose."""


class StoreError(MemascendError, OSError):
    """The store's drive, directory or files failed; `errno` is set where the system gave one."""

    def __init__(self, errno: int | None, message: str) -> None:
        """Keep the errno of the system beside a message that is already complete."""
        # Not super(): RuntimeError comes first and would leave `errno` unset.
        OSError.__init__(self, errno, message)
        self.message = message

    def __str__(self) -> str:
        """Return the message alone: it names the path and says what the system said."""
        return self.message


class HostMemoryError(MemascendError, MemoryError):
    """Host memory could not be reserved or locked."""


class BudgetError(MemascendError, ValueError):
    """The host memory budget cannot hold what the model needs; `smallest_bytes` can."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        """Keep the smallest budget that works, in bytes."""
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class CheckpointError(MemascendError, ValueError):
    """A model directory or a safetensors file is not what it should be."""
