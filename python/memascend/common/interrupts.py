"""Ctrl-C, SIGTERM and SIGHUP: unfinished work is cleaned up; in a run the first signal is only a request to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memascend.errors import Abandoned

#: What ends a run: Ctrl-C, `kill`, and a terminal that was closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C, and SIGTERM and SIGHUP where they are handled, until the end of the block."""
    deferred: list[tuple[int, FrameType | None]] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for handled in SIGNALS:
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
    """Handlers of `SIGNALS`: in a `graceful` run the first one asks it to end, the next abandons it.

    A SIGHUP that the process was started to ignore (`nohup`) stays ignored. Where the terminal is gone, what is printed
    from then on goes nowhere, so that the run can still end as asked.
    """

    def __init__(
        self, end: str = "writing the model so far", *, speaks: bool = True, patience_seconds: float = 0.0
    ) -> None:
        """Begin without a request, and not `graceful`: the first signal abandons the run.

        Args:
            end: what follows the step that a graceful run finishes.
            speaks: whether this process says so.
            patience_seconds: how long the same request may come again: a launcher forwards what a terminal sends to
                each of its processes too.
        """
        self._end, self._speaks, self._patience = end, speaks, patience_seconds
        self._asked_at = 0.0
        self.asked: int | None = None
        self.graceful = False
        self.closing = False  # while it cleans up, signals are ignored
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Replace the handlers, in the main thread only: Python allows it in no other."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if self.closing:
            return
        if self.asked is not None and time.monotonic() - self._asked_at < self._patience:
            return
        if self.graceful and self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            if not self._speaks:
                return
            # os.write: a handler may run inside a print of the code it interrupts
            with contextlib.suppress(OSError):  # standard error is closed
                os.write(2, f"\nmemascend: finishing this step, then {self._end}; again to abandon it\n".encode())
            return
        raise Abandoned(number)


def _leave_closed_terminal() -> None:
    """Point standard output and error at nothing where their terminal was closed: each write would fail (EIO)."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")  # A terminal that is gone fails this too; a pipe or file takes nothing.
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream)
            os.close(nothing)
