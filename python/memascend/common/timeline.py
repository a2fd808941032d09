"""Where a step's time goes: seconds blocked on each part of the machine, and names for the profilers.

One thread at a time drives a step: the caller's, or, in the backward pass on a device, autograd's, for which the caller
waits. The time in which that thread is blocked on none of `KINDS` is "compute".

On the CPU this is the arithmetic, with the Python around it. A device computes while the host continues, and its time
appears where the host next waits: for a value, as in `loss.item()`, which is "compute" too, or for a copy that comes
after the computation. To separate the two, the host waits twice: first, outside of `waiting`, for the event that the
copy itself waits for, then, inside, for the copy.

    event.wait()                       # the device still computes with the buffer: "compute"
    with timeline.waiting("h2d"):
        arrived.wait()                 # only the copy is left

So nothing is measured on the device, and no wait is added.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

#: The operations on which the thread that drives a step can be blocked, with their names on the
#: screen.
KINDS = {
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
    "h2d": "H2D",
    "d2h": "D2H",
    "cpu_update": "CPU update",
}
#: The rest of a step's time.
COMPUTE = "compute"

_WAITS = {kind: f"wait for {shown}" for kind, shown in KINDS.items()}
_NOTHING = nullcontext()

#: (name, nanoseconds of `time.perf_counter_ns` at its begin and its end, number of the thread) of one span.
Noted = tuple[str, int, int, int]
#: Where spans are noted, while `noted` is in use.
_notes: list[Noted] | None = None


class Timeline:
    """Seconds by kind, of one offloaded model.

    Waits that overlap in two threads are counted once, under the kind of the wait that began last.

    A fetch that carries updates reads, computes and writes at once. Of the wait for such a fetch, "cpu_update" is at
    most the time for which the update kernels ran; the remainder is "ssd_read".
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, updating: Callable[[], float] | None = None
    ) -> None:
        """Count from now on; `clock` gives nanoseconds, `updating` the seconds for which update kernels have run."""
        self._clock = clock
        self._updating = updating
        self._lapped_updating = 0.0 if updating is None else updating()
        self._spent_ns = dict.fromkeys((*KINDS, COMPUTE), 0)
        self._lapped_ns = dict(self._spent_ns)
        #: The kinds of the waits under way, the innermost last.
        self._kinds = [COMPUTE]
        self._since_ns = clock()

    def _count(self) -> None:
        now = self._clock()
        self._spent_ns[self._kinds[-1]] += now - self._since_ns
        self._since_ns = now

    def waiting(self, kind: str) -> _Wait:
        """Count the time until the end of the `with` under one of `KINDS`; a wait inside counts as its own."""
        return _Wait(self, kind)

    def computing_ns(self) -> int:
        """Return the nanoseconds of `COMPUTE` since the beginning."""
        self._count()
        return self._spent_ns[COMPUTE]

    def seconds(self) -> dict[str, float]:
        """Return the seconds by kind since the beginning, `COMPUTE` among them; their sum is all the time since."""
        self._count()
        updating = None if self._updating is None else self._updating()
        return _divide({kind: spent / 1e9 for kind, spent in self._spent_ns.items()}, updating)

    def lap(self) -> dict[str, float]:
        """Return seconds by kind since the last lap: a step's, if called after each step."""
        self._count()
        lap = {kind: (spent - self._lapped_ns[kind]) / 1e9 for kind, spent in self._spent_ns.items()}
        self._lapped_ns = dict(self._spent_ns)
        if self._updating is None:
            return lap
        before, self._lapped_updating = self._lapped_updating, self._updating()
        return _divide(lap, self._lapped_updating - before)


def _divide(seconds: dict[str, float], updating: float | None) -> dict[str, float]:
    """Divide the waits for fetches with updates between the kernels and the SSD."""
    if updating is not None:
        beyond = max(0.0, seconds["cpu_update"] - updating)
        seconds["cpu_update"] -= beyond
        seconds["ssd_read"] += beyond
    return seconds


class _Wait:
    """The context of one wait. A generator would take longer, and every tensor has several waits."""

    __slots__ = ("_kind", "_span", "_timeline")

    def __init__(self, timeline: Timeline, kind: str) -> None:
        self._timeline, self._kind = timeline, kind
        self._span = span(_WAITS[kind])

    def __enter__(self) -> None:
        self._timeline._count()
        self._timeline._kinds.append(self._kind)
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        self._timeline._count()
        self._timeline._kinds.pop()


def describe(lap: Mapping[str, float]) -> str:
    """Return a step's lap for the progress line: "1.2 s/step, bound by SSD read (0.7 s)"."""
    kind = max(lap, key=lambda kind: lap[kind])
    return f"{_rounded(sum(lap.values()))} s/step, bound by {_shown(kind)} ({_rounded(lap[kind])} s)"


def _shown(kind: str) -> str:
    return KINDS.get(kind, kind)


def _rounded(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def span(name: str) -> AbstractContextManager[Any]:
    """Name the block for profilers: with an NVTX range where CUDA is in use, and for `torch.profiler` where it runs.

    Profilers show "memascend: " and the name. Without a profiler the cost is two function calls.
    """
    if _notes is not None:
        return _noted(name, _notes)
    import torch  # Readers of a run's figures need the names here, and not PyTorch.

    nvtx, profiled = torch.cuda.is_initialized(), torch._C._autograd._profiler_enabled()
    return _named(f"memascend: {name}", nvtx, profiled) if nvtx or profiled else _NOTHING


@contextmanager
def noted() -> Iterator[list[Noted]]:
    """Note every span of this process that ends until the end of the `with`, in the list that is returned."""
    global _notes
    notes: list[Noted] = []
    _notes = notes
    try:
        yield notes
    finally:
        _notes = None


@contextmanager
def _noted(name: str, notes: list[Noted]) -> Iterator[None]:
    began = time.perf_counter_ns()
    try:
        yield
    finally:
        notes.append((name, began, time.perf_counter_ns(), threading.get_ident()))


@contextmanager
def _named(name: str, nvtx: bool, profiled: bool) -> Iterator[None]:
    import torch

    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name) if profiled else _NOTHING:
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
