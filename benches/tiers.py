#!/usr/bin/env python
"""More memory, less SSD: bytes and seconds of a step from the least budget to one that holds everything.

    python benches/tiers.py --workdir DIR                                  # 0.51b
    python benches/tiers.py --budgets least,1GiB,10GiB --durability none --check
    python benches/tiers.py --workdir DIR --deepspeed-python DS_VENV/bin/python --json benches/results/tiers.json

Each configuration runs in a process of its own, as in peak_memory.py, whose children these are. Budgets are compared
with the same model in memory under `memascend.AdamW`, whose losses they must give, and with fio's rate in the step's
own mix of reads and writes. With DeepSpeed, ZeRO-Infinity and ZeRO-Offload (states and parameters in memory) run too,
and memascend again with each one's peak as its budget.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

from _common import GB, ChildFailed, finish, in_workdir, machine, markdown, run
from _llama import parameter_count
from _peak_systems import words
from peak_memory import SHAPES, model_directory, refusal, start

TOKENS = 128
BUDGETS = ("least", "overlapping", "1GiB", "2GiB", "4GiB", "6GiB", "8GiB", "10GiB")
DURABILITIES = ("step", "every:16", "none")
#: The limits of --check. Of a step that holds everything, over the one in memory, by its durability.
MEMORY_LIMITS = {"none": 1.10, "every:16": 1.15}
#: Bytes a parameter beyond which a larger budget may not move more: rounding to whole buffers.
MONOTONE_SLACK = 1.01
#: Of a step that the SSD binds, over its bytes at the rate of fio.
SSD_LIMIT = 1.10
#: Of ZeRO-Infinity's step: with its peak as the budget, and with the least budget.
EQUAL_MEMORY_LIMIT, LEAST_LIMIT = 0.30, 0.45
FIO_SECONDS = 6


def fio_mix(workdir: Path, read_percent: int) -> float | None:
    """Return the bytes per second of the disk in a mix (1 MiB, depth 32, O_DIRECT); None without fio."""
    if shutil.which("fio") is None:
        return None
    target = workdir / "fio.tmp"
    common = ["fio", f"--filename={target}", "--size=2G", "--bs=1M", "--iodepth=32", "--ioengine=libaio", "--direct=1"]
    mixed = ["--name=mix", "--rw=rw", f"--rwmixread={read_percent}", "--time_based", f"--runtime={FIO_SECONDS}"]
    try:
        # The file is laid out first, so that reads find data.
        for words_of in (["--name=layout", "--rw=write"], [*mixed, "--output-format=json"]):
            done = subprocess.run([*common, *words_of], capture_output=True, text=True)
            if done.returncode != 0:
                return None
        job = json.loads(done.stdout)["jobs"][0]
        return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
    finally:
        target.unlink(missing_ok=True)


class Bench:
    """Runs configurations of one model, and keeps their results."""

    def __init__(self, args: argparse.Namespace, workdir: Path) -> None:
        self.args, self.workdir = args, workdir
        self.parameters = parameter_count(SHAPES[args.model], words(args.model))
        self.rows: list[dict] = []
        self._warmed: set[str] = set()

    def measure(self, system: str, *, budget: str | int | None = None, durability: str = "auto", **more) -> dict:
        """Run one configuration, print its line, and return it; `skipped` says why it gave nothing."""
        args, scratch = self.args, self.workdir / "scratch"
        row = {"system": system, "budget": budget, "durability": durability, **more}
        self.rows.append(row)
        python = args.deepspeed_python if system.startswith("zero") else sys.executable
        period = int(durability.partition(":")[2] or 1)
        job = {
            "task": "train",
            "system": system,
            "model": args.model,
            "shape": SHAPES[args.model],
            "tokens": TOKENS,
            "warmup": 2,
            # As many as have a durable step among them once.
            "steps": max(args.steps, period),
            "model_dir": str(model_directory(args.model, args, self.workdir)),
            "scratch": str(scratch),
            "host_memory": budget,
            "durability": durability,
            "recompute": more.get("recompute", True),
            "update": more.get("update", "forward"),
            "clips": more.get("clips", True),
            "dtype": args.dtype,
        }
        try:
            if reason := refusal(system, args.model, args, self.workdir):
                raise ChildFailed(reason)
            if python not in self._warmed:
                start(python, {"task": "import"}, self.workdir, args.timeout)
                self._warmed.add(python)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            raw = start(python, job, self.workdir, args.timeout)
        except ChildFailed as error:
            row["skipped"] = str(error)
            print(f"{system} {budget or ''} {durability}: skipped: {error}", flush=True)
            return row
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        measured = [step for step in raw["steps"] if step["measured"]]
        moved = [step["ssd"] or (0, 0) for step in measured]
        # Means, since one step of several may be durable; the time of a step is the median where all are alike.
        mean = statistics.median if period == 1 else statistics.mean
        row |= {
            "peak_gb": (raw["hwm_bytes"] - raw["baseline_bytes"]) / GB,
            "step_s": mean([step["step_s"] for step in measured]),
            "read": statistics.mean(read for read, _ in moved) / self.parameters,
            "written": statistics.mean(written for _, written in moved) / self.parameters,
            "busy_s": mean([step["ssd_busy_s"] for step in measured]) if "ssd_busy_s" in measured[0] else None,
            "losses": [step["loss"] for step in raw["steps"]],
            "steps": raw["steps"],
            "host_memory_bytes": raw.get("host_memory_bytes"),
        }
        print(
            f"{system} {budget or ''} {durability}: {row['step_s']:.2f} s, peak {row['peak_gb']:.2f} GB, "
            f"{row['read']:.1f} + {row['written']:.1f} bytes a parameter",
            flush=True,
        )
        return row

    def budgets(self, update: str = "forward") -> dict[str, int]:
        """Return the bytes of the budgets that have a name, with updates in that pass."""
        found = start(
            sys.executable,
            {
                "task": "budget",
                "model": self.args.model,
                "model_dir": str(model_directory(self.args.model, self.args, self.workdir)),
                "tokens": TOKENS,
                "update": update,
                "dtype": self.args.dtype,
            },
            self.workdir,
            self.args.timeout,
        )
        return {"least": found["smallest"], "overlapping": found["overlapping"]}

    def curve(self) -> None:
        """Measure each budget with each durability, and fio beside each: a drive's rate may change within minutes."""
        args, named = self.args, self.budgets()
        for durability in args.durability:
            for budget in args.budgets:
                row = self.measure("memascend", budget=named.get(budget, budget), durability=durability)
                row["budget"] = budget
                total = row.get("read", 0) + row.get("written", 0)
                if total > 1:
                    rate = fio_mix(self.workdir, round(100 * row["read"] / total))
                    row |= {"fio_rate": rate, "fio_s": total * self.parameters / rate if rate else None}
        # In memory, where the model fits there, nothing is computed again: the last rows are of the same arithmetic.
        for durability in args.durability if "step_s" in self.rows[0] else ():
            last = args.budgets[-1]
            self.measure("memascend", budget=last, durability=durability, recompute=False, beside="in memory")

    def updates(self) -> None:
        """Compare updates in either pass. Clipping would have to wait for all gradients, so there is none."""
        for name in ("least", "overlapping"):
            for update in ("forward", "backward"):
                budget = self.budgets(update)[name]
                options = {"update": update, "clips": False, "beside": "update"}
                self.measure("memascend", budget=budget, durability="step", **options)["budget"] = name

    def peers(self) -> None:
        """Measure DeepSpeed, and memascend with as much memory."""
        for system in ("zero-infinity", "zero-offload"):
            peer = self.measure(system)
            if "peak_gb" in peer:
                for durability in ("step", "none"):
                    budget = f"{int(peer['peak_gb'] * GB)}B"
                    self.measure("memascend", budget=budget, durability=durability, beside=system)


