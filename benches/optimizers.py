#!/usr/bin/env python
"""Optimizer steps in memory: fp32 AdamW beside its peers, every variant beside fp32, all beside plain passes.

    python benches/optimizers.py                                  # 64 and 256 million elements (Mi)
    python benches/optimizers.py --elements 16 --repeats 3 --json out.json
    python benches/optimizers.py --check
    MEMASCEND_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benches/optimizers.py

The peers are `torch.optim.AdamW(fused=True)`, DeepSpeed's `DeepSpeedCPUAdam` and, for 8 bits, bitsandbytes'
`AdamW8bit`, which runs on CPUs too (0.50.2 does). They run in this process, on the same arrays and with as many
threads, so the interpreter must have them; those that it has not are left out. Into the environment of
benches/README.md:

    DS_VENV/bin/pip install dist/memascend-*.whl bitsandbytes
    PATH=DS_VENV/bin:$PATH DS_VENV/bin/python benches/optimizers.py --check --json benches/results/optimizers.json

(`PATH`, because DeepSpeed compiles its operator with ninja when it is used first.)

Contestants are measured in groups, each with fp32 AdamW and the plain passes, so that the arrays of all fit: weights
and gradients are shared within a group, states are not. In a round every contestant takes one step, in the same order,
with a pause before it, since threads of OpenMP spin for a while. Times are medians of the rounds; ratios are of one
group. "bytes" is the traffic of a step per element, "share" its ratio to fp32's. Memory is the
limit that the plain passes show: one in place, as steps are, and a copy, which makes most processors read its target.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _common import GB, finish, instruction_sets, machine, markdown, mem_available, run, versions

import memascend

MI, GIB = 2**20, 2**30
#: Against the faster peer; a variant's time against its share of the bytes; 8 bits against bitsandbytes.
PEER_LIMIT, SHARE_LIMIT, EIGHT_LIMIT = 1.0, 1.1, 1.5
#: Seconds in which spinning threads go to sleep.
PAUSE = 0.02
#: So small that the weights, which all change in turn, stay ordinary numbers.
LEARNING_RATE = 1e-6
#: A moment in 8 bits: a code, and a scale for 256 of them.
BYTES_8BIT = 1 + 4 / 256
FP32, COPY, IN_PLACE = "fp32", "copy", "negation in place"

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Contestant:
    """An optimizer on weights of one dtype."""

    make: Make
    dtype: torch.dtype
    #: Kept per element beside weight and gradient: moments, and the master or its low half.
    states: float
    #: Whether `--check` holds it to its share of the bytes.
    limited: bool = False
    #: Temporaries per element.
    temporaries: float = 0

    @property
    def bytes(self) -> float:
        """Return the traffic of a step per element: gradient in, states and weight in and out."""
        weight = self.dtype.itemsize
        # An fp16 weight comes from its master, so it is only written.
        return weight + 2 * self.states + (weight if self.dtype == torch.float16 else 2 * weight)


def ours(optimizer: Callable[..., torch.optim.Optimizer] = memascend.AdamW, **options: object) -> Make:
    return partial(optimizer, lr=LEARNING_RATE, **options)


REFERENCE = Contestant(ours(), torch.float32, 8)
VARIANTS: dict[str, dict[str, Contestant]] = {
    "bf16": {
        "bf16, split master": Contestant(ours(), torch.bfloat16, 10, limited=True),
        "bf16, split master, bf16 moments": Contestant(ours(states="bfloat16"), torch.bfloat16, 6, limited=True),
        "bf16, no master": Contestant(ours(master=False), torch.bfloat16, 8, limited=True),
        "bf16, no master, bf16 moments": Contestant(
            ours(master=False, states="bfloat16"), torch.bfloat16, 4, limited=True
        ),
        "fp32, bf16 moments": Contestant(ours(states="bfloat16"), torch.float32, 4, limited=True),
    },
    "others": {
        "fp16, master": Contestant(ours(), torch.float16, 12),
        "fp16, master, bf16 moments": Contestant(ours(states="bfloat16"), torch.float16, 8, limited=True),
        "fp32, AMSGrad": Contestant(ours(amsgrad=True), torch.float32, 12),
        "fp32, Lion": Contestant(ours(memascend.Lion), torch.float32, 4),
        "fp32, SGD with momentum": Contestant(ours(memascend.SGD, momentum=0.9), torch.float32, 4),
    },
    "8 bits": {
        "fp32, 8-bit moments": Contestant(ours(states="8bit"), torch.float32, 2 * BYTES_8BIT),
        "bf16, split master, 8-bit moments": Contestant(ours(states="8bit"), torch.bfloat16, 2 + 2 * BYTES_8BIT),
        "bf16, no master, 8-bit moments": Contestant(ours(states="8bit", master=False), torch.bfloat16, 2 * BYTES_8BIT),
    },
}
EIGHT = "fp32, 8-bit moments"
TORCH, DEEPSPEED, BITSANDBYTES = "torch, fused", "DeepSpeedCPUAdam", "bitsandbytes, AdamW8bit"


# --- peers ---


def torch_adamw() -> Contestant:
    return Contestant(partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True), torch.float32, 8)


def deepspeed_adamw() -> Contestant:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return Contestant(partial(DeepSpeedCPUAdam, lr=LEARNING_RATE, adamw_mode=True), torch.float32, 8)


def bitsandbytes_adamw() -> Contestant:
    import bitsandbytes

    # It widens both moments, and computes in whole temporary arrays.
    return Contestant(
        partial(bitsandbytes.optim.AdamW8bit, lr=LEARNING_RATE), torch.float32, 2 * BYTES_8BIT, temporaries=24
    )


def probe(found: Callable[[], Contestant]) -> Contestant | str:
    """Return a peer that has taken a step, or the reason why there is none."""
    try:
        contestant = found()
        parameter = torch.nn.Parameter(torch.ones(1 << 16))
        parameter.grad = torch.ones_like(parameter)
        contestant.make([parameter]).step()
        if bool((parameter == 1).any()):
            return "its step on the CPU changes nothing"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return contestant


def same_threads(count: int) -> list[str]:
    """Give every OpenMP runtime of this process as many threads: peers may bring one of their own."""
    torch.set_num_threads(count)
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if any(path.rpartition("/")[2].startswith(name) for name in ("libgomp", "libomp", "libiomp")):
            found.add("/" + path)
    for path in found:
        ctypes.CDLL(path).omp_set_num_threads(count)
    return sorted(Path(path).name for path in found)


# --- measuring ---


def by_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each, by rounds of all. Two rounds before make the states and warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-2, repeats):
        for name, call in calls.items():
            time.sleep(PAUSE)
            began = time.perf_counter()
            call()
            spent = time.perf_counter() - began
            if number >= 0:
                seconds[name].append(spent)
    return seconds


def need(contestants: dict[str, Contestant]) -> float:
    """Return the bytes per element that a group has in memory at once."""
    arrays = sum(2 * dtype.itemsize for dtype in {each.dtype for each in contestants.values()})
    states = sum(each.states for each in contestants.values())
    return torch.float32.itemsize + arrays + states + max(each.temporaries for each in contestants.values())


def measure(group: str, contestants: dict[str, Contestant], numel: int, repeats: int) -> list[dict]:
    contestants = {FP32: REFERENCE} | contestants
    arrays = {}
    for dtype in {each.dtype for each in contestants.values()}:
        arrays[dtype] = [torch.empty(numel, dtype=dtype).uniform_(-1, 1) for _ in range(2)]
    calls: dict[str, Callable[[], object]] = {}
    for name, contestant in contestants.items():
        weight, gradient = arrays[contestant.dtype]
        parameter = torch.nn.Parameter(weight)  # of the same memory
        parameter.grad = gradient
        calls[name] = contestant.make([parameter]).step
    source = arrays[torch.float32][1]
    target = torch.empty_like(source)
    calls[COPY] = lambda: target.copy_(source)
    calls[IN_PLACE] = target.neg_
    seconds = by_turns(calls, repeats)
    plain = dict.fromkeys((COPY, IN_PLACE), 2.0 * source.itemsize)
    moved = {name: each.bytes for name, each in contestants.items()} | plain
    return [
        {
            "group": group,
            "elements": numel,
            "name": name,
            "bytes": moved[name],
            "limited": name in contestants and contestants[name].limited,
            "seconds": statistics.median(spent),
            "fastest": min(spent),
            "slowest": max(spent),
        }
        for name, spent in seconds.items()
    ]


def of_group(rows: list[dict]) -> list[dict[str, dict]]:
    """Return the rows by name, for each group and size."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["elements"], row["group"]), {})[row["name"]] = row
    return list(groups.values())


