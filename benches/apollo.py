#!/usr/bin/env python
"""APOLLO and APOLLO-Mini beside AdamW, streamed: SSD bytes and seconds of a step, and of projections alone.

    python benches/apollo.py --workdir DIR --json benches/results/apollo.json
    python benches/apollo.py --model 0.51b --ranks 64 256 --budget overlapping
    python benches/apollo.py --limit 400MB --check    # root, cgroup v1: a drive so slow that it surely binds

Each optimizer trains the model of benches/peak_memory.py in a process of its own, with the least budget that reads
ahead unless --budget says otherwise and no durable steps, by turns: every round runs all of them. The time of a step is
the median of the rounds' medians. Seconds in proportion to bytes are AdamW's seconds times the ratio of the bytes.
Projections are timed on the gradients' shapes of one layer, in bfloat16, with as many threads as PyTorch has, and
without the SSD. Where the drive is so quick that computing binds one of the passes, APOLLO's time is above that
proportion.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from _common import GB, finish, fio, in_workdir, instruction_sets, machine, markdown, size, slowed
from _llama import parameter_count
from _peak_systems import words
from peak_memory import SHAPES, model_directory, start

TOKENS = 128
#: Of a step that the drive binds, by how much it may take longer than in proportion to its bytes.
OFF_PROPORTION = 0.15


def projection_seconds(shape: tuple[int, int, int, int, int], rank: int) -> tuple[float, int]:
    """Return the seconds of projecting one layer's matrices (the fastest of three), and their elements."""
    import torch

    from memascend._memascend import Projection

    hidden, intermediate, _, heads, kv_heads = shape
    kv = hidden // heads * kv_heads
    shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    total = 0.0
    for rows, columns in shapes:
        gradient = torch.randn(rows, columns).bfloat16()
        projection = Projection(rows, columns, rank, 1, 0)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            projection.of("bfloat16", gradient.data_ptr(), torch.get_num_threads())
            seconds.append(time.perf_counter() - begin)
        total += min(seconds)
    return total, sum(rows * columns for rows, columns in shapes)


def compare(workdir: Path, args: argparse.Namespace) -> int:
    shape = SHAPES[args.model]
    parameters = parameter_count(shape, words(args.model))
    model_dir = str(model_directory(args.model, args, workdir))
    common = {"system": "memascend", "model": args.model, "shape": shape, "tokens": TOKENS, "model_dir": model_dir}
    found = start(sys.executable, {**common, "task": "budget"}, workdir, args.timeout)
    contestants = [("adamw", 0), *(("apollo", rank) for rank in args.ranks), ("apollo-mini", 1)]
    measured: dict[tuple[str, int], list[dict]] = {contestant: [] for contestant in contestants}
    for number in range(args.rounds):
        for optimizer, rank in contestants:
            job = {
                **common,
                "task": "train",
                "optimizer": optimizer,
                "rank": rank,
                "warmup": 2,
                "steps": args.steps,
                "scratch": str(workdir / "scratch"),
                "host_memory": found[args.budget],
                "durability": "none",
            }
            (workdir / "scratch").mkdir(exist_ok=True)
            with slowed(workdir, args.limit) as group:
                job["cgroup"] = None if group is None else str(group)
                raw = start(sys.executable, job, workdir, args.timeout)
            steps = [step for step in raw["steps"] if step["measured"]]
            measured[optimizer, rank].append(
                {
                    "step_s": statistics.median(step["step_s"] for step in steps),
                    "busy_s": statistics.median(step["ssd_busy_s"] for step in steps),
                    "read": statistics.mean(step["ssd"][0] for step in steps) / parameters,
                    "written": statistics.mean(step["ssd"][1] for step in steps) / parameters,
                    "peak_gb": (raw["hwm_bytes"] - raw["baseline_bytes"]) / GB,
                    "losses": [step["loss"] for step in raw["steps"]],
                }
            )
            print(f"round {number}: {optimizer} {rank or ''} {measured[optimizer, rank][-1]}", flush=True)
    rows, entries, missed = [], [], []
    base: dict[str, float] = {}
    for optimizer, rank in contestants:
        runs = measured[optimizer, rank]
        seconds = statistics.median(run["step_s"] for run in runs)
        moved = statistics.mean(run["read"] + run["written"] for run in runs)
        base = base or {"seconds": seconds, "moved": moved}
        in_proportion = base["seconds"] * moved / base["moved"]
        off = seconds / in_proportion - 1
        entry = {"optimizer": optimizer, "rank": rank, "step_s": seconds, "bytes": moved, "off": off, "runs": runs}
        projecting = ""
        if rank:
            alone, elements = projection_seconds(shape, rank)
            entry["projection_s"] = alone * shape[2]
            entry["projection_elements"] = elements * shape[2]
            projecting = f"{entry['projection_s']:.2f}"
        entries.append(entry)
        name = optimizer if optimizer == "adamw" else f"{optimizer} {rank}"
        if off > OFF_PROPORTION:
            missed.append(f"{name} takes {off:.0%} longer than in proportion, at most {OFF_PROPORTION:.0%}")
        peak = max(run["peak_gb"] for run in runs)
        rows.append(
            [
                name,
                f"{peak:.2f}",
                f"{moved:.1f}",
                f"{moved / base['moved']:.2f}",
                f"{seconds:.2f}",
                f"{seconds / base['seconds']:.2f}",
                f"{off:+.0%}",
                projecting,
            ]
        )
    header = [
        "optimizer",
        "peak, GB",
        "SSD bytes",
        "of AdamW's",
        "step, s",
        "of AdamW's",
        "off proportion",
        "projections",
    ]
    print("\n" + markdown(header, rows))
    results = {
        "machine": machine(workdir) | {"instruction_sets": instruction_sets()},
        "fio": fio(workdir),
        "model": args.model,
        "parameters": parameters,
        "tokens": TOKENS,
        "host_memory": found[args.budget],
        "limit": args.limit,
        "rounds": args.rounds,
        "steps": args.steps,
        "optimizers": entries,
    }
    return finish(results, args.json, missed if args.check else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.51b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256], help="of APOLLO")
    parser.add_argument("--budget", choices=["smallest", "overlapping"], default="overlapping")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run, after two of warm-up")
    parser.add_argument("--limit", type=size, help="bytes/s of the disk in either direction (root, cgroup v1's blkio)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a step takes too long beside its bytes")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--workdir", type=Path, help="on the drive to measure; empty (default: made here)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return in_workdir(args.workdir, lambda workdir: compare(workdir, args))


if __name__ == "__main__":
    raise SystemExit(main())
