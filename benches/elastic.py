#!/usr/bin/env python
"""A budget that changes while a model trains: whether memory follows, and whether any bit changes.

    python benches/elastic.py                                      # root, cgroup v1's memory controller; minutes
    python benches/elastic.py --check --json benches/results/elastic.json
    python benches/elastic.py --only random                        # needs neither

**cgroup**: a Llama of 98M parameters in float32 with host_memory="auto" in a memory cgroup, whose limit is the need of
the run with everything in memory. The limit drops by half while it trains, and comes back. The kernel refuses a hard
limit (EBUSY) below the locked memory, so the soft limit is lowered first, and the hard one as soon as the kernel takes
it. RSS, budget and loss are taken at the end of each step; another run with a fixed budget and no cgroup gives the
losses, and the hash of weights and states, to compare.

**random**: a small Llama whose budget is changed at random 100 times by memascend.set_host_memory, between the passes
of accumulated batches and around steps, beside one with a fixed budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _common import finish, machine, markdown, rss, run
from _llama import SEED, llama_config

#: hidden, MLP, layers, heads, heads of keys and values.
SHAPE = (768, 2048, 12, 12, 12)
SMALL_SHAPE = (256, 704, 4, 4, 2)
VOCABULARY, TOKENS, LEARNING_RATE = 8192, 64, 1e-4
MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup/memory")
#: Steps of each phase: whole, half, whole again.
STEPS = (6, 8, 12)
#: Beside the run's own memory: the reserve of a sixteenth, and growth of Python and PyTorch.
SLACK_SHARE, SLACK = 1 / 12, 96 * MIB
CHANGES = 100
WAIT_S = 120
#: Steps until the memory has followed a limit: the one under way when it changed, and the one after.
FOLLOWS_STEPS = 2


# ---- a run ---------------------------------------------------------------------------------------------------


class Training:
    """A Llama on SSD, trained a batch at a time."""

    def __init__(self, shape: tuple[int, ...], store: str, **options: object) -> None:
        import torch
        from transformers import LlamaForCausalLM

        import memascend

        torch.manual_seed(SEED)
        self.model = LlamaForCausalLM(llama_config(shape, VOCABULARY))
        memascend.offload(self.model, store=store, keep_store=False, **options)
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []

    def backward(self) -> None:
        """Run a forward and a backward pass over a batch of its own."""
        import torch

        generator = torch.Generator().manual_seed(len(self.losses))
        ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stats(self) -> dict:
        import memascend

        return memascend.stats(self.model)

    def digest(self) -> str:
        """Return a hash of weights and states."""
        import torch

        import memascend

        digest = hashlib.sha256()
        for _, values in memascend.parameters_of(self.model):
            digest.update(values.contiguous().view(torch.uint8).numpy())
        for states in self.optimizer.state_dict()["state"].values():
            for values in states.values():
                digest.update(values.reshape(-1).contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def child(job: dict) -> None:
    """Train until a line comes on standard input, or for job["steps"] steps, and tell each as a line of JSON."""
    if job["group"]:
        (Path(job["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    import memascend

    def tell(**values: object) -> None:
        print(json.dumps(values), flush=True)

    training = Training(SHAPE, job["store"], durability=job["durability"], host_memory=job["host_memory"])
    plan = memascend.offload_of(training.model).plan
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    tell(least=plan.smallest_bytes, most=(plan.most or plan).total, parameters=parameters)
    while len(training.losses) != job["steps"] and not (job["steps"] is None and _asked_to_end()):
        begun = time.perf_counter()
        training.backward()
        training.step()
        stats = training.stats()
        status = Path("/proc/self/status").read_text().split()
        tell(
            step=len(training.losses),
            seconds=round(time.perf_counter() - begun, 3),
            loss=training.losses[-1],
            rss_bytes=rss()["rss"],
            swap_bytes=int(status[status.index("VmSwap:") + 1]) << 10,
            budget_bytes=stats["host_bytes_budget"],
            planned_bytes=stats["host_bytes_planned"],
            reserved_bytes=stats["host_bytes_reserved"],
        )
    tell(steps=len(training.losses), digest=training.digest())
    memascend.close(training.model)


def _asked_to_end() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Run:
    """A run in a process of its own."""

    def __init__(self, **job: object) -> None:
        self.steps: list[dict] = []
        self.end: dict = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the run)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(job, default=str)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()

    def next(self) -> dict:
        """Return its next message."""
        if not select.select([self._process.stdout], [], [], WAIT_S)[0]:
            raise SystemExit(f"no step in {WAIT_S} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit(f"a run ended with {self._process.wait()}:\n{self._errors.read()}")
        told = json.loads(line)
        if "step" in told:
            self.steps.append(told)
        elif "digest" in told:
            self.end = told
        return told

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.next()

    def finish(self) -> None:
        """Have it end, and wait for that."""
        if self._process.poll() is None:
            self._process.stdin.write("end\n")
            self._process.stdin.flush()
        while not self.end:
            self.next()
        if self._process.wait(WAIT_S):
            raise SystemExit("a run failed as it ended")


# ---- a memory cgroup -----------------------------------------------------------------------------------------


class Group:
    """A memory cgroup of version 1."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> int:
        return int((self.path / name).read_text())

    def soft(self, limit: int) -> None:
        (self.path / "memory.soft_limit_in_bytes").write_text(str(limit))

    def hard(self, limit: int) -> bool:
        """Set the limit; False where the kernel refuses, because the group holds more that cannot be reclaimed."""
        try:
            (self.path / "memory.limit_in_bytes").write_text(str(limit))
        except OSError:
            return False
        return True

    def kills(self) -> int:
        events = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(events["oom_kill"])


