#!/usr/bin/env python
"""The drive in the course of a training step: bytes in flight, kernels, waits, and every idle gap.

    python benches/timeline.py --workdir DIR                                  # 0.51b at three budgets
    python benches/timeline.py --budgets least,1GiB --durability none --json OUT.json --svg OUT.svg
    python benches/timeline.py --limit 400MB --check    # root, cgroup v1: a drive so slow that it surely binds

Each budget runs in a process of its own. After the warm-up the engine records every request, flush and kernel, and the
program every span of `memascend.common.timeline`, for a few steps. Of each step the table has:

- the share in which the drive was idle (no request in flight, nothing being flushed), only read, only wrote, did both,
  or only flushed;
- whether the drive binds: it had something to do for longer than the caller computed and waited for kernels;
- the gaps: idle time by the phase of the step and by the activity or wait of the caller, and for how much of it
  kernels ran. "forward" has the deferred update in it, "turn" is from the end of the last layer to the first layer that
  is computed again, "end" is clipping, `step()` and `zero_grad()`, with the wait for the commit.

The plot is of the step of median idleness.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import shutil
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from functools import partial
from pathlib import Path

from _common import ChildFailed, enter, finish, in_workdir, machine, markdown, run, size, slowed
from _common import start as start_child
from _llama import SEED, parameter_count
from _peak_systems import MemascendRun, words
from peak_memory import SHAPES, model_directory
from peak_memory import start as start_peak_memory
from tiers import fio_mix

BUDGETS = ("least", "overlapping", "1GiB")
#: Of a step that the drive binds, the share in which it may be idle.
IDLE_LIMIT = 0.05
#: Spans that are recorded, of each volume and of the kernels, at most.
SPANS_MOST = 2_000_000
#: Points of a plot.
BINS = 400
PHASES = ("forward", "turn", "backward", "end")
ACTIVITIES = ("read", "write", "flush", "kernel")
#: Activities of the caller, as drawn: spans by how their names begin, the innermost first.
CALLER = {
    "wait for SSD": "waits for the SSD",
    "wait for CPU": "waits for the update",
    "gradient of": "puts a gradient aside",
    "find factors": "finds APOLLO's factors",
}
COMPUTES = "computes"


# --- the child: one budget, one process ---


def child(job: dict) -> dict:
    import torch

    from memascend._memascend import ForTests
    from memascend.common import timeline
    from memascend.session.api import offload_of

    training = MemascendRun(job["model_dir"], job["scratch"], job)
    runtime = offload_of(training.model).runtime
    shape = (job["micro_batches"], job["tokens"])
    ids = torch.randint(0, words(job["model"]), shape, generator=torch.Generator().manual_seed(SEED))
    marks: list[int] = []
    layers = training.model.model.layers
    layers[-1].register_forward_hook(lambda *_: marks.append(time.perf_counter_ns()) if len(marks) == 1 else None)
    steps = []

    def step() -> None:
        marks[:] = [time.perf_counter_ns()]
        before = training.ssd_bytes()
        loss = training.model(input_ids=ids, labels=ids).loss
        training.backward(loss)
        backward = time.perf_counter_ns()
        training.step()
        moved = [after - earlier for after, earlier in zip(training.ssd_bytes(), before, strict=True)]
        end = time.perf_counter_ns()
        steps.append({"marks": [*marks[:2], backward, end], "loss": float(loss.detach()), "moved": moved})

    for _ in range(job["warmup"]):
        step()
    del steps[:]
    with timeline.noted() as calls:
        ForTests.begin_recording(runtime, SPANS_MOST)
        for _ in range(job["steps"]):
            step()
        now = time.perf_counter_ns()
        recorded, missed = ForTests.end_recording(runtime)
    spans = [[kind, volume, nbytes, now - began, now - ended] for kind, volume, nbytes, began, ended in recorded]
    return {"steps": steps, "spans": spans, "calls": calls, "missed": missed, **training.close()}


# --- the parent: evaluation of the records ---


class States:
    """A step function of time: the value of the last change at or before a time."""

    def __init__(self, changes: list[tuple[int, object]]) -> None:
        self.changes = sorted(changes, key=lambda change: change[0])
        self.times = [at for at, _ in self.changes]

    def at(self, time_ns: int) -> object:
        return self.changes[max(0, bisect_right(self.times, time_ns) - 1)][1]


def innermost(calls: list[tuple[str, int, int, int]], thread: int) -> States:
    """Name the innermost span of a thread at any time, without the unit's name; "" outside of all."""
    inside: list[tuple[str, int]] = []
    changes: list[tuple[int, object]] = [(0, "")]
    for name, began, ended, _ in sorted((call for call in calls if call[3] == thread), key=lambda c: (c[1], -c[2])):
        while inside and inside[-1][1] <= began:
            _, closed = inside.pop()
            changes.append((closed, inside[-1][0] if inside else ""))
        plain = re.match(r"(wait for .*|fetch|gradient of|rows of|recompute|optimizer step|.*)", name)[0]
        around = [outer for outer, _ in inside[-1:] if plain.startswith("wait")]
        inside.append((": ".join([*around, plain]), ended))
        changes.append((began, inside[-1][0]))
    while inside:
        _, closed = inside.pop()
        changes.append((closed, inside[-1][0] if inside else ""))
    return States(changes)


