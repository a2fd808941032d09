#!/usr/bin/env python
"""Bytes and seconds of a step of 1 to 16 micro-batches: through each layer while it is there, and accumulated.

    python benches/micro_batches.py --workdir DIR --json benches/results/micro_batches.json      # 0.51b
    python benches/micro_batches.py --model vocabulary --counts 1,8 --tokens 512 --memory 1GiB
    python benches/micro_batches.py --counts 8 --memory 2GiB --spare-memory activations --systems "sliced,in memory"
    python benches/micro_batches.py --model tiny --counts 1,2,4 --tokens 64 --rounds 1           # to try the script out

A step takes N micro-batches of one sequence. "sliced" calls the model once with all of them (micro_batch_size=1),
"accumulated" N times, "in memory" N times without a store (AdamW in float32). Each runs in a process of its own, by
turns, with the budget of --memory, or the least that reads ahead, and without durable steps. Gradients are clipped in
every system; with --update backward in none. The time of a step is the median of the rounds' medians; memory is the
peak above the imports. Beside the bytes stands the forecast of `memascend.forecast`, and beside the peak the plan with
its estimate of PyTorch's share. With --check: sliced weights, states and gradients within 1.05 of one micro-batch's,
the forecast within 3% of the measured bytes, and the peak grows by no more than the plan says and a tenth of the least
number's peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from _common import GB, end_as_child, finish, in_workdir, machine, markdown, rss, run, size
from _common import start as start_child
from _llama import SEED, parameter_count
from _peak_systems import RUNS, budgets, words
from peak_memory import SHAPES, model_directory

SYSTEMS = ("sliced", "accumulated", "in memory")
#: With DeepSpeed installed: parameters and states on NVMe, gradient_accumulation_steps of N.
PEER = "zero-infinity"
#: Limit of the traffic of any number of micro-batches, as a share of one's weights, states and gradients; and how far a
#: forecast may be off.
MOVED_MOST, FORECAST_OFF = 1.05, 0.03
#: By how much of the least number's peak a peak may grow beside what the plan says.
PEAK_GROWTH = 0.1
#: Counters of the run, of calls of layers whose activations stayed in memory and that were computed again.
KEPT = ("layers_kept", "layers_recomputed", "activation_bytes_kept_peak")


# --- the child: one system, one number of micro-batches ---


def child(job: dict) -> dict:
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401

    baseline = rss()["hwm"]
    count, sliced = job["count"], job["system"] == "sliced"
    kind = {"in memory": "in-memory", PEER: PEER}.get(job["system"], "memascend")
    own = {"micro_batch_size": 1} if sliced else {"accumulate": count} if kind == PEER else {}
    training = RUNS[kind](job["model_dir"], job["scratch"], job | own)
    shape = (count, job["tokens"])
    ids = torch.randint(0, words(job["model"]), shape, generator=torch.Generator().manual_seed(SEED))
    steps = []
    for number in range(job["warmup"] + job["steps"]):
        begin, before = time.perf_counter(), training.ssd_bytes() or (0, 0)
        total = 0.0
        given = ids if number >= job["warmup"] else ids[: job["warmup_batches"]]
        parts = (given,) if sliced else given.split(1)
        for part in parts:
            loss = training.model(input_ids=part, labels=part).loss
            share = len(part) / len(given)
            # DeepSpeed divides by its accumulation steps itself, and takes a step at the last of them.
            training.backward(loss if kind == PEER else loss * share)
            if kind == PEER and part is not parts[-1]:
                training.step()
            total += float(loss.detach()) * share
            del loss
        training.step()
        moved = [after - earlier for after, earlier in zip(training.ssd_bytes() or (0, 0), before, strict=True)]
        steps.append({"step_s": time.perf_counter() - begin, "read": moved[0], "written": moved[1], "loss": total})
        print(f"{job['system']} {count}: {steps[-1]}", flush=True)
    details = training.close()
    return {"peak_bytes": rss()["hwm"] - baseline, "steps": steps[job["warmup"] :], **details}


# --- the parent: runs children, compares ---


def planned(model_dir: str, args: argparse.Namespace, count: int, sliced: bool) -> dict[str, int]:
    """Return the bytes of a step by `memascend.forecast`, those without activations, and the planned memory."""
    from memascend.forecast.forecast import forecast

    work = {"batch_size": count, "micro_batch_size": 1} if sliced else {"batch_size": 1, "grad_accum": count}
    options = {"budget": args.memory, "durability": "none"}
    options |= {name: getattr(args, name) for name in ("update", "dtype", "spare_memory")}
    moved = forecast(Path(model_dir), seq_len=args.tokens, **options, **work)
    parts = [moved["ssd_traffic"]["planned"][direction] for direction in ("read", "written")]
    total = sum(part["total_bytes"] for part in parts)
    held = moved["host_memory"]["total_bytes"] + moved["host_memory"]["kept_layers_bytes"]
    memory = {"plan": held, "pytorch": moved["pytorch"]["estimated_bytes"]}
    return {"total": total, "without_activations": total - sum(part["activations_bytes"] for part in parts)} | memory


def measure(model_dir: str, workdir: Path, args: argparse.Namespace, system: str, count: int) -> dict:
    scratch = workdir / "scratch"
    scratch.mkdir(exist_ok=True)
    job = {
        "system": system,
        "count": count,
        "model": args.model,
        "model_dir": model_dir,
        "shape": SHAPES[args.model],
        "scratch": str(scratch),
        "tokens": args.tokens,
        "host_memory": args.memory,
        "durability": "none",
        "update": args.update,
        "dtype": args.dtype,
        "spare_memory": args.spare_memory,
        "clips": args.update == "forward",
        "warmup": args.warmup,
        "warmup_batches": args.warmup_batches,
        "steps": args.steps,
    }
    environment = {"DS_ACCELERATOR": "cpu"} if system == PEER else {}
    raw = start_child([sys.executable, __file__, "--child"], job, "micro_batches", workdir, args.timeout, environment)
    return {
        "step_s": statistics.median(step["step_s"] for step in raw["steps"]),
        "read": statistics.mean(step["read"] for step in raw["steps"]),
        "written": statistics.mean(step["written"] for step in raw["steps"]),
        "peak_bytes": raw["peak_bytes"],
        "losses": [step["loss"] for step in raw["steps"]],
        **{name: raw[name] for name in KEPT if name in raw},
    }


def compare(workdir: Path, args: argparse.Namespace) -> int:
    model_dir = str(model_directory(args.model, args, workdir))
    parameters = parameter_count(SHAPES[args.model], words(args.model))
    args.memory = args.memory or budgets(model_dir, args.tokens, args.update, args.dtype)["overlapping"]
    measured: dict[tuple[str, int], list[dict]] = {}
    for number in range(args.rounds):
        for count in args.counts:
            for system in args.systems:
                runs = measured.setdefault((system, count), [])
                runs.append(measure(model_dir, workdir, args, system, count))
                print(f"round {number}: {system}, {count}: {runs[-1]}", flush=True)
    entries, rows, missed = [], [], []
    for (system, count), runs in measured.items():
        entry = {
            "system": system,
            "micro_batches": count,
            "step_s": statistics.median(each["step_s"] for each in runs),
            "moved": statistics.mean(each["read"] + each["written"] for each in runs),
            "peak_bytes": max(each["peak_bytes"] for each in runs),
            "runs": runs,
        }
        if system not in ("in memory", PEER):
            entry["forecast"] = planned(model_dir, args, count, system == "sliced")
        entries.append(entry)
        rows.append(_row(entry, args.tokens, parameters))
    missed = _missed(entries) if args.check else []
    header = ["micro-batches", "", "step, s", "us a token", "GB a step", "bytes a parameter", "KB a token", "forecast"]
    print("\n" + markdown([*header, "peak, GB", "planned", "layers computed again"], rows))
    results = {
        "machine": machine(workdir),
        "model": args.model,
        "parameters": parameters,
        "tokens": args.tokens,
        "host_memory": args.memory,
        "update": args.update,
        "dtype": args.dtype,
        "spare_memory": args.spare_memory,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "rounds": args.rounds,
        "steps": args.steps,
        "entries": entries,
    }
    return finish(results, args.json, missed)


def _row(entry: dict, tokens: int, parameters: int) -> list[str]:
    in_step = entry["micro_batches"] * tokens
    return [
        str(entry["micro_batches"]),
        entry["system"],
        f"{entry['step_s']:.2f}",
        f"{entry['step_s'] / in_step * 1e6:.0f}",
        f"{entry['moved'] / GB:.2f}",
        f"{entry['moved'] / parameters:.1f}",
        f"{entry['moved'] / in_step / 1e3:.1f}",
        f"{entry['forecast']['total'] / GB:.2f}" if "forecast" in entry else "",
        f"{entry['peak_bytes'] / GB:.2f}",
        f"{_planned_memory(entry) / GB:.2f}" if "forecast" in entry else "",
        _computed_again(entry["runs"][-1]),
    ]


def _computed_again(run: dict) -> str:
    """Return how many calls of layers a run has computed again, of how many; "" of a system that does not count."""
    if "layers_kept" not in run:
        return ""
    return f"{run['layers_recomputed']} of {run['layers_recomputed'] + run['layers_kept']}"


def _planned_memory(entry: dict) -> int:
    return entry["forecast"]["plan"] + entry["forecast"]["pytorch"]


def _missed(entries: list[dict]) -> list[str]:
    """Return the measurements above the limits, or off the forecast."""
    missed = []
    sliced = {entry["micro_batches"]: entry for entry in entries if entry["system"] == "sliced"}
    least = min(sliced, default=0)
    for count, entry in sliced.items():
        of_activations = entry["forecast"]["total"] - entry["forecast"]["without_activations"]
        moved = entry["moved"] - of_activations
        once = sliced[least]["forecast"]["without_activations"]
        if moved > MOVED_MOST * once:
            missed.append(f"{count} micro-batches move {moved / once:.2f} of what {least} does, activations apart")
        grown = entry["peak_bytes"] - sliced[least]["peak_bytes"]
        told = _planned_memory(entry) - _planned_memory(sliced[least])
        if grown > told + PEAK_GROWTH * sliced[least]["peak_bytes"]:
            more = f"{grown / GB:.2f} GB more than {least}; the plan says {told / GB:.2f}"
            missed.append(f"{count} micro-batches take {more}")
    for entry in (entry for entry in entries if "forecast" in entry):
        off = entry["moved"] / max(entry["forecast"]["total"], 1) - 1
        if abs(off) > FORECAST_OFF:
            missed.append(f"{entry['system']} {entry['micro_batches']}: {off:+.1%} beside the forecast")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--model", choices=SHAPES, default="0.51b")
    parser.add_argument("--counts", type=numbers, default=[1, 2, 4, 8, 16], help="micro-batches of a step")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--memory", type=size, help="host memory (default: the least that reads ahead)")
    parser.add_argument("--update", choices=("forward", "backward"), default="forward", help="see memascend.offload")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    text = "what memory beyond the least is for: see memascend.offload"
    parser.add_argument("--spare-memory", choices=("states", "activations"), default="states", help=text)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default: 2)")
    text = "micro-batches of a warm-up step, where bytes are counted alone (default: all)"
    parser.add_argument("--warmup-batches", type=int, help=text)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--workdir", type=Path, help="on the drive to measure; empty (default: made here)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return in_workdir(args.workdir, lambda workdir: compare(workdir, args))


if __name__ == "__main__":
    end_as_child(child)
    run(main)
