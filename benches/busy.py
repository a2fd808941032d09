#!/usr/bin/env python
"""A training step beside busy processes: memascend, in memory, and ZeRO-Infinity, with waits and threads by turns.

    python benches/busy.py --json benches/results/busy.json                   # ours and in memory, beside 0 to 8 loops
    python benches/busy.py --settings spin,yield,passive,spins-10000          # waits, by turns
    python benches/busy.py --neighbours 0 --rounds 3 --systems memascend \\
        --settings spin,yield,spin+update-2,yield+update-2,yield+torch-1      # a quiet machine: waits and threads
    python benches/busy.py --kinds loops,tests --systems memascend,in-memory,zero-infinity \\
        --deepspeed-python DS_VENV/bin/python

Each system and setting runs in a process of its own, which trains on while neighbours come and go, so that every figure
beside neighbours has a quiet one of the same process. Rounds repeat all settings by turns. Neighbours are endless
loops, or runs of tests, at the same priority or at one lower by 10. A fair share of C processors for N neighbours of
the same priority is a step of 1 + N / C times the quiet one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from _common import ChildFailed, finish, in_workdir, machine, markdown, run
from _llama import SEED, llama_config, parameter_count, write_model
from _peak_systems import RUNS, VOCABULARY, budgets

#: (hidden, intermediate, layers, heads, key/value heads)
SHAPES = {"tiny": (256, 704, 4, 4, 2), "171m": (1024, 2816, 9, 16, 8), "0.51b": (1536, 4096, 16, 24, 12)}
SYSTEMS = ("memascend", "in-memory", "in-memory-exact", "zero-infinity")
KINDS = ("loops", "tests")
#: Added to the niceness of neighbours.
PRIORITIES = {"equal": 0, "lower": 10}
LOOP = [sys.executable, "-c", "while True: pass"]
#: A real test run, again and again.
TESTS = [
    "sh",
    "-c",
    f"while :; do '{sys.executable}' -P -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider "
    "vocabulary optim/test_steps.py; done",
]
#: For how long neighbours settle, and the prefix of a child's answers.
SETTLE_SECONDS, ANSWER = 1.0, "busy.py: "


def environment(setting: str) -> dict[str, str]:
    """Return the environment of a setting, whose parts are joined by "+".

    `auto`, `spin` and `yield` are memascend's waits; `passive` and `spins-N` are OpenMP's own (N rounds before a thread
    sleeps); `bind` ties each thread to a processor; `torch-N` and `update-N` are numbers of threads.
    """
    variables, ours = {}, []
    for part in setting.split("+"):
        name, _, number = part.partition("-")
        if part in ("auto", "spin", "yield"):
            ours.append(f"waits={part}")
        elif part == "passive":
            variables["OMP_WAIT_POLICY"] = "passive"
        elif part == "bind":
            variables["OMP_PROC_BIND"] = "true"
        elif name == "spins" and number.isdigit():
            variables["GOMP_SPINCOUNT"] = number
        elif name == "torch" and number.isdigit():
            variables["OMP_NUM_THREADS"] = number
        elif name == "update" and number.isdigit():
            ours.append(f"update={number}")
        else:
            raise argparse.ArgumentTypeError(f"{part!r} is no part of a setting")
    return variables | {"MEMASCEND_THREADS": ",".join(ours)}


# --- the child: one system with one setting ---


def child(job: dict) -> None:
    import torch

    training = RUNS[job["system"]](job["model_dir"], job["scratch"], job)
    ids = torch.randint(0, VOCABULARY, (1, job["tokens"]), generator=torch.Generator().manual_seed(SEED))
    print(ANSWER + json.dumps({"torch_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:  # numbers of steps
        seconds, own = [], time.process_time()
        for _ in range(int(line)):
            began = time.perf_counter()
            loss = training.model(input_ids=ids, labels=ids).loss
            training.backward(loss)
            training.step()
            seconds.append(time.perf_counter() - began)
            last = float(loss.detach())
            del loss
        answer = {"seconds": seconds, "processor_seconds": time.process_time() - own, "loss": last}
        if job["system"] == "memascend":
            answer["threads"] = training.memascend.stats(training.model)["threads"]
        print(ANSWER + json.dumps(answer), flush=True)
    training.close()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads and process group must not hold the exit up


class Child:
    """A process that trains when it is told to."""

    def __init__(self, python: str, job: dict, variables: dict[str, str], log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, __file__, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=inherited | {"PATH": path, "DS_ACCELERATOR": "cpu"} | variables,
            process_group=0,  # in a session of its own the kernel would not compare its niceness with ours
        )
        self._log_path, self._limit_s = log, job["limit_s"]

    def answer(self) -> dict:
        """Return the child's next answer; ChildFailed where it ends or takes longer than the limit."""
        stop = threading.Timer(self._limit_s, self.kill)
        stop.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        finally:
            stop.cancel()
        self._process.wait()
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        raise ChildFailed(f"exit status {self._process.returncode}: {lines[-1] if lines else 'no output'}"[:300])

    def steps(self, count: int) -> dict:
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process: by itself where it still listens."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
            self._process.wait()
        self._log.close()


