"""Signals that end a run, and those that do not."""

from __future__ import annotations

import signal

import pytest

from memascend.common.interrupts import SIGNALS, Interrupts, uninterrupted
from memascend.errors import Abandoned


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_abandons(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.graceful = True
        signal.raise_signal(number)
        assert interrupts.asked == number
        with pytest.raises(Abandoned):
            signal.raise_signal(number)
        with pytest.raises(Abandoned), uninterrupted():
            signal.raise_signal(number)
            work_done = True
        assert work_done, "it was put off to the end of the block"
    assert signal.getsignal(number) == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.graceful = True
            signal.raise_signal(signal.SIGHUP)
            with uninterrupted():
                signal.raise_signal(signal.SIGHUP)
            assert interrupts.asked is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