def analysed(step: dict, raw: dict, calls: States, recomputed: list[int]) -> dict:
    """Divide one step's time by transfers in flight, and its idle time by phase and the caller's activity."""
    begin, turn, backward_ended, end = step["marks"]
    after_turn = recomputed[bisect_right(recomputed, turn)] if recomputed and recomputed[-1] > turn else turn
    phases = States([(begin, "forward"), (turn, "turn"), (after_turn, "backward"), (backward_ended, "end")])
    changes = defaultdict(lambda: [0, 0, 0, 0])
    number = {"read": 0, "write": 1, "flush": 2, "manifest": 2, "kernel": 3}
    for activity, _, _, began, ended in raw["spans"]:
        if began < end and ended > begin:
            changes[max(began, begin)][number[activity]] += 1
            changes[min(ended, end)][number[activity]] -= 1
    edges = {at for at in (*calls.times, *phases.times) if begin < at < end}
    now, under_way = begin, [0, 0, 0, 0]
    shares: dict[str, int] = defaultdict(int)
    by_phase: dict[str, dict[str, int]] = {phase: defaultdict(int) for phase in PHASES}
    gaps: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    open_gap: tuple[str, str] | None = None
    for at in sorted({*changes, *edges, end}):
        length = at - now
        if length > 0:
            reads, writes, flushes, kernels = under_way
            kind = "both" if reads and writes else "reads" if reads else "writes" if writes else "flush"
            kind = kind if reads or writes or flushes else "idle"
            shares[kind] += length
            shares["kernels"] += length if kernels else 0
            doing = str(calls.at(now))
            # A wait in which kernels run is theirs, and so is computation that a wait does not interrupt.
            phase = by_phase[str(phases.at(now))]
            phase["waits" if "wait" in doing and not kernels else "works"] += length
            phase["all"] += length
            phase["idle"] += length if kind == "idle" else 0
            if kind == "idle":
                key = (str(phases.at(now)), doing or COMPUTES)
                gaps[key][0] += length
                gaps[key][1] += length if kernels else 0
                gaps[key][2] += key != open_gap
                open_gap = key
            else:
                open_gap = None
        now = at
        if at in changes:
            under_way = [count + change for count, change in zip(under_way, changes[at], strict=True)]
    total = end - begin
    in_use = total - shares["idle"]
    works = sum(phase["works"] for phase in by_phase.values())
    listed = [
        {"phase": phase, "caller": doing, "seconds": idle / 1e9, "kernels_s": kernels / 1e9, "count": count}
        for (phase, doing), (idle, kernels, count) in sorted(gaps.items(), key=lambda item: -item[1][0])
    ]
    return {
        "step_s": total / 1e9,
        "shares": {kind: shares[kind] / total for kind in ("idle", "reads", "writes", "both", "flush", "kernels")},
        "works": works / total,
        "drive_binds": in_use > works,
        "phases": {
            phase: {"seconds": spent["all"] / 1e9, "works_s": spent["works"] / 1e9, "idle_s": spent["idle"] / 1e9}
            for phase, spent in by_phase.items()
        },
        "gaps": listed,
        "moved": step["moved"],
        "loss": step["loss"],
    }