# --- reporting ---


def report(rows: list[dict]) -> str:
    table = []
    for group in of_group(rows):
        reference = group[FP32]
        for name, row in group.items():
            ratio, share = row["seconds"] / reference["seconds"], row["bytes"] / reference["bytes"]
            table.append(
                [
                    row["group"],
                    f"{row['elements'] // MI}",
                    name,
                    f"{row['seconds'] * 1e3:.1f}",
                    f"{row['fastest'] * 1e3:.1f} to {row['slowest'] * 1e3:.1f}",
                    f"{row['bytes']:.1f}",
                    f"{row['bytes'] * row['elements'] / row['seconds'] / GB:.1f}",
                    f"{ratio:.3f}",
                    f"{share:.3f}",
                    f"{ratio / share:.2f}",
                ]
            )
    header = ["group", "Mi", "step", "ms", "of all rounds", "bytes", "GB/s", "time/fp32", "share", "time/share"]
    return markdown(header, table)


def faults(rows: list[dict]) -> list[str]:
    """Return the results that miss a limit."""
    found = []
    for group in of_group(rows):
        reference = group[FP32]
        where = f"{reference['elements'] // MI} Mi, {reference['group']}"
        peers = {name: group[name] for name in (TORCH, DEEPSPEED) if name in group}
        if peers:
            name = min(peers, key=lambda peer: peers[peer]["seconds"])
            ratio = peers[name]["seconds"] / reference["seconds"]
            if ratio < PEER_LIMIT:
                found.append(f"{where}: fp32 has {ratio:.3f} of the speed of {name}, at least {PEER_LIMIT} is wanted")
        for name, row in group.items():
            ratio = row["seconds"] / reference["seconds"] / (row["bytes"] / reference["bytes"])
            if row["limited"] and ratio > SHARE_LIMIT:
                found.append(f"{where}: {name} takes {ratio:.2f} of its share by bytes, at most {SHARE_LIMIT}")
        if BITSANDBYTES in group:
            ratio = group[BITSANDBYTES]["seconds"] / group[EIGHT]["seconds"]
            if ratio < EIGHT_LIMIT:
                found.append(f"{where}: 8 bits are {ratio:.2f} times as fast as bitsandbytes, {EIGHT_LIMIT} are wanted")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[64, 256], metavar="MI", help="sizes, in 2^20 elements"
    )
    parser.add_argument("--groups", nargs="+", default=["peers", *VARIANTS], choices=["peers", *VARIANTS])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="measured steps of each (default: 9)")
    parser.add_argument("--json", type=Path, help="write the results here")
    limits = (
        f"fp32 at {PEER_LIMIT} of the faster peer's speed, split and bf16 variants within {SHARE_LIMIT} of their share "
        f"of the bytes, 8 bits at {EIGHT_LIMIT} of bitsandbytes' speed"
    )
    parser.add_argument("--check", action="store_true", help=f"exit 1 if a limit is missed: {limits}")
    args = parser.parse_args()

    about = machine(Path())
    about["versions"] |= versions("deepspeed", "bitsandbytes")
    peers, left_out = {}, {}
    for name, find in ((TORCH, torch_adamw), (DEEPSPEED, deepspeed_adamw), (BITSANDBYTES, bitsandbytes_adamw)):
        found = probe(find)
        if isinstance(found, str):
            left_out[name] = found
        else:
            peers[name] = found
    about["instruction_sets"] = instruction_sets()
    about["threads"] = args.threads
    about["openmp"] = same_threads(args.threads)
    about["load_before"] = os.getloadavg()[0]
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    for name, reason in left_out.items():
        print(f"Not measured: {name}, which does not run here: {reason}", flush=True)

    groups = {"peers": {name: peers[name] for name in (TORCH, DEEPSPEED) if name in peers}} | VARIANTS
    if BITSANDBYTES in peers:
        groups["8 bits"] = VARIANTS["8 bits"] | {BITSANDBYTES: peers[BITSANDBYTES]}
    rows: list[dict] = []
    for millions in args.elements:
        for group in args.groups:
            wanted, free = need({FP32: REFERENCE} | groups[group]) * millions * MI, mem_available()
            if wanted > 0.95 * free:
                reason = f"needs {wanted / GIB:.1f} GiB, {free / GIB:.1f} are free"
                left_out[f"{group}, {millions} Mi"] = reason
                print(f"Not measured: {group}, {millions} Mi: {reason}", flush=True)
                continue
            rows += measure(group, groups[group], millions * MI, args.repeats)
            gc.collect()
    print("\n" + report(rows))
    missed = faults(rows) if rows else ["nothing was measured"]
    results = {"machine": about, "repeats": args.repeats, "rows": rows, "left_out": left_out, "missed": missed}
    return finish(results, args.json, missed if args.check else [])


if __name__ == "__main__":
    run(main)
