"""Bounds of time for code that came with a model."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from memascend.cli.data.bounds import TooSlow, bounded

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_other_alarm() -> Iterator[None]:
    handler, (remaining, interval) = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def test_an_alarm_at_the_end_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timer = signal.setitimer

    def set_late(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        if seconds == 0:
            signal.raise_signal(signal.SIGALRM)
        return set_timer(which, seconds, interval)

    with monkeypatch.context() as patch:
        patch.setattr(signal, "setitimer", set_late)
        with bounded(60, 1 << 40):
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN


def test_the_time_that_is_up_is_told_again() -> None:
    """The exception of the first alarm is lost here, as in a finalizer."""
    with pytest.raises(TooSlow), bounded(0.02, 1 << 40):
        try:
            while True:
                pass
        except TooSlow:
            pass
        while True:
            pass
