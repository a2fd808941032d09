#!/usr/bin/env python
"""The overflow check beside a plain read of the same bytes and beside torch's ways to check.

    python benches/overflow.py                                  # 64 and 256 million elements (Mi), every dtype
    python benches/overflow.py --elements 16 --repeats 5 --json out.json
    python benches/overflow.py --check
    MEMASCEND_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benches/overflow.py

The plain read is the fastest of several reductions of the same bytes as 64-bit integers: numpy's sum and or on one
thread, torch's sum on as many threads as the check has. All are measured by turns, so that a drift of the machine hits
them alike, with a pause in between, since threads of OpenMP spin for a while. Times are the fastest of the rounds:
other programs only add to them. With a CUDA device, a copy on the device is the measure there: half of its traffic is
reads.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _common import finish, instruction_sets, machine, markdown, run

from memascend.optim.overflow import check

MI, GIB = 2**20, 2**30
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Against the plain read, against isinf and isnan, and the norm's addition.
READ_LIMIT, TORCH_LIMIT, NORM_LIMIT, GPU_LIMIT = 0.95, 40, 1.1, 0.9
#: Seconds in which spinning threads go to sleep.
PAUSE = 0.02
#: Cycles that a device is kept busy for: some 5 ms.
BUSY_CYCLES = 10_000_000
READS = ("numpy", "torch", "numpy_or")


def by_turns(calls: dict[str, Callable[[], object]], repeats: int, clock: Callable[..., float]) -> dict[str, float]:
    """Return the fastest of each, in seconds, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            time.sleep(PAUSE)
            spent = clock(call)
            if number:
                seconds[name].append(spent)
    return {name: min(spent) for name, spent in seconds.items()}


