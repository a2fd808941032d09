"""Bounds of time and memory for code that came with a model: chat templates, which can loop and multiply.

The signal of the timer reaches the main thread alone, between two steps of Python; one step that takes long by itself,
as a power of numbers does, is refused before (`templates.refuse_powers`).
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS_MAX = 10.0
ROOM_BYTES = 256 << 20
_PAGE_BYTES = resource.getpagesize()


class TooSlow(Exception):
    """The time is up."""


@contextmanager
def bounded(seconds: float = SECONDS_MAX, room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """Run a block of Python with at most so much time and so much more memory.

    Raises TooSlow, or MemoryError: the addresses of the whole process are bounded, so do nothing else meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    limit = used + room_bytes if soft == resource.RLIM_INFINITY else min(soft, used + room_bytes)
    with _timed(seconds):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if not is_over:  # One that strikes below would leave the timer, which goes on.
            raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: Python drops the exception of a handler that strikes in a finalizer.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)  # An outer timer goes on a little late.
        signal.signal(signal.SIGALRM, before)
