"""Where a step's time goes: counters on a clock that the test turns, and names in a real profiler's trace."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from memascend.common.timeline import COMPUTE, KINDS, Timeline, describe, noted, span

pytestmark = pytest.mark.core


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys((*KINDS, COMPUTE), 0.0) | seconds


# ---- counters -----------------------------------------------------------------------------------------------


def test_waits_are_counted_by_kind_and_the_rest_is_compute(clock: Clock) -> None:
    timeline = Timeline(clock)
    for kind, seconds in zip(KINDS, (1, 2, 4, 8, 16), strict=True):
        clock.sleep(0.5)
        for _ in range(2):
            with timeline.waiting(kind):
                clock.sleep(seconds)
    clock.sleep(0.25)
    lap = timeline.lap()
    assert lap == spent(ssd_read=2, ssd_write=4, h2d=8, d2h=16, cpu_update=32, compute=2.75)


def test_laps_begin_where_the_last_one_ended(clock: Clock) -> None:
    timeline = Timeline(clock)
    clock.sleep(1)
    assert timeline.lap() == spent(compute=1)
    assert timeline.lap() == spent()
    with timeline.waiting("ssd_write"):
        clock.sleep(2)
        # One that ends inside a wait has the part before.
        assert timeline.lap() == spent(ssd_write=2)
        clock.sleep(3)
    assert timeline.lap() == spent(ssd_write=3)
    assert timeline.seconds() == spent(ssd_write=5, compute=1)
    assert timeline.lap() == spent()


def test_a_wait_inside_another_counts_as_its_own(clock: Clock) -> None:
    timeline = Timeline(clock)
    with timeline.waiting("cpu_update"):
        clock.sleep(1)
        with timeline.waiting("ssd_read"):
            clock.sleep(2)
            with timeline.waiting("ssd_read"):
                clock.sleep(4)
        clock.sleep(8)
    clock.sleep(16)
    assert timeline.lap() == spent(cpu_update=9, ssd_read=6, compute=16)


def test_a_wait_that_fails_ends(clock: Clock) -> None:
    timeline = Timeline(clock)
    with pytest.raises(OSError, match="gone"), timeline.waiting("ssd_read"):
        clock.sleep(1)
        raise OSError("gone")
    clock.sleep(2)
    assert timeline.lap() == spent(ssd_read=1, compute=2)
    with pytest.raises(KeyError):
        timeline.waiting("tape")


def test_waits_that_overlap_are_counted_once(clock: Clock) -> None:
    timeline = Timeline(clock)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with timeline.waiting("d2h"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with timeline.waiting("ssd_read"):
        clock.sleep(1)
        thread.start()
        entered.wait()
        clock.sleep(2)
    clock.sleep(4)
    leave.set()
    thread.join()
    clock.sleep(8)
    lap = timeline.lap()
    assert sum(lap.values()) == 15
    assert (lap["ssd_read"] + lap["d2h"], lap[COMPUTE]) == (7, 8)


def test_the_sum_is_the_time_that_passed() -> None:
    began = time.perf_counter()
    timeline = Timeline()
    inside = time.perf_counter()
    with timeline.waiting("ssd_read"):
        time.sleep(0.02)
    slept = time.perf_counter() - inside
    lap = timeline.lap()
    assert 0.02 <= lap["ssd_read"] <= slept
    assert sum(lap.values()) <= time.perf_counter() - began


# ---- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lap", "text"),
    [
        (spent(ssd_read=0.744, compute=0.456), "1.2 s/step, bound by SSD read (0.74 s)"),
        (spent(h2d=12.04, d2h=1, compute=7), "20.0 s/step, bound by H2D (12.0 s)"),
        (spent(cpu_update=0.01, compute=0.03), "0.04 s/step, bound by compute (0.03 s)"),
        (spent(ssd_write=0.5, ssd_read=0.4, compute=0.3), "1.2 s/step, bound by SSD write (0.5 s)"),
    ],
)
def test_what_binds_is_named(lap: dict[str, float], text: str) -> None:
    assert describe(lap) == text


def test_a_lap_of_no_time_has_a_text(clock: Clock) -> None:
    assert describe(Timeline(clock).lap()).startswith("0 s/step, bound by ")


# ---- names for profilers ------------------------------------------------------------------------------------


def test_names_appear_in_a_trace(clock: Clock) -> None:
    timeline, seen = Timeline(clock), []

    def hook(_: torch.Tensor) -> None:
        with span("gradient"):
            seen.append(True)

    weight = torch.ones(4, requires_grad=True)
    weight.register_post_accumulate_grad_hook(hook)
    # PyTorch 2.11 warns that it clears events between cycles, unless they accumulate.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        with span("forward {braces}"):
            loss = (weight * 2).sum()
        loss.backward()
        with timeline.waiting("ssd_read"):
            clock.sleep(1)
    with span("after it"), timeline.waiting("d2h"):
        pass
    assert seen
    events = {event.name: event for event in profiler.events()}
    names = {name for name in events if name.startswith("memascend")}
    assert names == {"memascend: forward {braces}", "memascend: gradient", "memascend: wait for SSD read"}
    inside = {child.name for child in events["memascend: forward {braces}"].cpu_children}
    assert "aten::mul" in inside


def test_cuda_gets_ranges_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: its ranges are calls that need one, and are written down instead."""
    calls: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(None))
    with span("outer"), pytest.raises(ValueError), span("inner"):
        raise ValueError
    assert calls == ["memascend: outer", "memascend: inner", None, None]
    calls.clear()
    with Timeline().waiting("h2d"):
        pass
    assert calls == ["memascend: wait for H2D", None]


def test_unseen_spans_cost_nothing() -> None:
    assert span("a") is span("b"), "without a profiler all spans are one"


def test_spans_are_noted_while_that_is_asked_for() -> None:
    before = time.perf_counter_ns()
    with noted() as notes:
        with span("outer"), Timeline().waiting("ssd_read"):
            pass
        with pytest.raises(ValueError), span("failing"):
            raise ValueError
    with span("after"):
        pass
    assert [name for name, *_ in notes] == ["wait for SSD read", "outer", "failing"]
    (_, waited, waited_until, thread), (_, began, ended, _), _ = notes
    assert before <= began <= waited <= waited_until <= ended and thread == threading.get_ident()
