"""Rates of the processor, host memory, the drives and the device by themselves."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pages import rate as drive_rate

import memascend
from memascend._memascend import FileEngine

from .timing import MIB, device_seconds, host_memory, rate

#: Bytes of host memory that AdamW reads and writes a parameter: weight 2, low half 2, moments 8, all twice; gradient 2.
UPDATE_BYTES = 2 * (2 + 2 + 8) + 2
THREADS = (1, 2, 4, 6, 8, 12, 16)
#: Pinned memory that a drive is read into.
DRIVE_KINDS = ("cuda", "registered", "registered-4k", "locked")
#: Requests of 1 MiB in flight.
DRIVE_DEPTH = 32


def usable(threads: Sequence[int]) -> list[int]:
    """Return the numbers of threads for which this process has processors."""
    cores = len(os.sched_getaffinity(0))
    return [count for count in threads if count <= cores]


def updates(numel: int, repeats: int) -> Iterator[dict]:
    """Update `numel` bf16 weights with fp32 moments in host memory, by threads."""
    before = torch.get_num_threads()
    weight = torch.nn.Parameter(torch.randn(numel).bfloat16())
    weight.grad = torch.randn(numel).bfloat16()
    optimizer = memascend.AdamW([weight], lr=1e-3)
    optimizer.step()
    try:
        for threads in usable(THREADS):
            torch.set_num_threads(threads)
            optimizer.step()
            taken = []
            for _ in range(repeats):
                began = time.perf_counter()
                optimizer.step()
                taken.append(time.perf_counter() - began)
            spent = statistics.median(taken)
            row = {"threads": threads, "parameters": numel, "parameters_per_s": rate(numel, spent)}
            yield row | {"bytes_per_s": rate(UPDATE_BYTES * numel, spent)}
    finally:
        torch.set_num_threads(before)


def host_copies(nbytes: int, repeats: int) -> Iterator[dict]:
    """Copy `nbytes` in host memory, by threads; each byte is read and written."""
    before = torch.get_num_threads()
    source, target = (torch.ones(nbytes // 4) for _ in range(2))
    try:
        for threads in usable(THREADS):
            torch.set_num_threads(threads)
            target.copy_(source)
            taken = []
            for _ in range(repeats):
                began = time.perf_counter()
                target.copy_(source)
                taken.append(time.perf_counter() - began)
            yield {"threads": threads, "bytes_per_s": rate(2 * source.nbytes, statistics.median(taken))}
    finally:
        torch.set_num_threads(before)


def drives(places: dict[str, Path], nbytes: int, seconds: float) -> Iterator[dict]:
    """Measure the drive of each place by the workloads of `memascend bench`."""
    from memascend.hardware.drives import measure

    for name, place in places.items():
        try:
            told = measure(place, size=nbytes, seconds=seconds)
            rates = {workload: run["bytes_per_second"] for workload, run in told["workloads"].items()}
            late = {workload: run["latency_p99"] for workload, run in told["workloads"].items()}
            row = {key: told[key] for key in ("engine", "features", "direct_io", "block_bytes", "notices", "polling")}
            yield {"place": name, **row, "workloads": rates, "latency_p99_s": late}
        except Exception as error:  # one place may be refused (full, read-only); the others are measured
            yield {"place": name, "failed": f"{type(error).__name__}: {error}"[:300]}


def drive_into(place: Path, nbytes: int) -> Iterator[dict]:
    """Read and write a file of `nbytes` through each kind of pinned memory, 1 MiB requests, 32 in flight."""
    engine = FileEngine()
    file = place / "memascend-probe.tmp"
    nbytes = nbytes // (2 * MIB) * 2 * MIB
    depth = max(1, min(DRIVE_DEPTH, nbytes // MIB // 2))
    try:
        for kind in DRIVE_KINDS:
            try:
                buffer = host_memory(kind, depth * MIB)
                buffer.random_(0, 256)
                row = {"kind": kind, "engine": engine.name, "in_flight": depth}
                for mix in ("write", "read", "mix"):
                    row[f"{mix}_bytes_per_s"] = drive_rate(engine, file, buffer, mix, nbytes)
                yield row
            except Exception as error:  # memory of this kind may be refused; the others are measured
                yield {"kind": kind, "failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        file.unlink(missing_ok=True)


def device_memory(nbytes: int, rounds: int) -> Iterator[dict]:
    """Copy and read `nbytes` on the device. A copy reads each byte and writes it."""
    source = torch.randn(nbytes // 4, device="cuda")
    target = torch.empty_like(source)
    copied = device_seconds(lambda: target.copy_(source), rounds)
    yield {"what": "copy", "bytes_per_s": rate(2 * source.nbytes, copied)}
    summed = device_seconds(source.sum, rounds)
    yield {"what": "read (sum)", "bytes_per_s": rate(source.nbytes, summed)}


def products(size: int, rounds: int) -> Iterator[dict]:
    """Multiply two random size x size matrices in each dtype; float32 without tf32, and with it."""
    for name, tf32 in (("bfloat16", False), ("float16", False), ("float32", False), ("tf32", True)):
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        left, right = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            spent = device_seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c), rounds)
        finally:
            torch.set_float32_matmul_precision(before)
        yield {"dtype": name, "size": size, "flops_per_s": rate(2 * size**3, spent)}