def table(rows: list[dict]) -> str:
    """Return all configurations, each beside the one in memory."""
    memory = next((row["step_s"] for row in rows if row["system"] == "in-memory-exact" and "step_s" in row), None)
    lines = []
    for row in rows:
        if "step_s" not in row:
            lines.append([row["system"], str(row["budget"] or ""), row["durability"], row["skipped"], *[""] * 6])
            continue
        floor = row.get("fio_s")
        busy = row["busy_s"]
        lines.append(
            [
                row["system"],
                _named(row),
                row["durability"],
                f"{row['peak_gb']:.2f}",
                f"{row['step_s']:.2f}",
                "" if memory is None else f"{row['step_s'] / memory:.2f}x",
                f"{row['read']:.1f}",
                f"{row['written']:.1f}",
                "" if busy is None else f"{busy / row['step_s']:.0%}",
                "" if not floor else f"{floor:.2f}",
            ]
        )
    header = ["system", "budget", "durability", "peak GB", "step s", "of in memory", "read B/param", "written B/param"]
    return markdown([*header, "SSD busy", "fio's seconds for the bytes"], lines)


def _named(row: dict) -> str:
    """Return the label of a row, beside system and durability."""
    unclipped = f", updates in the {row.get('update')} pass, no clipping"
    return (
        str(row["budget"] or "")
        + ("" if row.get("recompute", True) else ", nothing recomputed")
        + ("" if row.get("clips", True) else unclipped)
    )