# --- the parent: neighbours, turns, tables ---


@contextmanager
def neighbours(kind: str, count: int, priority: str) -> Iterator[None]:
    """So many busy processes."""
    command, niceness = {"loops": LOOP, "tests": TESTS}[kind], PRIORITIES[priority]
    tests = Path(__file__).resolve().parents[1] / "tests"
    processes = [
        subprocess.Popen(
            ["nice", "-n", str(niceness), *command],
            cwd=tests if kind == "tests" else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # in a session of its own the kernel would not compare its niceness with ours
        )
        for _ in range(count)
    ]
    try:
        if count:
            time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def conditions(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Kind, number and priority of the neighbours of each figure; quiet first."""
    chosen = [("loops", 0, "equal")] if 0 in args.neighbours else []
    for kind in args.kinds:
        for priority in args.priorities:
            chosen += [(kind, count, priority) for count in args.neighbours if count]
    return chosen


def measure(args: argparse.Namespace, workdir: Path, system: str, setting: str, budget: int) -> list[dict]:
    """Return a row for each condition, of one process."""
    scratch = workdir / "scratch"
    scratch.mkdir()
    python = args.deepspeed_python if system == "zero-infinity" else sys.executable
    job = {
        "system": system,
        "model": args.model,
        "shape": SHAPES[args.model],
        "model_dir": str(workdir / args.model),
        "scratch": str(scratch),
        "tokens": args.tokens,
        "host_memory": budget,
        "limit_s": args.limit_s,
    }
    rows: list[dict] = []
    child = Child(python, job, environment(setting), workdir / f"{system}-{setting}.log")
    try:
        began = child.answer()
        child.steps(args.warmup)
        for kind, count, priority in conditions(args):
            row = {"system": system, "setting": setting, "kind": kind, "neighbours": count, "priority": priority}
            with neighbours(kind, count, priority):
                # The first step beside new neighbours counts, as in a real run.
                rows.append(row | began | {"load": os.getloadavg()[0]} | child.steps(args.steps))
            last = rows[-1]
            print(
                f"{system} {setting}, {count} {kind if count else 'neighbours'} {priority if count else ''}: "
                f"median {statistics.median(last['seconds']):.2f} s, worst {max(last['seconds']):.2f}",
                flush=True,
            )
    except ChildFailed as error:
        rows.append({"system": system, "setting": setting, "failed": str(error)})
        print(f"{system} {setting}: failed: {error}", flush=True)
    finally:
        child.end()
        shutil.rmtree(scratch)
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """Return the medians and worst steps over all rounds, beside the quiet median of the same system and setting."""
    told: dict[tuple, list[float]] = {}
    for row in rows:
        if "seconds" in row:
            key = tuple(row[name] for name in ("system", "setting", "kind", "neighbours", "priority"))
            told.setdefault(key, []).extend(row["seconds"])
    quiet = {key[:2]: statistics.median(seconds) for key, seconds in told.items() if key[3] == 0}
    names = ("system", "setting", "kind", "neighbours", "priority")
    lines = []
    for key, seconds in told.items():
        line = dict(zip(names, key, strict=True)) | {"median_s": statistics.median(seconds), "worst_s": max(seconds)}
        if base := quiet.get(key[:2]):
            line |= {"times_quiet": line["median_s"] / base, "worst_times_quiet": line["worst_s"] / base}
        lines.append(line)
    return lines


def table(lines: list[dict]) -> str:
    rows = [
        [
            line["system"],
            line["setting"],
            f"{line['neighbours']} {line['kind']}, {line['priority']}" if line["neighbours"] else "none",
            f"{line['median_s']:.2f}",
            f"{line['worst_s']:.2f}",
            f"{line['times_quiet']:.1f}" if "times_quiet" in line else "",
            f"{line['worst_times_quiet']:.1f}" if "worst_times_quiet" in line else "",
        ]
        for line in lines
    ]
    return markdown(["system", "setting", "neighbours", "median s", "worst s", "x quiet", "worst x quiet"], rows)


def benchmark(args: argparse.Namespace, workdir: Path) -> int:
    about = machine(workdir)
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    model_dir, shape = workdir / args.model, SHAPES[args.model]
    if not model_dir.exists():
        write_model(llama_config(shape, VOCABULARY), model_dir)
    budget = budgets(str(model_dir), args.tokens)["overlapping"] if args.host_memory is None else args.host_memory
    rows: list[dict] = []
    for _ in range(args.rounds):
        for system in args.systems:
            for setting in args.settings:
                rows += measure(args, workdir, system, setting, budget)
    lines = summary(rows)
    print("\n" + table(lines))
    results = {
        "machine": about,
        "parameters": parameter_count(shape, VOCABULARY),
        "host_memory_bytes": budget,
        **{name: getattr(args, name) for name in ("model", "tokens", "steps", "warmup", "rounds")},
        "summary": lines,
        "rows": rows,
    }
    return finish(results, args.json, [f"{row['system']} {row['setting']} failed" for row in rows if "failed" in row])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = partial(str.split, sep=",")
    add = parser.add_argument
    add("--model", choices=SHAPES, default="171m")
    add("--tokens", type=int, default=256, metavar="N")
    add("--systems", type=names, default=["memascend", "in-memory"], metavar="A,B", help=", ".join(SYSTEMS))
    add("--settings", type=names, default=["auto"], metavar="A,B", help=environment.__doc__)
    add("--neighbours", type=lambda text: [int(n) for n in text.split(",")], default=[0, 2, 4, 8], metavar="N,M")
    add("--priorities", type=names, default=list(PRIORITIES), metavar="A,B", help=", ".join(PRIORITIES))
    add("--kinds", type=names, default=["loops"], metavar="A,B", help=", ".join(KINDS))
    add("--steps", type=int, default=5, metavar="N", help="steps beside each number of neighbours")
    add("--warmup", type=int, default=2, metavar="N")
    add("--rounds", type=int, default=1, metavar="N", help="how often all settings take their turn")
    add("--host-memory", type=int, metavar="BYTES", help="memascend's budget (default: the least that reads ahead)")
    add("--deepspeed-python", default=sys.executable, metavar="FILE", help="an interpreter that has DeepSpeed")
    add("--limit-s", type=float, default=900, metavar="S", help="seconds for the steps beside one number of neighbours")
    add("--workdir", type=Path, metavar="DIR", help="keeps the model; a temporary directory here otherwise")
    add("--json", type=Path, metavar="FILE")
    add("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for chosen, known in ((args.systems, SYSTEMS), (args.priorities, PRIORITIES), (args.kinds, KINDS)):
        if unknown := set(chosen) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(known)}")
    for setting in args.settings:
        try:
            environment(setting)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return args


def main() -> int:
    args = arguments()
    if args.child:
        child(json.loads(args.child))
    return in_workdir(args.workdir, partial(benchmark, args))


if __name__ == "__main__":
    run(main)