def drawn(step: dict, raw: dict, calls: States, phases: dict) -> dict:
    """Return the series of a plot of one step, in `BINS` equal parts of its time."""
    begin, end = step["marks"][0], step["marks"][-1]
    width = (end - begin) / BINS
    lanes = {activity: [0.0] * BINS for activity in ACTIVITIES}
    for activity, _, nbytes, began, ended in raw["spans"]:
        activity = "flush" if activity == "manifest" else activity
        began, ended = max(began, begin), min(ended, end)
        if began >= ended:
            continue
        weight = nbytes / 2**20 if activity in ("read", "write") else 1.0
        for index in range(int((began - begin) / width), min(BINS, int((ended - begin) / width) + 1)):
            low, high = begin + index * width, begin + (index + 1) * width
            lanes[activity][index] += weight * max(0.0, min(ended, high) - max(began, low)) / width
    doing = []
    for index in range(BINS):
        name = str(calls.at(int(begin + (index + 0.5) * width)))
        inner = name.rpartition(": ")[2]
        doing.append(next((shown for start, shown in CALLER.items() if inner.startswith(start)), COMPUTES))
    lanes = {activity: [round(value, 3) for value in values] for activity, values in lanes.items()}
    return {
        "seconds": (end - begin) / 1e9,
        "phases_s": {phase: spent["seconds"] for phase, spent in phases.items()},
        "lanes": lanes,
        "caller": doing,
    }


# --- the plot ---

WIDTH, LEFT, RIGHT = 940, 150, 20
LANE, GAP, ROW = 56, 6, 12
COLOURS = {
    "read": "#4051b5",
    "write": "#c77d2e",
    "kernel": "#3c8d5a",
    "flush": "#b03a48",
    COMPUTES: "#5b6b7b",
    "waits for the SSD": "#d9dee4",
    "waits for the update": "#a9cfb6",
    "puts a gradient aside": "#e0b98a",
    "finds APOLLO's factors": "#8a6bb8",
}


def drawing(rows: list[dict]) -> str:
    """Return the timelines as SVG: text, so that it needs no library and is the same on every machine."""
    panel = 2 * (LANE + GAP) + 3 * (ROW + GAP) + 66
    height = len(rows) * panel + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        "<title>What the drive, the update kernels and the program do in the course of one training step</title>",
        "<style>text { font: 12px sans-serif; fill: #24292f } .head { font-weight: bold } .faint { fill: #6e7781 }",
        "</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, row in enumerate(rows):
        lines += _panel(row, number * panel + 10)
    x = LEFT
    for name in (COMPUTES, *CALLER.values()):
        lines.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{COLOURS[name]}"/>')
        lines.append(f'<text x="{x + 17}" y="{height - 12}">{name}</text>')
        x += 44 + 7 * len(name)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(row: dict, top: int) -> list[str]:
    plot, shares = row["plot"], row["shares"]
    width = WIDTH - LEFT - RIGHT
    heading = (
        f"{html.escape(row['budget'])}: {plot['seconds']:.1f} s, the drive idle for {shares['idle']:.0%}, only reads "
        f"{shares['reads']:.0%}, only writes {shares['writes']:.0%}, both {shares['both']:.0%}"
    )
    lines = [f'<text class="head" x="{LEFT}" y="{top + 12}">{heading}</text>']
    at = LEFT
    y = top + 34
    bottom = y + 2 * (LANE + GAP) + 3 * (ROW + GAP)
    for phase, seconds in plot["phases_s"].items():
        lines.append(f'<path d="M{at:.1f} {y - 14}V{bottom}" stroke="#d0d7de"/>')
        if seconds > 0.08 * plot["seconds"] or phase == "forward":
            lines.append(f'<text class="faint" x="{at + 3:.1f}" y="{y - 5}">{phase}</text>')
        at += width * seconds / plot["seconds"]
    most = max(*plot["lanes"]["read"], *plot["lanes"]["write"], 1.0)
    for activity, title in (("read", "reads"), ("write", "writes")):
        values = plot["lanes"][activity]
        points = " ".join(
            f"{LEFT + width * (index + side) / BINS:.1f} {y + LANE * (1 - value / most):.1f}"
            for index, value in enumerate(values)
            for side in (0, 1)
        )
        path = f"M{LEFT} {y + LANE}L{points} {LEFT + width} {y + LANE}Z"
        lines.append(f'<path d="{path}" fill="{COLOURS[activity]}"/>')
        lines.append(f'<text x="10" y="{y + LANE / 2:.0f}">{title} in flight</text>')
        lines.append(f'<text class="faint" x="10" y="{y + LANE / 2 + 15:.0f}">0 to {most:.0f} MiB</text>')
        y += LANE + GAP
    for activity, title in (("kernel", "update kernels"), ("flush", "flush and manifest")):
        # In fifths, so that neighbours join; anything above zero is visible.
        values = [math.ceil(5 * min(1.0, value)) / 5 for value in plot["lanes"][activity]]
        lines += _strip(y, [(COLOURS[activity], value) for value in values])
        lines.append(f'<text x="10" y="{y + ROW - 1}">{title}</text>')
        y += ROW + GAP
    lines += _strip(y, [(COLOURS[name], 1.0) for name in plot["caller"]])
    lines.append(f'<text x="10" y="{y + ROW - 1}">the program</text>')
    return lines


