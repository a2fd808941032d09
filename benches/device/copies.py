"""Copies between host and device: by kind of host memory, in pieces, and the cost of waiting for their end."""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .timing import HOST_KINDS, MIB, host_memory, rate, wall_seconds

KIB = 1024
PIECES = tuple(64 * KIB << step for step in range(8))  # 64 KiB to 8 MiB
AHEAD = (2, 4, 8, 16, 32)
#: Pieces of a run at most: Python takes microseconds for each.
COUNT_MAX = 2048
#: CUDA's flags of events without timing, whose waiting thread sleeps or spins.
EVENTS = {"blocking": 3, "spinning": 2}
DIRECTIONS = {"h2d": 1, "d2h": 2}


def by_memory(nbytes: int, seconds: float) -> Iterator[dict]:
    """Copy `nbytes` up, down and both at once, from and to each kind of host memory."""
    device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for kind in HOST_KINDS:
        try:
            began = time.perf_counter()
            host = [host_memory(kind, nbytes) for _ in range(2)]
            spent = (time.perf_counter() - began) / 2

            def both(host=host) -> None:
                with torch.cuda.stream(streams[0]):
                    device[0].copy_(host[0], non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(device[1], non_blocking=True)

            yield {
                "kind": kind,
                "bytes": nbytes,
                "pinned": host[0].is_pinned(),
                "allocation_s_per_gib": spent / nbytes * 2**30,
                "h2d_bytes_per_s": rate(nbytes, wall_seconds(lambda h=host: device[0].copy_(h[0], True), seconds)),
                "d2h_bytes_per_s": rate(nbytes, wall_seconds(lambda h=host: h[1].copy_(device[1], True), seconds)),
                "both_bytes_per_s_each": rate(nbytes, wall_seconds(both, seconds)),
            }
        except Exception as error:  # memory of this kind may be refused; the others are measured
            yield {"kind": kind, "failed": f"{type(error).__name__}: {error}"[:300]}


class Cudart:
    """The functions of CUDA's runtime that the pieces need, called without PyTorch between them."""

    def __init__(self) -> None:
        library, pointer, size = ctypes.CDLL(_library()), ctypes.c_void_p, ctypes.c_size_t
        signatures = {
            "cudaStreamCreateWithFlags": [pointer, ctypes.c_uint],
            "cudaStreamSynchronize": [pointer],
            "cudaStreamDestroy": [pointer],
            "cudaEventCreateWithFlags": [pointer, ctypes.c_uint],
            "cudaEventDestroy": [pointer],
            "cudaMemcpyAsync": [pointer, pointer, size, ctypes.c_int, pointer],
            "cudaEventRecord": [pointer, pointer],
            "cudaEventSynchronize": [pointer],
            "cudaEventQuery": [pointer],
            "cudaGetLastError": [],
        }
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes = arguments
            setattr(self, name, function)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function, and raise RuntimeError where it returns an error."""
        code = getattr(self, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned error {code}")

    @contextmanager
    def stream(self) -> Iterator[ctypes.c_void_p]:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)  # not ordered with the default stream
        try:
            yield stream
        finally:
            self.call("cudaStreamSynchronize", stream)
            self.call("cudaStreamDestroy", stream)

    @contextmanager
    def events(self, count: int, flags: int) -> Iterator[list[ctypes.c_void_p]]:
        events = [ctypes.c_void_p() for _ in range(count)]
        for event in events:
            self.call("cudaEventCreateWithFlags", ctypes.byref(event), flags)
        try:
            yield events
        finally:
            for event in events:
                self.call("cudaEventDestroy", event)


def _library() -> str:
    """Return the CUDA runtime that this process has loaded, or that MEMASCEND_CUDART names."""
    named = os.environ.get("MEMASCEND_CUDART")
    if named:
        return named
    mapped = re.findall(r"(/\S*libcudart[^\s/]*\.so[.\d]*)", Path("/proc/self/maps").read_text())
    return mapped[0] if mapped else "libcudart.so"


def in_pieces(nbytes: int) -> Iterator[dict]:
    """Copy pieces of 64 KiB to 8 MiB, 2 to 32 in flight, an event behind each, as gradients and weights are moved.

    `waited_share` is the share of pieces whose event was not done when the program came to use it again: near 0, Python
    and not the copies set the rate.
    """
    cudart = Cudart()
    device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    host = host_memory("cuda", nbytes)
    torch.cuda.synchronize()
    with cudart.stream() as stream:
        for direction, way in DIRECTIONS.items():
            source, target = (host, device) if way == 1 else (device, host)
            for kind, flags in EVENTS.items():
                for piece in (piece for piece in PIECES if piece <= nbytes):
                    for ahead in AHEAD:
                        count = min(nbytes // piece, COUNT_MAX)
                        with cudart.events(ahead, flags) as events:
                            spent, waited = _run(cudart, stream, events, (target, source, piece, way), count)
                        yield {
                            "direction": direction,
                            "events": kind,
                            "piece_bytes": piece,
                            "in_flight": ahead,
                            "bytes_per_s": rate(count * piece, spent),
                            "waited_share": waited / count,
                        }


def _run(cudart: Cudart, stream, events: list, copy: tuple, count: int) -> tuple[float, int]:
    """Copy `count` pieces one after another in the buffers, and return the seconds and how often it waited."""
    target, source, piece, way = copy
    to, start = target.data_ptr(), source.data_ptr()
    waited, ahead = 0, len(events)
    began = time.perf_counter()
    for number in range(count):
        event = events[number % ahead]
        if number >= ahead and cudart.cudaEventQuery(event):
            cudart.cudaGetLastError()  # "not ready" is no error
            waited += 1
            cudart.call("cudaEventSynchronize", event)
        cudart.call("cudaMemcpyAsync", to + number * piece, start + number * piece, piece, way, stream)
        cudart.call("cudaEventRecord", event, stream)
    cudart.call("cudaStreamSynchronize", stream)
    return time.perf_counter() - began, waited


def wake_ups(repeats: int) -> Iterator[dict]:
    """Copy 512 KiB and wait for its event, asleep and spinning: the cost of a wait beyond the copy."""
    cudart = Cudart()
    nbytes = MIB // 2
    device, host = torch.ones(nbytes, dtype=torch.uint8, device="cuda"), host_memory("cuda", nbytes)
    torch.cuda.synchronize()
    with cudart.stream() as stream:
        for kind, flags in EVENTS.items():
            taken = []
            with cudart.events(1, flags) as (event,):
                for _ in range(repeats):
                    began = time.perf_counter()
                    cudart.call("cudaMemcpyAsync", host.data_ptr(), device.data_ptr(), nbytes, 2, stream)
                    cudart.call("cudaEventRecord", event, stream)
                    cudart.call("cudaEventSynchronize", event)
                    taken.append(time.perf_counter() - began)
            yield {"what": "copy and wait", "events": kind, "bytes": nbytes} | spread(taken)
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            with cudart.events(1, EVENTS["blocking"]) as (event,):
                cudart.call("cudaEventRecord", event, stream)
            taken.append(time.perf_counter() - began)
        yield {"what": "event made, recorded, destroyed", "events": "blocking"} | spread(taken)


def spread(taken: list[float]) -> dict[str, float]:
    """Return median and ninth decile of times, in seconds."""
    ordered = sorted(taken)
    return {"median_s": statistics.median(ordered), "p90_s": ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]}
