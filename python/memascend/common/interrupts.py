"""Ctrl-C and SIGTERM: unfinished work is cleaned up, and in a run the first signal is only a request to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memascend.errors import Abandoned


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C, and SIGTERM where it is handled, until the end of the block."""
    deferred: list[tuple[int, FrameType | None]] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for handled in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(handled)
            if callable(handler):
                previous[handled] = handler
                signal.signal(handled, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number, frame in deferred:
            previous[number](number, frame)


class Interrupts:
    """Handlers of Ctrl-C and SIGTERM: in a `graceful` run the first signal asks it to end, the next abandons it."""

    def __init__(self, end: str = "writing the model so far") -> None:
        """Begin without a request, and not `graceful`: the first signal abandons the run.

        `end` says what follows the step that a graceful run finishes.
        """
        self._end = end
        self.asked: int | None = None
        self.graceful = False
        self.closing = False  # while it cleans up, signals are ignored
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Replace the handlers, in the main thread only: Python allows it in no other."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.graceful and self.asked is None:
            self.asked = number
            # os.write: a handler may run inside a print of the code it interrupts
            with contextlib.suppress(OSError):  # standard error is closed
                os.write(2, f"\nmemascend: finishing this step, then {self._end}; again to abandon it\n".encode())
            return
        raise Abandoned(number)