def _strip(y: int, cells: list[tuple[str, float]]) -> list[str]:
    """Return a row of coloured cells; neighbours that are alike are one."""
    width, lines, first = WIDTH - LEFT - RIGHT, [], 0
    for index in range(1, len(cells) + 1):
        if index < len(cells) and cells[index] == cells[first]:
            continue
        colour, opacity = cells[first]
        if opacity:
            x, length = LEFT + width * first / BINS, width * (index - first) / BINS
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{ROW}" fill="{colour}" '
                f'fill-opacity="{opacity:.1f}"/>'
            )
        first = index
    return lines


# --- the parent: runs children ---


def measure(budget: str, host_memory: str | int, args: argparse.Namespace, workdir: Path) -> dict:
    """Run one budget and return its row; the step of median idleness is drawn."""
    scratch = workdir / "scratch"
    job = {
        "model": args.model,
        "model_dir": str(model_directory(args.model, args, workdir)),
        "scratch": str(scratch),
        "host_memory": host_memory,
        "durability": args.durability,
        "optimizer": args.optimizer,
        "rank": 1 if args.optimizer == "apollo-mini" else args.rank,
        "tokens": args.tokens,
        "micro_batches": args.micro_batches,
        **({"micro_batch_size": 1} if args.micro_batches > 1 else {}),
        "update": args.update,
        "clips": args.update == "forward",
        "warmup": 2,
        "steps": args.steps,
    }
    row: dict = {"budget": budget, "durability": args.durability}
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with slowed(scratch, args.limit) as group:
            job["cgroup"] = None if group is None else str(group)
            raw = start_child([sys.executable, __file__, "--child"], job, "timeline", workdir, args.timeout, {})
    except ChildFailed as error:
        print(f"{budget}: skipped: {error}", flush=True)
        return row | {"skipped": str(error)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        (workdir / "timeline.result.json").unlink(missing_ok=True)
    if raw["missed"]:
        raise SystemExit(f"{raw['missed']} spans were not recorded: take fewer steps")
    threads = [call[3] for call in raw["calls"] if call[0] == "optimizer step"]
    calls = innermost(raw["calls"], threads[0])
    recomputed = sorted(call[1] for call in raw["calls"] if call[0] == "recompute")
    steps = [analysed(step, raw, calls, recomputed) for step in raw["steps"]]
    middle = sorted(range(len(steps)), key=lambda index: steps[index]["shares"]["idle"])[(len(steps) - 1) // 2]
    row |= steps[middle] | {"steps": steps, "host_memory_bytes": raw["host_memory_bytes"], "engine": raw["engine"]}
    row["plot"] = drawn(raw["steps"][middle], raw, calls, steps[middle]["phases"])
    row["idle_median"] = statistics.median(step["shares"]["idle"] for step in steps)
    total = sum(row["moved"])
    row["bytes_per_second"] = total / row["step_s"]
    if args.fio and total and args.limit is None:
        rate = fio_mix(workdir, round(100 * row["moved"][0] / total))
        row["fio_s"] = total / rate if rate else None
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in row["shares"].items())
    print(f"{budget} {args.durability}: {row['step_s']:.2f} s, {shares}", flush=True)
    for phase, spent in row["phases"].items():
        print(
            f"    {phase}: {spent['seconds']:.2f} s, of which the program works {spent['works_s']:.2f} s, "
            f"the drive is idle {spent['idle_s']:.2f} s",
            flush=True,
        )
    for gap in row["gaps"][: args.gaps]:
        print(
            f"    {gap['seconds']:.3f} s in {gap['count']} gaps, {gap['phase']}: {gap['caller']} "
            f"(kernels {gap['kernels_s']:.3f} s)",
            flush=True,
        )
    return row


def table(rows: list[dict], parameters: int) -> str:
    header = ["budget", "step s", "idle", "only reads", "only writes", "both", "only a flush", "program works", "binds"]
    lines = []
    for row in rows:
        if "skipped" in row:
            lines.append([row["budget"], f"skipped: {row['skipped']}", *[""] * 7, ""])
            continue
        kinds = ("idle", "reads", "writes", "both", "flush")
        fio_s = row.get("fio_s")
        lines.append(
            [
                row["budget"],
                f"{row['step_s']:.2f}",
                *(f"{row['shares'][kind]:.1%}" for kind in kinds),
                f"{row['works']:.0%}",
                "drive" if row["drive_binds"] else "program",
                f"{sum(row['moved']) / parameters:.1f}",
                f"{fio_s:.2f}" if fio_s else "",
            ]
        )
    return markdown([*header, "B/param", "fio's seconds"], lines)


def benchmark(args: argparse.Namespace, workdir: Path) -> int:
    about = machine(workdir)
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    model_dir = str(model_directory(args.model, args, workdir))
    budget_job = {"task": "budget", "model": args.model, "model_dir": model_dir, "tokens": args.tokens}
    budget_job["update"] = args.update
    found = start_peak_memory(sys.executable, budget_job, workdir, args.timeout)
    named: dict[str, str | int] = {"least": found["smallest"], "overlapping": found["overlapping"]}
    rows = [measure(budget, named.get(budget, budget), args, workdir) for budget in args.budgets]
    parameters = parameter_count(SHAPES[args.model], words(args.model))
    print("\n" + table(rows, parameters) + "\n")
    done = [row for row in rows if "step_s" in row]
    if args.svg is not None:
        args.svg.write_text(drawing(done))
    missed = [
        f"{row['budget']}: idle for {row['idle_median']:.1%} of a step that the drive binds, at most {IDLE_LIMIT:.0%}"
        for row in done
        if row["drive_binds"] and row["idle_median"] > IDLE_LIMIT
    ]
    results = {"machine": about, "model": args.model, "tokens": args.tokens, "limit": args.limit, "rows": rows}
    results |= {"micro_batches": args.micro_batches, "update": args.update}
    return finish({**results, "missed": missed}, args.json, missed if args.check else [])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.51b")
    text = "host memory, or least or overlapping (default: %(default)s)"
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=list(BUDGETS), metavar="A,B", help=text)
    parser.add_argument("--durability", default="step", help="step, every:N or none (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("adamw", "apollo", "apollo-mini"), default="adamw")
    parser.add_argument("--rank", type=int, default=64, help="of APOLLO (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="length of the sequence (default: %(default)s)")
    text = "sequences of a step, one at a time through each layer (default: %(default)s)"
    parser.add_argument("--micro-batches", type=int, default=1, help=text)
    text = "see memascend.offload; backward does without clipping (default: %(default)s)"
    parser.add_argument("--update", choices=("forward", "backward"), default="forward", help=text)
    parser.add_argument("--steps", type=int, default=3, help="recorded steps (default: %(default)s)")
    parser.add_argument("--limit", type=size, help="bytes/s of the disk in either direction (root, cgroup v1's blkio)")
    parser.add_argument("--fio", action="store_true", help="measure the disk in the step's own mix after each budget")
    parser.add_argument("--gaps", type=int, default=8, help="gaps to print for each budget (default: %(default)s)")
    parser.add_argument("--workdir", type=Path, help="where models and stores go; models are kept for the next run")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and machine here")
    parser.add_argument("--svg", type=Path, metavar="OUT", help="draw the timelines here")
    parser.add_argument("--check", action="store_true", help="exit 1 when the drive is idle for too long")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one budget")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        job = json.loads(sys.argv[2])
        enter(job["cgroup"])
        Path(job["result"]).write_text(json.dumps(child(job)))
        return 0
    args = arguments()
    return in_workdir(args.workdir, partial(benchmark, args))


if __name__ == "__main__":
    run(main)