def wall(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def on_device(call: Callable[[], object]) -> float:
    """Return the seconds of the device alone: all is enqueued while it is busy, which hides Python and launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def cpu(name: str, numel: int, threads: int, repeats: int) -> dict:
    tensor = torch.empty(numel, dtype=DTYPES[name]).uniform_(-1, 1)
    words = tensor.view(torch.int64)
    array = words.numpy()
    calls: dict[str, Callable[[], object]] = {
        "numpy": array.sum,
        "numpy_or": lambda: np.bitwise_or.reduce(array),
        "torch": words.sum,
        "check": lambda: check(tensor, threads=threads).found_inf,
        "norm": lambda: check(tensor, norm=True, threads=threads).norm,
        "unscale": lambda: check(tensor, unscale=1.0, threads=threads).found_inf,
        "isinf_isnan": lambda: bool(torch.isinf(tensor).any() | torch.isnan(tensor).any()),
        "isfinite_all": lambda: bool(torch.isfinite(tensor).all()),
        "foreach_norm": lambda: torch._foreach_norm([tensor])[0].item(),
    }
    row: dict = {"dtype": name, "elements": numel, "threads": threads, "bytes": tensor.nbytes}
    row |= by_turns(calls, repeats, wall)
    row["read"] = min(row[read] for read in READS)
    return row


def gpu(name: str, nbytes: int, repeats: int) -> dict:
    source = torch.empty(nbytes // DTYPES[name].itemsize, dtype=DTYPES[name], device="cuda").uniform_(-1, 1)
    target = torch.empty_like(source)
    found, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "check": lambda: check(source),
        "norm": lambda: check(source, norm=True),
        "unscale": lambda: check(source, unscale=one),
        "foreach_norm": lambda: torch._foreach_norm([source]),
        "isinf_isnan": lambda: torch.isinf(source).any() | torch.isnan(source).any(),
        "isfinite_all": lambda: torch.isfinite(source).all(),
    }
    if DTYPES[name] is not torch.bfloat16:  # PyTorch 2.11 has no kernel for it
        calls["amp"] = lambda: torch._amp_foreach_non_finite_check_and_unscale_([source], found, one)
    row: dict = {"dtype": name, "elements": source.numel(), "bytes": source.nbytes}
    row |= by_turns(calls, repeats, on_device)
    return row | {"extra_bytes": {what: extra_bytes(call) for what, call in calls.items()}}


def extra_bytes(call: Callable[[], object]) -> int:
    """Return the peak of device memory during a call, above its start, by PyTorch's allocator."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def report(rows: list[dict], device_rows: list[dict]) -> str:
    names = {
        "check": "check",
        "norm": "check+norm",
        "unscale": "check+unscale",
        "read": "read",
        "isinf_isnan": "isinf\\|isnan",
        "isfinite_all": "isfinite().all()",
        "foreach_norm": "_foreach_norm",
    }
    table = [
        [row["dtype"], f"{row['elements'] // MI}", f"{row['threads']}"]
        + [f"{row[name] * 1e3:.2f}" for name in names]
        + [
            f"{row['bytes'] / row['check'] / 1e9:.1f}",
            f"{row['read'] / row['check']:.2f}",
            f"{row['norm'] / row['check']:.2f}",
            f"{row['isinf_isnan'] / row['check']:.1f}",
        ]
        for row in rows
    ]
    header = ["CPU", "Mi", "threads", *(f"{name} ms" for name in names.values()), "GB/s"]
    text = markdown([*header, "of read", "norm/check", "times isinf\\|isnan"], table)
    if device_rows:
        names = {"check": "check", "norm": "check+norm", "unscale": "check+unscale", "copy": "copy"}
        names |= {"foreach_norm": "_foreach_norm", "amp": "amp's check and unscale"}
        names |= {"isinf_isnan": "isinf\\|isnan", "isfinite_all": "isfinite().all()"}
        table = [
            [
                row["dtype"],
                f"{row['bytes'] / GIB:.2f}",
                *(f"{row[name] * 1e3:.3f}" if name in row else "" for name in names),
            ]
            + [f"{row['copy'] / (2 * row[name]):.3f}" for name in ("check", "norm")]
            + [f"{row['extra_bytes'][name]}" for name in ("check", "isinf_isnan")]
            for row in device_rows
        ]
        header = ["GPU", "GiB", *(f"{name} ms" for name in names.values()), "check: of a copy's reads", "norm: of them"]
        header += ["check: extra bytes", "isinf\\|isnan: extra bytes"]
        text += "\n\n" + markdown(header, table)
    return text


def faults(rows: list[dict], device_rows: list[dict]) -> list[str]:
    """Return the results that miss a limit."""
    found = []
    for row in rows:
        what = f"{row['dtype']}, {row['elements'] // MI} Mi, {row['threads']} threads"
        if row["read"] / row["check"] < READ_LIMIT:
            found.append(f"{what}: {row['read'] / row['check']:.2f} of a plain read's speed")
        if row["isinf_isnan"] / row["check"] < TORCH_LIMIT:
            found.append(f"{what}: {row['isinf_isnan'] / row['check']:.1f} times as fast as isinf and isnan")
        if row["norm"] / row["check"] > NORM_LIMIT:
            found.append(f"{what}: the norm takes {row['norm'] / row['check']:.2f} of the check's time")
    for row in device_rows:
        for name in ("check", "norm"):
            # A copy reads each byte and writes it, at the same speed.
            ratio = row["copy"] / (2 * row[name])
            if ratio < GPU_LIMIT:
                found.append(f"GPU, {row['dtype']}, {name}: {ratio:.3f} of a copy's bandwidth")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[64, 256], metavar="MI", help="sizes, in 2^20 elements"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], metavar="N")
    parser.add_argument("--repeats", type=int, default=11, metavar="N", help="measurements of each (default: 11)")
    parser.add_argument("--gpu-gib", type=float, default=4, metavar="GIB", help="size on a CUDA device (default: 4)")
    parser.add_argument("--json", type=Path, help="write the results here")
    limits = f"{READ_LIMIT} of a read, {TORCH_LIMIT} times isinf and isnan, the norm at {NORM_LIMIT} of the check"
    parser.add_argument("--check", action="store_true", help=f"exit 1 if a limit is missed: {limits}")
    args = parser.parse_args()

    about = machine(Path())
    about["instruction_sets"] = instruction_sets()
    about["load_before"] = os.getloadavg()[0]
    about["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    rows = []
    for numel in args.elements:
        for name in args.dtypes:
            for threads in args.threads:
                torch.set_num_threads(threads)
                rows.append(cpu(name, numel * MI, threads, args.repeats))
    device_rows = []
    if torch.cuda.is_available():
        device_rows = [gpu(name, int(args.gpu_gib * GIB), args.repeats) for name in args.dtypes]
    print("\n" + report(rows, device_rows))
    if not device_rows:
        print("\nNot measured: a GPU, for there is no CUDA device")
    results = {"machine": about, "cpu": rows, "gpu": device_rows}
    return finish(results, args.json, faults(rows, device_rows) if args.check else [])


if __name__ == "__main__":
    run(main)
