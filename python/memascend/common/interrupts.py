"""Ctrl-C and SIGTERM: what is unfinished is cleaned up, and in a run the first one is only a request."""

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
    """Put Ctrl-C, and SIGTERM where it is handled, off until the end of the block."""
    came: list[tuple[int, FrameType | None]] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number, frame in came:
            previous[number](number, frame)


class Interrupts:
    """Ctrl-C and SIGTERM: in a `graceful` run the first one only asks it to end; the next one abandons it."""

    def __init__(self) -> None:
        """Nothing asked yet, and nothing to finish."""
        self.asked: int | None = None
        self.graceful = False
        self.closing = False  # cleaning up: signals wait for no one, and nobody listens
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Take over the handlers; only a main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.graceful and self.asked is None:
            self.asked = number
            # os.write: a handler may run inside a print of the code it interrupts
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nmemascend: finishing this step, then writing the model so far; again to abandon it\n")
            return
        raise Abandoned(number)