@contextmanager
def group() -> Iterator[Group]:
    own = next(
        path
        for _, controllers, path in (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        if "memory" in controllers.split(",")
    )
    parent = GROUPS / own.lstrip("/")
    path = (parent if parent.exists() else GROUPS) / f"memascend-bench-{os.getpid()}"
    path.mkdir()
    try:
        yield Group(path)
    finally:
        for _ in range(100):
            try:
                path.rmdir()
                break
            except OSError:  # The process that ended is still listed.
                time.sleep(0.1)


def in_a_group(workdir: Path, durability: str) -> tuple[dict, list[str]]:
    """Return a limit that drops by half while a model trains, and comes back."""
    with group() as made:
        job = {"group": made.path, "store": workdir / "auto", "durability": durability, "steps": None}
        with Run(**job, host_memory="auto") as auto:
            opened = auto.next()
            auto.go(3)
            beside = made.read("memory.usage_in_bytes") - auto.steps[-1]["planned_bytes"]
            whole = int((beside + opened["most"] + SLACK) * (1 + SLACK_SHARE))
            half = whole // 2
            if not made.hard(whole):
                raise SystemExit("the kernel refuses the limit that the run began with")
            auto.go(STEPS[0])
            limits = {len(auto.steps): whole}

            def mark(limit: int) -> int:
                limits[len(auto.steps)] = limit
                return len(auto.steps)

            refused = not made.hard(half)
            made.soft(half)
            lowered = mark(half)
            while not made.hard(half):
                auto.next()
            taken_after = len(auto.steps) - lowered
            auto.go(STEPS[1])
            usage = made.read("memory.usage_in_bytes")
            made.hard(whole)
            made.soft(1 << 62)
            raised = mark(whole)
            auto.go(STEPS[2])
            auto.finish()
            kills = made.kills()
    steps = auto.steps
    with Run(**job | {"group": None, "store": workdir / "fixed", "steps": len(steps)}, host_memory="16GiB") as fixed:
        fixed.finish()
    before, during, after = steps[lowered - 1], steps[raised - 1], steps[-1]
    result = {
        "parameters": opened["parameters"],
        "durability": durability,
        "least_bytes": opened["least"],
        "most_bytes": opened["most"],
        "limits": {str(step): limit for step, limit in limits.items()},
        "hard_limit_refused_while_more_was_held": refused,
        "steps_until_the_kernel_took_the_half": taken_after,
        "usage_at_half_bytes": usage,
        "oom_kills": kills,
        "swap_bytes": max(step["swap_bytes"] for step in steps),
        "same_losses": [step["loss"] for step in steps] == [step["loss"] for step in fixed.steps],
        "same_weights_and_states": auto.end == fixed.end,
        "steps": steps,
    }
    given, taken = before["planned_bytes"] - during["planned_bytes"], after["planned_bytes"] - during["planned_bytes"]
    faults = []
    if kills or result["swap_bytes"]:
        faults.append(f"{durability}: {kills} kills, {result['swap_bytes']} bytes swapped")
    if not (result["same_losses"] and result["same_weights_and_states"]):
        faults.append(f"{durability}: other bits than without a change")
    if taken_after > FOLLOWS_STEPS:
        faults.append(f"{durability}: the memory followed after {taken_after} steps")
    if given <= 0 or before["rss_bytes"] - during["rss_bytes"] < 0.9 * given:
        faults.append(f"{durability}: of {given} bytes, RSS gave back {before['rss_bytes'] - during['rss_bytes']}")
    if taken <= 0 or after["rss_bytes"] - during["rss_bytes"] < 0.9 * taken:
        faults.append(f"{durability}: the memory did not come back")
    return result, faults


# ---- random changes ------------------------------------------------------------------------------------------


def at_random(workdir: Path, durability: str) -> tuple[dict, list[str]]:
    """Make 100 changes of the budget at random moments between passes."""
    import memascend
    from memascend.layout.units import partition
    from memascend.memory_plan.host import smallest_plan

    chance, budgets = random.Random(SEED), []
    most = 256 * MIB
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        least = smallest_plan(
            partition(LlamaForCausalLM(llama_config(SMALL_SHAPE, VOCABULARY)), fused_loss="auto"), most
        ).total

    def train(steps: int | None, **options: object) -> tuple[Training, str]:
        name = f"random-{durability}-{len(list(workdir.iterdir()))}"
        training = Training(SMALL_SHAPE, str(workdir / name), durability=durability, **options)

        def moment() -> None:
            if steps is None and chance.random() < 0.6:
                budgets.append(chance.randint(least, chance.choice([2 * least, most])))
                memascend.set_host_memory(training.model, budgets[-1])

        while (steps is None and len(budgets) < CHANGES) or (steps is not None and len(training.losses) < 2 * steps):
            for _ in range(2):
                training.backward()
                moment()
            training.step()
            moment()
        digest = training.digest()
        memascend.close(training.model)
        return training, digest

    changing, digest = train(None, host_memory=least, host_memory_max=most)
    steps = len(changing.losses) // 2
    fixed, expected = train(steps, host_memory=most)
    same = changing.losses == fixed.losses and digest == expected
    result = {"durability": durability, "changes": len(budgets), "steps": steps, "budgets_bytes": budgets, "same": same}
    return result, [] if same else [f"{durability}: random changes have changed bits"]


# ---- the report ----------------------------------------------------------------------------------------------


def table(result: dict) -> str:
    """Return a table of RSS and budget by step."""
    limits = result["limits"]
    rows = [
        [
            str(step["step"]),
            f"{limits[str(step['step'] - 1)] / MIB:,.0f}" if str(step["step"] - 1) in limits else "",
            f"{step['budget_bytes'] / MIB:,.0f}",
            f"{step['planned_bytes'] / MIB:,.0f}",
            f"{step['rss_bytes'] / MIB:,.0f}",
            f"{step['seconds']:.2f}",
            f"{step['loss']:.6f}",
        ]
        for step in result["steps"]
    ]
    return markdown(["step", "limit set before it, MiB", "budget", "planned", "RSS", "seconds", "loss"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cgroup", "random"))
    parser.add_argument(
        "--durability", default="none,step", help="of the runs, one after another (default: %(default)s)"
    )
    parser.add_argument("--workdir", type=Path, help="where the stores go (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    if args.only != "random" and not (GROUPS / "memory.limit_in_bytes").exists():
        raise SystemExit("cgroup v1's memory controller is not mounted: --only random needs none")
    faults: list[str] = []
    results: dict = {}
    with tempfile.TemporaryDirectory(dir=args.workdir) as name:
        workdir = Path(name)
        results["machine"] = machine(workdir)
        for durability in args.durability.split(","):
            if args.only != "random":
                result, missed = in_a_group(workdir, durability)
                results.setdefault("cgroup", []).append(result)
                faults += missed
                print(f"\ndurability {durability}\n{table(result)}")
            if args.only != "cgroup":
                result, missed = at_random(workdir, durability)
                results.setdefault("random", []).append(result)
                faults += missed
                print(f"durability {durability}: {result['changes']} changes, same bits: {result['same']}")
    status = finish(results, args.json, faults)
    return status if args.check else 0


if __name__ == "__main__":
    run(main)