def faults(rows: list[dict]) -> list[str]:
    """Return the limits that were missed, as far as this run has figures for them."""
    found = [f"{row['system']} {row['budget']}: skipped" for row in rows if "skipped" in row and row["budget"]]
    done = [row for row in rows if "step_s" in row]
    ours = [row for row in done if row["system"] == "memascend" and row.get("clips", True)]
    curves = {kind: [row for row in ours if row["durability"] == kind] for kind in DURABILITIES}
    memory = next((row for row in done if row["system"] == "in-memory-exact"), None)
    for kind, curve in curves.items():
        points = sorted((row for row in curve if "beside" not in row), key=lambda row: row["host_memory_bytes"])
        for less, more in pairwise(points):
            before, after = (row["read"] + row["written"] for row in (less, more))
            if after > before * MONOTONE_SLACK:
                found.append(
                    f"{kind}: {after:.2f} bytes a parameter at {more['budget']}, {before:.2f} with less memory"
                )
        alike = [row for row in curve if row.get("recompute") is False]
        if alike and memory and kind in MEMORY_LIMITS:
            most = alike[-1]
            ratio = most["step_s"] / memory["step_s"]
            if ratio > MEMORY_LIMITS[kind]:
                found.append(f"{kind} at {most['budget']}: {ratio:.2f}x of in memory, at most {MEMORY_LIMITS[kind]}x")
            if kind == "none" and most["read"] + most["written"] > 0:
                found.append(f"none at {most['budget']}: {most['read'] + most['written']:.2f} bytes a parameter")
    for row in ours:
        length = 0 if memory is None else min(len(row["losses"]), len(memory["losses"]))
        if memory and row["losses"][:length] != memory["losses"][:length]:
            found.append(f"{row['budget']} {row['durability']}: other losses than in memory")
        if row.get("fio_s") and row["busy_s"] > 0.95 * row["step_s"] and row["busy_s"] > SSD_LIMIT * row["fio_s"]:
            found.append(
                f"{row['budget']} {row['durability']}: the SSD took {row['busy_s']:.2f} s, fio {row['fio_s']:.2f} s"
            )
    unclipped = [row for row in done if not row.get("clips", True)]
    for forward, backward in zip(unclipped[::2], unclipped[1::2], strict=False):
        if forward["losses"] != backward["losses"]:
            found.append(f"{backward['budget']}: other losses with updates in the backward pass")
        if backward["step_s"] > forward["step_s"]:
            ratio = backward["step_s"] / forward["step_s"]
            found.append(f"{backward['budget']}: updates in the backward pass take {ratio:.2f}x")
    infinity = next((row for row in done if row["system"] == "zero-infinity"), None)
    for row in ours:
        limit = {"zero-infinity": EQUAL_MEMORY_LIMIT, "zero-offload": 1.0}.get(row.get("beside", ""))
        peer = next((one for one in done if one["system"] == row.get("beside")), None)
        if peer and limit and row["step_s"] > limit * peer["step_s"]:
            found.append(f"beside {row['beside']}: {row['step_s'] / peer['step_s']:.2f}x its step, at most {limit}x")
        if infinity and row["budget"] == "least" and row["step_s"] > LEAST_LIMIT * infinity["step_s"]:
            ratio = row["step_s"] / infinity["step_s"]
            found.append(f"least, {row['durability']}: {ratio:.2f}x ZeRO-Infinity's step, at most {LEAST_LIMIT}x")
    return found


def benchmark(args: argparse.Namespace, workdir: Path) -> int:
    bench = Bench(args, workdir)
    about = machine(workdir)
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    bench.measure("in-memory-exact")
    if "curve" in args.parts:
        bench.curve()
    if "updates" in args.parts:
        bench.updates()
    if args.deepspeed_python:
        bench.peers()
    print("\n" + table(bench.rows) + "\n")
    missed = faults(bench.rows)
    results = {
        "machine": about,
        "model": args.model,
        "dtype": args.dtype,
        "tokens": TOKENS,
        "rows": bench.rows,
    }
    return finish({**results, "missed": missed}, args.json, missed) if args.check else finish(results, args.json, [])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.51b")
    text = "host memory, or least or overlapping (default: %(default)s)"
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=list(BUDGETS), metavar="A,B", help=text)
    text = "of step, every:N, none (default: %(default)s)"
    parser.add_argument(
        "--durability", type=lambda text: text.split(","), default=list(DURABILITIES), metavar="A,B", help=text
    )
    parts = ("curve", "updates")
    text = "what is measured beside DeepSpeed, of curve, updates (default: both)"
    parser.add_argument("--parts", type=lambda text: text.split(","), default=parts, metavar="A,B", help=text)
    text = "of weights; float32 is for processors without bfloat16, and without DeepSpeed (default: %(default)s)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=text)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, where every step is durable or none is")
    parser.add_argument("--workdir", type=Path, help="where models and stores go; models are kept for the next run")
    parser.add_argument("--deepspeed-python", metavar="PATH", help="an interpreter that has deepspeed")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and machine here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one configuration")
    args = parser.parse_args()
    if args.deepspeed_python and args.dtype != "bfloat16":
        parser.error("DeepSpeed runs in bfloat16: leave --dtype out, or --deepspeed-python")
    return args


def main() -> int:
    args = arguments()
    return in_workdir(args.workdir, partial(benchmark, args))


if __name__ == "__main__":
    run(main)
