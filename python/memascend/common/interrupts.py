"""Signals: none ends a step in its middle, and in a run the first Ctrl-C, SIGTERM or SIGHUP only asks it to stop."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from memascend.errors import Abandoned

#: The signals that end a run: Ctrl-C, `kill`, and a terminal that was closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: After this time a signal is sent again whose exception was lost.
AGAIN_SECONDS = 0.05
_ALL = tuple(int(number) for number in signal.valid_signals())


class _Deferred:
    """A handler of every signal that Python handles, which keeps signals for the end of a block.

    Once it does not defer any more, it calls the handler in whose place it stands: an exception that strikes while
    handlers are put back leaves none that loses a signal.
    """

    def __init__(self) -> None:
        self.defers = True
        self._previous: dict[int, Any] = {}
        self._signals: list[tuple[int, FrameType | None]] = []

    def replace(self) -> None:
        """Take the place of the handlers."""
        # Not `signal.getsignal`, which makes an enum of each answer.
        for number in _ALL:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                _signal.signal(number, self)

    def restore(self) -> None:
        """Put the handlers back."""
        self.defers = False
        for number in list(self._previous):
            if _signal.getsignal(number) is self:
                _signal.signal(number, self._previous[number])

    def call(self) -> None:
        """Call the handlers of the signals that came, each even if one before it raises."""
        while self._signals:
            number, frame = self._signals.pop(0)
            try:
                self._previous[number](number, frame)
            except BaseException:
                self.call()
                raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.defers:
            self._signals.append((number, frame))
        else:
            self._previous[number](number, frame)


#: The handler that defers signals now, in the main thread.
_deferring: _Deferred | None = None


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the handlers of all signals, Ctrl-C's among them, until the end of the block: any of them may raise."""
    global _deferring
    if threading.current_thread() is not threading.main_thread() or _deferring is not None:
        yield
        return
    deferred = _Deferred()
    try:
        _deferring = deferred
        deferred.replace()
        yield
    finally:
        _deferring = None
        try:
            deferred.restore()
        except BaseException:  # a signal's that came in between: the handlers that are left are put back all the same
            deferred.restore()
            raise
        finally:
            deferred.call()


class Interrupts:
    """Handlers of `SIGNALS`: in a `graceful` run the first one asks it to end, the next abandons it.

    A signal that strikes in a finalizer, where Python reports exceptions and drops them, is sent again.

    A SIGHUP that the process was started to ignore (`nohup`) stays ignored. Where the terminal is gone, later output is
    dropped, so that the run can still end as asked.
    """

    def __init__(
        self, end: str = "writing the model so far", *, speaks: bool = True, patience_seconds: float = 0.0
    ) -> None:
        """Begin without a request, and not `graceful`: the first signal abandons the run.

        Args:
            end: the work after the step that a graceful run finishes, in words.
            speaks: whether this process says so.
            patience_seconds: how long the same request may come again: a launcher forwards a terminal's signal to its
                processes, each of which has it already.
        """
        self._end, self._speaks, self._patience = end, speaks, patience_seconds
        self._asked_at = 0.0
        self.asked: int | None = None
        self.graceful = False
        self.closing = False  # while it cleans up, signals are ignored
        self._previous: dict[int, Any] = {}
        self._hook: Any = None
        self._again: threading.Timer | None = None

    def __enter__(self) -> Interrupts:
        """Replace the handlers, in the main thread only: Python allows it in no other."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._hook is not None:
            sys.unraisablehook = self._hook
        self._forget()  # The run has ended: other handlers would end the process.

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

    def _send_again(self, unraisable: Any) -> None:
        """Send a signal again whose exception is dropped; report other exceptions as before.

        From another thread: here, within the finalizer, its exception would be dropped again.
        """
        if not isinstance(unraisable.exc_value, Abandoned):
            self._hook(unraisable)
            return
        main, number = threading.main_thread().ident, unraisable.exc_value.signal_number
        with uninterrupted():  # The exception of another signal would be dropped here, with this one.
            self._forget()
            self._again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main, number))
            self._again.daemon = True
            self._again.start()

    def _forget(self) -> None:
        if self._again is not None:
            self._again.cancel()


def _leave_closed_terminal() -> None:
    """Point standard output and error at nothing where their terminal was closed: each write would fail (EIO)."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")  # A terminal that is gone fails this too; a pipe or file takes nothing.
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream)
            os.close(nothing)
