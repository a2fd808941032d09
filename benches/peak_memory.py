#!/usr/bin/env python
"""Peak host memory, step time and SSD traffic per step: memascend beside in-memory and ZeRO-Infinity.

    python benches/peak_memory.py                          # 0.51b, memascend and in-memory
    python benches/peak_memory.py --models depth-8,depth-16,depth-32,depth-64 --systems memascend --check
    python benches/peak_memory.py --models narrow-4,narrow-12,narrow-24,narrow-48 --tokens 64 \\
        --systems memascend --host-memory 120MiB --check
    python benches/peak_memory.py --models 0.51b,1.6b --systems memascend,zero-infinity \\
        --deepspeed-python DS_VENV/bin/python --json benches/results/peak_memory.json

Each configuration runs in a process of its own. Memory is that process's VmHWM less its import baseline:
its VmHWM right after importing torch, transformers and LlamaForCausalLM, bytecode already compiled, before
the system under test is imported. It covers everything from there on: loading, planning, every step, closing.
A step lasts from step boundary to step boundary (memascend's update is deferred into the next forward, so
its "forward" contains the update before it). Times and bytes are medians over the measured steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from _common import (
    GB,
    ChildFailed,
    fio,
    in_workdir,
    machine,
    markdown,
    mem_available,
    run,
)
from _common import start as start_child
from _llama import SEED, parameter_count
from _peak_systems import RUNS, TOKENS, child, words

# name: hidden, intermediate, layers, heads, key/value heads
SHAPES = {
    "tiny": (256, 704, 4, 4, 2),  # for trying the script out
    "0.51b": (1536, 4096, 16, 24, 12),
    "1.6b": (2560, 6784, 20, 40, 20),
    "3b": (3072, 8192, 28, 24, 8),
    **{f"depth-{depth}": (1536, 4096, depth, 24, 12) for depth in (8, 16, 32, 64)},
    # With 64 tokens most activations have less than the 128 KiB from which malloc maps a block by itself.
    **{f"narrow-{depth}": (768, 1024, depth, 12, 12) for depth in (4, 12, 24, 48)},
    # Most of its parameters are the vocabulary's, as of small models of today: take --tokens 1024.
    "vocabulary": (1024, 2816, 6, 16, 8),
}
SYSTEMS = ("memascend", "in-memory", "in-memory-exact", "zero-infinity")
# Bytes a parameter takes, to refuse a run that cannot fit: weight 2, fp32 master, gradient, two moments.
IN_MEMORY_BYTES = 18
# On disk: memascend weight 2, low half 2, moments 8, gradient 2; ZeRO-Infinity weight 2, fp32 for the rest 16.
DISK_BYTES = {"memascend": 14, "zero-infinity": 18, "zero-offload": 0}
# Limits that --check holds the results against
PEAK_LIMIT_GB = {"0.51b": 0.85, "1.6b": 1.35}
STEP_RATIO_LIMIT, SSD_BYTES_LIMIT, FLAT_LIMIT = 0.7, 30.0, 0.03


def start(python: str, job: dict, workdir: Path, limit_s: float) -> dict:
    """Run one child to its end and return its result."""
    name = "-".join(str(job[key]) for key in ("task", "system", "model") if job.get(key))
    environment = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if job.get("system", "").startswith("zero"):
        environment["DS_ACCELERATOR"] = "cpu"
    return start_child([python, __file__, "--child"], job, name, workdir, limit_s, environment)


def refusal(system: str, model: str, args, workdir: Path) -> str | None:
    """Return why a configuration cannot run here, or None."""
    count = parameter_count(SHAPES[model], words(model))
    if system.startswith("zero"):
        try:
            probe = subprocess.run([args.deepspeed_python, "-c", "import deepspeed"], capture_output=True)
            missing = probe.returncode != 0
        except OSError:
            missing = True
        if missing:
            return "that interpreter has no deepspeed (see --deepspeed-python and benches/README.md)"
    if system in ("memascend", "in-memory-exact"):
        code = "import memascend; memascend.AdamW"
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != 0:
            return "this interpreter has no memascend (pip install the wheel first)"
    if system.startswith("in-memory"):
        need, have = count * IN_MEMORY_BYTES, mem_available()
        return f"does not fit: about {need / GB:.1f} GB, {have / GB:.1f} GB free" if need > have else None
    need, have = count * DISK_BYTES[system], shutil.disk_usage(workdir).free
    return f"the disk is too small: about {need / GB:.1f} GB, {have / GB:.1f} GB free" if need > have else None


def measure(system: str, model: str, args, workdir: Path) -> dict:
    python = args.deepspeed_python if system == "zero-infinity" else sys.executable
    scratch = workdir / "scratch"
    job = {
        "task": "train",
        "system": system,
        "model": model,
        "shape": SHAPES[model],
        "tokens": args.tokens,
        "steps": args.steps,
        "warmup": args.warmup,
        "model_dir": str(model_directory(model, args, workdir)),
        "scratch": str(scratch),
        "host_memory": args.host_memory,
    }
    notes = []
    for zero in (None, {"stage3_prefetch_bucket_size": 0}):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        load = os.getloadavg()[0]
        try:
            if system == "memascend" and job["host_memory"] is None:
                # In a process of its own: the model built for the question would count as memory of the run.
                found = start(python, {**job, "task": "budget"}, workdir, args.timeout)
                job["host_memory"] = found[args.budget]
            raw = start(python, {**job, "zero": zero}, workdir, args.timeout)
            break
        except ChildFailed as error:
            # DeepSpeed 0.19.8 may queue a parameter twice for prefetch where forward turns into backward.
            if zero or system != "zero-infinity" or "already assigned swap buffer" not in str(error):
                raise
            notes.append("ran without prefetch: DeepSpeed asserts 'already assigned swap buffer' with it")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    notes += [notice.replace(str(workdir), "WORKDIR") for notice in raw.pop("notices", [])]
    return {**summary(system, model, raw), "notes": notes, "load_before": load, "raw": raw}


def summary(system: str, model: str, raw: dict) -> dict:
    measured = [step for step in raw["steps"] if step["measured"]]
    count = parameter_count(SHAPES[model], words(model))

    def median(key):
        return statistics.median(step[key] for step in measured)

    def per_parameter(key, side):
        values = [step[key][side] for step in measured if step[key] is not None]
        return statistics.median(values) / count if values else None

    return {
        "system": system,
        "model": model,
        "parameters": count,
        "peak_gb": (raw["hwm_bytes"] - raw["baseline_bytes"]) / GB,
        "baseline_gb": raw["baseline_bytes"] / GB,
        "setup_peak_gb": (raw["setup_hwm_bytes"] - raw["baseline_bytes"]) / GB,
        "setup_s": raw["setup_s"],
        "host_memory_bytes": raw.get("host_memory_bytes"),
        "step_s": median("step_s"),
        "forward_s": median("forward_s"),
        "backward_s": median("backward_s"),
        "optimizer_s": median("optimizer_s"),
        "split": RUNS[system].label,
        "ssd_read_per_parameter": per_parameter("ssd", 0),
        "ssd_written_per_parameter": per_parameter("ssd", 1),
        "disk_read_per_parameter": per_parameter("disk", 0),
        "disk_written_per_parameter": per_parameter("disk", 1),
        "losses": [step["loss"] for step in raw["steps"]],
    }


def model_directory(model: str, args, workdir: Path) -> Path:
    path = workdir / "models" / f"{model}-seed{SEED}"
    if not path.is_dir():
        millions = parameter_count(SHAPES[model], words(model)) / 1e6
        print(f"{model}: writing a random model of {millions:.1f}M parameters", flush=True)
        half = path.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)
        start(
            sys.executable,
            {"task": "write", "model": model, "shape": SHAPES[model], "model_dir": str(half)},
            workdir,
            args.timeout,
        )
        half.rename(path)
    return path


def table(results: list[dict]) -> str:
    reference = {r["model"]: r for r in results if r["system"] == "zero-infinity" and "step_s" in r}

    def number(value, digits=2, suffix=""):
        return "n/a" if value is None else f"{value:.{digits}f}{suffix}"

    def ratio(row, key):
        base = reference.get(row["model"])
        return "" if base is None else f"{row[key] / base[key]:.2f}x"

    rows = []
    for r in results:
        if "step_s" not in r:
            rows.append([r["model"], r["system"], r["skipped"], *[""] * 9])
            continue
        budget = r["host_memory_bytes"]
        rows.append(
            [
                r["model"],
                r["system"],
                "" if budget is None else number(budget / GB, 3),
                number(r["peak_gb"]),
                ratio(r, "peak_gb"),
                number(r["step_s"]),
                ratio(r, "step_s"),
                number(r["forward_s"]) + ("*" if r["system"] == "memascend" else ""),
                f"{number(r['backward_s'])} / {number(r['optimizer_s'])}",
                number(r["ssd_read_per_parameter"], 1),
                number(r["ssd_written_per_parameter"], 1),
                f"{r['losses'][0]:.4f} to {r['losses'][-1]:.4f}",
            ]
        )
    header = [
        "model",
        "system",
        "budget GB",
        "peak GB",
        "vs Z-Inf.",
        "step s",
        "vs Z-Inf.",
        "forward s",
        "backward / optimizer s",
        "SSD read B/param",
        "SSD written B/param",
        "loss",
    ]
    notes = ["Peak: VmHWM above the import baseline, GB = 10^9 bytes. vs Z-Inf.: against zero-infinity, same run."]
    if any(r["system"] == "memascend" for r in results):
        notes.append("* contains the deferred update of the step before.")
    if reference:
        notes.append("SSD bytes: memascend counts its own; zero-infinity's are the kernel's count for its process.")
    return "\n".join([markdown(header, rows), "", *notes])


def checks(results: list[dict]) -> list[tuple[bool, str]]:
    """Return the limits that --check applies, as far as this run holds the numbers for them."""
    by = {(r["system"], r["model"]): r for r in results if "step_s" in r}
    found = []
    for (system, model), r in by.items():
        if system != "memascend":
            continue
        if model in PEAK_LIMIT_GB:
            limit = PEAK_LIMIT_GB[model]
            found.append((r["peak_gb"] <= limit, f"{model}: peak {r['peak_gb']:.3f} GB, at most {limit}"))
        moved = r["ssd_read_per_parameter"] + r["ssd_written_per_parameter"]
        found.append(
            (
                moved <= SSD_BYTES_LIMIT,
                f"{model}: {moved:.1f} SSD bytes/parameter/step, at most {SSD_BYTES_LIMIT:.0f}",
            )
        )
        if zero := by.get(("zero-infinity", model)):
            ratio = r["step_s"] / zero["step_s"]
            found.append(
                (
                    ratio <= STEP_RATIO_LIMIT,
                    f"{model}: step {ratio:.2f}x ZeRO-Infinity's, at most {STEP_RATIO_LIMIT}x",
                )
            )
        if exact := by.get(("in-memory-exact", model)):
            found.append((r["losses"] == exact["losses"], f"{model}: losses equal in-memory-exact's bit for bit"))
    for family in ("depth-", "narrow-"):
        depths = {m: r["peak_gb"] for (s, m), r in by.items() if s == "memascend" and m.startswith(family)}
        if len(depths) < 2:
            continue
        spread = max(depths.values()) / min(depths.values()) - 1
        shown = ", ".join(f"{model.removeprefix(family)}: {peak:.3f}" for model, peak in depths.items())
        found.append(
            (
                spread <= FLAT_LIMIT,
                f"peak GB by depth {{{shown}}}: spread {spread:.1%}, at most {FLAT_LIMIT:.0%}",
            )
        )
    return found


def arguments() -> argparse.Namespace:
    def names(allowed):
        def parse(text):
            for name in text.split(","):
                if name not in allowed:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
            return text.split(",")

        return parse

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError("must be 1 or more")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = [name for name in SHAPES if name != "tiny"]
    parser.add_argument(
        "--systems",
        type=names(SYSTEMS),
        default=["memascend", "in-memory"],
        metavar="A,B",
        help=f"of {', '.join(SYSTEMS)} (default: memascend,in-memory)",
    )
    parser.add_argument(
        "--models",
        type=names(SHAPES),
        default=["0.51b"],
        metavar="A,B",
        help=f"of {', '.join(shown)} (default: 0.51b)",
    )
    parser.add_argument("--steps", type=positive, default=4, help="measured steps (default: 4)")
    parser.add_argument("--warmup", type=positive, default=1, help="steps before them (default: 1)")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--host-memory", metavar="SIZE", help="memascend's budget, instead of --budget")
    help_text = "the least that works, or the least that reads ahead (default: %(default)s)"
    parser.add_argument("--budget", choices=("smallest", "overlapping"), default="overlapping", help=help_text)
    parser.add_argument(
        "--workdir",
        type=Path,
        help="models and stores go here; models are kept for the next run "
        "(default: a temporary directory here, removed at the end)",
    )
    parser.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter that has deepspeed (default: this one)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and machine here")
    parser.add_argument("--fio", action="store_true", help="also measure the disk with fio, before and after")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one configuration (default: 1800)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def benchmark(args, workdir: Path) -> int:
    about = machine(workdir)
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    speed = [fio(workdir)] if args.fio else []
    results = []
    warmed = set()
    for model in args.models:
        for system in args.systems:
            row = {"system": system, "model": model}
            python = args.deepspeed_python if system == "zero-infinity" else sys.executable
            try:
                if reason := refusal(system, model, args, workdir):
                    raise ChildFailed(reason)
                if python not in warmed:  # compiles the bytecode: baselines are of a warm start
                    start(python, {"task": "import"}, workdir, args.timeout)
                    warmed.add(python)
                row = measure(system, model, args, workdir)
                print(
                    f"{model} {system}: peak {row['peak_gb']:.2f} GB above {row['baseline_gb']:.2f}, "
                    f"step {row['step_s']:.2f} s (load before: {row['load_before']:.1f})",
                    flush=True,
                )
                for note in row["notes"]:
                    print(f"  note: {note}", flush=True)
            except ChildFailed as error:
                row["skipped"] = str(error)
                print(f"{model} {system}: skipped: {error}", flush=True)
            results.append(row)
    if args.fio:
        speed.append(fio(workdir))
        print(f"fio before and after: {speed if speed[0] else 'fio is not installed or failed'}")
    print("\n" + table(results) + "\n")
    verdicts = checks(results)
    for passed, line in verdicts:
        print(f"{'pass' if passed else 'FAIL'}  {line}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": about,
            "tokens": args.tokens,
            "steps": args.steps,
            "warmup": args.warmup,
            "fio": speed,
            "results": results,
            "checks": [{"pass": p, "what": w} for p, w in verdicts],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if not args.check:
        return 0
    if not verdicts:
        print("FAIL  --check found nothing to check: no memascend result")
    failed = not verdicts or not all(passed for passed, _ in verdicts)
    return 1 if failed or any("skipped" in r for r in results if r["system"] == "memascend") else 0


def main() -> int:
    args = arguments()
    if args.child:
        job = json.loads(args.child)
        Path(job["result"]).write_text(json.dumps(child(job)))
        sys.stdout.flush()
        os._exit(0)  # DeepSpeed's threads and process group must not hold the exit up
    return in_workdir(args.workdir, partial(benchmark, args))


if __name__ == "__main__":
    run(main)
