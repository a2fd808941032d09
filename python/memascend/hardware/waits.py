"""How PyTorch's threads wait for each other at the end of a parallel loop: spinning for a while, or asleep at once.

PyTorch's wheels bring GNU's OpenMP (libgomp), whose threads spin for 300,000 rounds, 5 to 10 ms, before they sleep.
Beside other programs a thread that waits spins away the time that the one it waits for would need. libgomp reads
OMP_WAIT_POLICY and GOMP_SPINCOUNT when it is loaded, so that a library imported beside PyTorch comes too late to set
them; but it spins for 100 rounds only while the process has more OpenMP threads than processors (libgomp's manual,
GOMP_SPINCOUNT). `Crowd` makes it so, with threads that sleep, and ends it.

The number of PyTorch's threads never changes while a program runs, since it changes bits: with 3 threads a float32
product of 1,000 rows differs from that of one. How long a thread spins changes none. When to change is decided by the
time that others take of the processors (/proc/stat, steal included, less this process's own), since the kernel's
pressure figures (PSI) count this process's own threads that wait for each other. LLVM's and Intel's OpenMP do not count
threads so; their `kmp_set_blocktime` is of the calling thread alone, so there a variable is left to the user, as
`memascend doctor` says.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.hardware.cgroups import lines_of
from memascend.hardware.neighbours import Neighbours
from memascend.hardware.processors import processors
from memascend.hardware.threads import settings

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often the machine is looked at, and for how long it has to be quiet before threads spin again.
LOOK_SECONDS, QUIET_SECONDS = 0.5, 3.0
#: Share of the processors that others may take before their time counts: the kernel's own threads, and errors of the
#: clocks.
LITTLE = 0.25
#: With these set, the user has decided.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
#: Elements of a sum that PyTorch divides among its threads.
_ELEMENTS = 1 << 17


def library() -> Path | None:
    """Return the file of the OpenMP that PyTorch uses, None where there is none or it cannot be told."""
    try:
        address = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return None
    for line in lines_of("/proc/self/maps"):
        span, *_, name = line.split(maxsplit=5)
        first, _, last = span.partition("-")
        if int(first, 16) <= address < int(last, 16):
            return Path(name)
    return None


def is_gnu(file: Path | None) -> bool:
    """Return whether an OpenMP is GNU's."""
    return file is not None and file.name.startswith("libgomp")


def spin_seconds() -> float:
    """Measure for how long a thread of PyTorch spins before it sleeps, in seconds of processor time.

    Takes a fifth of a second. Other threads of this process have to be idle.
    """
    pauses, values = 10, torch.zeros(_ELEMENTS)
    values.add_(1)
    began = time.process_time()
    for _ in range(pauses):
        values.add_(1)
        time.sleep(0.02)
    return (time.process_time() - began) / pauses / max(1, torch.get_num_threads() - 1)


class Crowd:
    """A team of OpenMP threads that sleep: with it the process has more than processors, so that none spins for long.

    GNU's OpenMP alone counts so. PyTorch computes with as many threads as before, so no bit changes.
    """

    def __init__(self) -> None:
        """Start the team. Raises RuntimeError where the system starts no more threads."""
        self._end, self._here = threading.Event(), threading.Event()
        # libgomp counts the processors of the mask that the process had when it was loaded.
        self._count = (os.cpu_count() or 1) + 1
        self._thread = threading.Thread(target=self._hold, name="memascend-waits", daemon=True)
        self._thread.start()
        self._here.wait()

    def end(self) -> None:
        """End the team's threads, and wait for that."""
        self._end.set()
        self._thread.join()

    def _hold(self) -> None:
        openmp = ctypes.CDLL(None)
        # The team may call any function: only the team has to stay.
        function = ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p)
        parallel = openmp.GOMP_parallel
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        parallel(function, None, self._count, 0)
        self._here.set()
        self._end.wait()  # The team ends with the thread that made it.


class Waits:
    """Chooses how PyTorch's threads wait, by the use of the processors by others, while anything is open."""

    def __init__(self, mode: str, neighbours: Neighbours | None = None) -> None:
        """Choose by `mode`, one of `threads.WAITS`."""
        self.mode = mode
        self.crowd: Crowd | None = None
        self._neighbours = neighbours or Neighbours()
        self._busy_until = 0.0

    def look(self) -> None:
        """Look at the machine, and have threads yield or spin from now on."""
        others, now = self._neighbours.processors(), time.monotonic()
        here, threads = processors(), torch.get_num_threads()
        # A quota of time is spent by spinning, too.
        if threads + others > here.logical + LITTLE or (here.quota is not None and threads >= here.quota):
            self._busy_until = now + QUIET_SECONDS
        yielding = threads > 1 and (self.mode == "yield" or (self.mode == "auto" and now < self._busy_until))
        if yielding and self.crowd is None:
            with suppress(RuntimeError):  # The system starts no more threads.
                self.crowd = Crowd()
        elif not yielding:
            self.close()

    def close(self) -> None:
        """Have threads spin as they did before."""
        if self.crowd is not None:
            self.crowd.end()
            self.crowd = None


_lock = threading.Lock()
_waits: Waits | None = None


def watch(wanted: Callable[[], bool]) -> None:
    """Have a thread of this process choose how PyTorch's threads wait, as long as `wanted` returns True.

    Does nothing where such a thread runs, where the user has set one of `VARIABLES` or "waits=spin", and where PyTorch
    has one thread or another OpenMP than GNU's. Raises DataError for a wrong MEMASCEND_THREADS.
    """
    global _waits
    mode = settings().waits
    if mode == "spin" or torch.get_num_threads() == 1 or set_by_user() or not is_gnu(library()):
        return
    with _lock:
        if _waits is not None:
            return
        waits = Waits(mode)
        with suppress(RuntimeError):  # The system starts no more threads.
            threading.Thread(target=_choose, args=(waits, wanted), name="memascend-waits", daemon=True).start()
            _waits = waits


def _choose(waits: Waits, wanted: Callable[[], bool]) -> None:
    global _waits
    waits.look()
    while True:
        time.sleep(LOOK_SECONDS)
        with _lock:
            if not wanted():
                _waits = None
                break
        waits.look()
    waits.close()


def set_by_user() -> list[str]:
    """Return the `VARIABLES` that the user has set, as "NAME=value"."""
    return [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]


def state() -> str:
    """Return how PyTorch's threads wait now, and why: for `memascend.stats`."""
    waits = _waits
    if given := set_by_user():
        return f"as {', '.join(given)} says"
    if waits is None:
        return "as OpenMP does by itself"
    return "yield" if waits.crowd is not None else "spin"


def threads_in_use(update: int) -> dict[str, Any]:
    """Return the numbers of threads, how PyTorch's wait, and the processors there are, for `memascend.stats`.

    `update` is the number of those that update weights.
    """
    torch_threads = torch.get_num_threads()
    return {"torch": torch_threads, "update": update, "waits": state(), "processors": processors().as_dict()}


def _forget() -> None:
    """Forget the threads, which a forked child does not have."""
    global _lock, _waits
    _lock, _waits = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
