"""Signals that end a run, and those that do not."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import pytest

from memascend.common import interrupts
from memascend.common.interrupts import AGAIN_SECONDS, SIGNALS, Interrupts, uninterrupted
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


class Finalized:
    """Calls a function where Python drops exceptions."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    reported: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", reported.append)
        with Interrupts():
            with pytest.raises(Abandoned):
                Finalized(lambda: signal.raise_signal(signal.SIGINT))
                until = time.monotonic() + 10
                while time.monotonic() < until:
                    time.sleep(0.01)
            Finalized(lambda: 1 // 0)
        assert [type(one.exc_value) for one in reported] == [ZeroDivisionError]
        Finalized(lambda: 1 // 0)
        assert len(reported) == 2, "the hook was put back"


def test_two_signals_in_a_finalizer_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = threading.Timer

    def interrupted(*args: Any) -> threading.Timer:
        monkeypatch.setattr(threading, "Timer", timer)
        signal.raise_signal(signal.SIGTERM)
        return timer(*args)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(threading, "Timer", interrupted)
    with Interrupts(), pytest.raises(Abandoned):
        Finalized(lambda: signal.raise_signal(signal.SIGINT))
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(0.01)


def test_a_signal_in_a_finalizer_is_not_sent_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    late: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: late.append(number))
    try:
        with Interrupts():
            Finalized(lambda: signal.raise_signal(signal.SIGTERM))
        time.sleep(4 * AGAIN_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not late


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


class Alarm(Exception):
    """What a handler raises."""


def test_handlers_of_other_signals_wait_too() -> None:
    def handle(number: int, _: object) -> None:
        calls.append(number)
        raise Alarm(number)

    calls: list[int] = []
    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGRTMIN)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with pytest.raises(Alarm), uninterrupted():
            with uninterrupted():
                for number in numbers:
                    signal.raise_signal(number)
            assert not calls, "the outer block has not ended"
        assert calls == list(numbers), "each is called, though those before it raised"
        assert all(signal.getsignal(number) is handle for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_while_handlers_change_is_not_lost() -> None:
    """Before each line that `uninterrupted` runs: the handler is called once, and later signals wait or raise again."""

    def handle(number: int, _: object) -> None:
        calls.append(number)
        raise Alarm

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        lines += event == "line"
        if event == "line" and lines == at:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    calls: list[int] = []
    lines = at = 0
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        while lines >= at:
            calls.clear()
            lines, at = 0, at + 1
            sys.settrace(trace)
            try:
                with uninterrupted():
                    pass
            except Alarm:
                pass
            finally:
                sys.settrace(None)
            struck = lines >= at
            assert len(calls) == struck, at
            with pytest.raises(Alarm), uninterrupted():
                signal.raise_signal(signal.SIGUSR1)
                assert len(calls) == struck, at
            with pytest.raises(Alarm):
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert at > 50, "it was tried"


def test_a_handler_that_was_never_put_back_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where signal after signal comes while handlers are put back."""

    def handle(number: int, _: object) -> None:
        raise Alarm(number)

    def never_back(number: int, handler: Any) -> Any:
        if number == signal.SIGUSR1 and handler is handle:
            raise Alarm
        return put(number, handler)

    put, before = interrupts._signal.signal, signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(interrupts._signal, "signal", never_back)
            with pytest.raises(Alarm), uninterrupted():
                pass
        assert signal.getsignal(signal.SIGUSR1) is not handle
        with pytest.raises(Alarm):
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Alarm), uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            waited = True
        assert waited
    finally:
        signal.signal(signal.SIGUSR1, before)
