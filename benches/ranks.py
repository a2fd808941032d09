#!/usr/bin/env python
"""Training over ranks of one machine: memascend beside DeepSpeed ZeRO-3 with parameters and optimizer on NVMe.

    python benches/ranks.py --model 0.5b --json benches/results/ranks.json

Both train the same model, from the same weights, on the same tokens of each rank, over the same backend (gloo), by
turns in one run; each rank is a process of its own. For a rank:

- Memory is VmHWM less its value after the imports, of the start and of the steps: it is set back between them.
- A step lasts from step boundary to step boundary, the slowest rank's. The first two are dropped: the first update,
  which has no states to read, belongs to memascend's second.
- Network bytes are those that the collectives send by definition (N ranks, W bytes: (N-1)/N W for a gather, a scatter
  and an exchange, twice that for a sum, (N-1) W for the root of a broadcast), counted where torch.distributed is
  called, the same way for both. By definition ZeRO-3 sends 3 (N-1)/N of the model, and less where its defaults keep a
  small model gathered. The kernel's count of the loopback device, of all ranks and other programs, stands beside it:
  gloo scatters sums by summing everywhere, which is twice as much.
- SSD bytes are the kernel's, of the process (/proc/self/io).

Each rank computes with its share of the processors. Needs an interpreter with memascend, transformers and deepspeed
(0.19.8), and ninja, a compiler and libaio for DeepSpeed's operators, which the first run compiles; a warm-up of a tiny
model does that before anything is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any

from _common import (
    GB,
    ChildFailed,
    block_io,
    end_as_child,
    finish,
    fio,
    in_workdir,
    machine,
    markdown,
    rss,
    run,
    start,
    versions,
)
from _llama import SEED, llama_config, parameter_count, write_model
from zero_infinity import SHAPES, configuration

#: DeepSpeed as its defaults have it, and as MemAscend's public code configures it, which takes less memory.
SYSTEMS = ("memascend", "deepspeed-author", "deepspeed-defaults")
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-5, 0.01, 0.9
#: Steps that are not measured.
DROPPED = 2
#: Relative tolerance between the losses of two systems: both compute in bfloat16.
LOSS_TOLERANCE = 0.01
#: Limit of the bytes that memascend sends, as a share of ZeRO-3's by definition.
NETWORK_LIMIT = 1.03


# --- the child: one rank ---


def sent(collective: str, ranks: int, nbytes: int, root: bool) -> float:
    """Return the bytes that a rank sends in a collective over `nbytes` of the whole."""
    if collective == "broadcast":
        return (ranks - 1) * nbytes * root
    return nbytes * (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)


class Counter:
    """Bytes that this rank sends in the collectives of torch.distributed."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.dist, self.bytes, self.calls = dist, 0.0, dict[str, int]()
        #: Where the tensor of the whole is among the arguments.
        wholes = {
            "all_gather_into_tensor": ("output_tensor", 0),
            "reduce_scatter_tensor": ("input", 1),
            "all_to_all_single": ("input", 1),
            "all_reduce": ("tensor", 0),
            "broadcast": ("tensor", 0),
            "all_gather": ("tensor_list", 0),
            "reduce_scatter": ("input_list", 1),
        }
        for name, place in wholes.items():
            setattr(dist, name, self._counted(name, *place))
        for other in ("reduce", "gather", "scatter", "all_to_all", "send", "isend"):
            setattr(dist, other, self._refused(other))

    def _counted(self, name: str, argument: str, position: int) -> Any:
        collective = getattr(self.dist, name)

        @wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            whole = kwargs[argument] if argument in kwargs else args[position]
            nbytes = sum(tensor.nbytes for tensor in (whole if isinstance(whole, list | tuple) else [whole]))
            group = kwargs.get("group")
            splits = kwargs.get("input_split_sizes", args[3] if len(args) > 3 else None)
            if name == "all_to_all_single" and splits:
                self.bytes += nbytes - splits[self.dist.get_rank(group)] * whole[:1].nbytes
            else:
                source = kwargs.get("src", args[1] if name == "broadcast" and len(args) > 1 else 0)
                self.bytes += sent(name, self.dist.get_world_size(group), nbytes, source == self.dist.get_rank())
            self.calls[name] = self.calls.get(name, 0) + 1
            return collective(*args, **kwargs)

        return counted

    def _refused(self, name: str) -> Any:
        def refused(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"torch.distributed.{name} is not counted by this benchmark")

        return refused


def loopback() -> int:
    """Return the bytes that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


class MemascendRank:
    """Weights, gradients and states divided over the stores of the ranks."""

    def __init__(self, job: dict) -> None:
        import torch
        from transformers import LlamaForCausalLM

        import memascend

        self.memascend = memascend
        model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16).train()
        options: dict[str, Any] = {"store": f"{job['folder']}/store{{rank}}", "compute_threads": job["threads"]}
        host_memory = job["host_memory"]
        if host_memory == "least":
            try:
                memascend.offload(model, host_memory=1, **options)
            except memascend.BudgetError as error:
                host_memory = error.smallest_bytes
        self.model = memascend.offload(model, host_memory=host_memory, **options)
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(self, row: Any) -> float:
        loss = self.model(input_ids=row, labels=row).loss
        loss.backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def details(self) -> dict:
        stats = self.memascend.stats(self.model)
        return {
            "host_memory_bytes": stats["host_bytes_budget"],
            "engine_ssd_bytes": stats["ssd_bytes_read"] + stats["ssd_bytes_written"],
            "network_bytes_sent": stats["network_bytes_sent"],
        }

    def close(self) -> None:
        self.memascend.close(self.model)


class DeepSpeedRank:
    """ZeRO-3 with parameters and optimizer on NVMe."""

    def __init__(self, job: dict) -> None:
        import deepspeed
        import torch
        from deepspeed.accelerator import get_accelerator
        from safetensors import safe_open
        from transformers import LlamaForCausalLM

        # Its own collectives go through shared memory, not through a network.
        type(get_accelerator().create_op_builder("ShareMemCommBuilder")).is_compatible = lambda *_, **__: False
        config = configuration(job["system"].partition("-")[2], job["folder"], "bfloat16")
        config.pop("memascend")
        if job["prefetch"] is not None:
            config["zero_optimization"]["stage3_prefetch_bucket_size"] = job["prefetch"]
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = LlamaForCausalLM(llama_config(*job["shape"]))
        directory = Path(job["model_dir"])
        files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if job["rank"] == 0:
                    with safe_open(directory / files[name], framework="pt") as file:
                        parameter.data.copy_(file.get_tensor(name))
        model.gradient_checkpointing_enable()
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(self, row: Any) -> float:
        loss = self.engine(input_ids=row, labels=row).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def details(self) -> dict:
        return {}

    def close(self) -> None:
        pass


def child(job: dict) -> dict:
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(job["threads"])
    counter = Counter()
    if job["system"] == "memascend":
        import memascend  # noqa: F401

        dist.init_process_group("gloo")
        system: type[MemascendRank | DeepSpeedRank] = MemascendRank
    else:
        import deepspeed  # noqa: F401
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(8))])  # loads the operator
        system = DeepSpeedRank
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # starts the threads
    gc.collect()
    baseline = rss()["hwm"]
    rank = system(job)
    result: dict[str, Any] = {"baseline_bytes": baseline, "start_peak_bytes": rss()["hwm"] - baseline}
    dist.barrier()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the resident memory now
    vocabulary = job["shape"][1]
    generator = torch.Generator().manual_seed(SEED)
    steps = []
    for _ in range(job["steps"]):
        rows = torch.randint(0, vocabulary, (job["ranks"], 1, job["tokens"]), generator=generator)
        before, network, lo, begin = block_io(), counter.bytes, loopback(), time.perf_counter()
        loss = rank.step(rows[job["rank"]])
        seconds = time.perf_counter() - begin
        read, written = (after - earlier for after, earlier in zip(block_io(), before, strict=True))
        steps.append(
            {
                "loss": loss,
                "seconds": seconds,
                "network_bytes": counter.bytes - network,
                "loopback_bytes": loopback() - lo,
                "ssd_bytes_read": read,
                "ssd_bytes_written": written,
            }
        )
        print(steps[-1], flush=True)
    result |= {"steps": steps, "step_peak_bytes": rss()["hwm"] - baseline, "calls": counter.calls, **rank.details()}
    dist.barrier()
    rank.close()
    return result


# --- the parent ---


def measure(workdir: Path, args: argparse.Namespace, model: str, system: str, host_memory: str | None) -> dict:
    """Train on all ranks; return the figures of the run, each of the rank that has most."""
    shape, vocabulary = SHAPES[model]
    model_dir = workdir / f"model-{model}"
    if not model_dir.exists():
        write_model(llama_config(shape, vocabulary), model_dir)
    folder = workdir / "scratch"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(len(os.sched_getaffinity(0)) // args.ranks, 1)

    def one(rank: int, prefetch: int | None) -> dict:
        job = {
            "system": system,
            "shape": [shape, vocabulary],
            "model_dir": str(model_dir),
            "folder": str(folder),
            "host_memory": host_memory,
            "prefetch": prefetch,
            "rank": rank,
            "ranks": args.ranks,
            "threads": threads,
            "steps": args.steps,
            "tokens": args.tokens,
        }
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_SIZE": 1}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}
        environment = {name: str(value) for name, value in environment.items()}
        return start(
            [sys.executable, __file__, "--child"], job, f"{model}-{system}-{rank}", workdir, args.limit_s, environment
        )

    notes = []
    # DeepSpeed 0.19.8 may queue a parameter twice for prefetch where forward turns into backward.
    for prefetch in (None, 0):
        folder.mkdir()
        try:
            with ThreadPoolExecutor(args.ranks) as pool:
                ranks = list(pool.map(partial(one, prefetch=prefetch), range(args.ranks)))
            break
        except ChildFailed as error:
            if system == "memascend" or prefetch == 0 or "assigned swap buffer" not in str(error):
                return {"failed": str(error)}
            notes.append("ran without prefetch: DeepSpeed asserts 'already assigned swap buffer' with it")
        finally:
            shutil.rmtree(folder)

    def most(key: str) -> float:
        return max(statistics.median(step[key] for step in rank["steps"][DROPPED:]) for rank in ranks)

    keys = ("seconds", "network_bytes", "loopback_bytes", "ssd_bytes_read", "ssd_bytes_written")
    return {
        "notes": notes,
        **{key: most(key) for key in keys},
        **{key: max(rank[key] for rank in ranks) for key in ("start_peak_bytes", "step_peak_bytes")},
        "losses": [statistics.mean(rank["steps"][step]["loss"] for rank in ranks) for step in range(args.steps)],
        "raw": ranks,
    }


def summary(rounds: list[dict]) -> dict:
    """Return the medians of several rounds; the first failure if there was one."""
    if failed := [got for got in rounds if "failed" in got]:
        return failed[0]
    keys = [key for key, value in rounds[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(got[key] for got in rounds) for key in keys} | {"losses": rounds[0]["losses"]}


def checks(entries: list[dict]) -> list[str]:
    """Return the figures where memascend is not better than DeepSpeed, and losses that differ too much."""
    faults = []
    for model in {entry["model"] for entry in entries}:
        of_model = [entry for entry in entries if entry["model"] == model]
        faults += [f"{model}, {entry['name']}: {entry['failed']}" for entry in of_model if "failed" in entry]
        ran = [entry for entry in of_model if "failed" not in entry]
        ours = [entry for entry in ran if entry["system"] == "memascend"]
        theirs = [entry for entry in ran if entry["system"] != "memascend"]
        if not ours or not theirs:
            faults.append(f"{model}: nothing to compare")
        for our in ours:
            if our["network_bytes"] > NETWORK_LIMIT * our["zero3_network_bytes"]:
                faults.append(f"{model}, {our['name']}: {our['network_bytes']:.3e} bytes are sent")
            for their in theirs:
                names = f"{model}, {our['name']} and {their['name']}"
                for step, (a, b) in enumerate(zip(our["losses"], their["losses"], strict=True)):
                    if abs(a - b) > LOSS_TOLERANCE * abs(b):
                        faults.append(f"{names}: the losses of step {step} are {a:.4f} and {b:.4f}")
                if our["step_peak_bytes"] > their["step_peak_bytes"]:
                    faults.append(
                        f"{names}: the peaks are {our['step_peak_bytes']:.3e} and {their['step_peak_bytes']:.3e}"
                    )
    return faults


HEADER = [
    "model",
    "system",
    "peak of the steps, GB",
    "peak of the start, GB",
    "step, s",
    "network, GB",
    "loopback, GB",
    "SSD read, GB",
    "SSD written, GB",
]


def table(entries: list[dict]) -> str:
    rows = []
    for entry in entries:
        if "failed" in entry:
            rows.append([entry["model"], entry["name"], entry["failed"], *[""] * (len(HEADER) - 3)])
            continue
        in_gb = ("network_bytes", "loopback_bytes", "ssd_bytes_read", "ssd_bytes_written")
        peaks = [f"{entry[key] / GB:.2f}" for key in ("step_peak_bytes", "start_peak_bytes")]
        moved = [f"{entry[key] / GB:.2f}" for key in in_gb]
        rows.append([entry["model"], entry["name"], *peaks, f"{entry['seconds']:.2f}", *moved])
    return markdown(HEADER, rows)


def told(got: dict) -> str:
    return got.get("failed") or f"step {got['seconds']:.2f} s, peak {got['step_peak_bytes'] / GB:.2f} GB"


def compare(workdir: Path, args: argparse.Namespace) -> int:
    warm = argparse.Namespace(**{**vars(args), "steps": DROPPED + 1, "tokens": 16})
    for system in args.systems:
        measure(workdir, warm, "tiny", system, "least")  # compiles operators and bytecode
    entries = []
    for model in args.model:
        runs: dict[tuple[str, str | None], list[dict]] = {}
        for _ in range(args.rounds):  # By turns, because drives change their speed within minutes.
            for system in args.systems:
                for host_memory in args.host_memory if system == "memascend" else [None]:
                    load = os.getloadavg()[0]
                    got = measure(workdir, args, model, system, host_memory) | {"load_before": load}
                    runs.setdefault((system, host_memory), []).append(got)
                    told = (
                        got.get("failed") or f"step {got['seconds']:.2f} s, peak {got['step_peak_bytes'] / GB:.2f} GB"
                    )
                    print(model, system, host_memory or "", told, *got.get("notes", []), flush=True)
        for (system, host_memory), rounds in runs.items():
            name = system if host_memory is None else f"{system}, {host_memory}"
            numel = parameter_count(*SHAPES[model])
            case = {"model": model, "numel": numel, "system": system, "name": name}
            # Weights for both passes and gradients, in bfloat16.
            case["zero3_network_bytes"] = 3 * 2 * numel * (args.ranks - 1) / args.ranks
            entries.append({**case, **summary(rounds), "rounds": rounds})
    print("\n" + table(entries))
    results = {
        "machine": machine(workdir) | {"deepspeed": versions("deepspeed")["deepspeed"]},
        "fio": fio(workdir) if args.fio else None,
        "ranks": args.ranks,
        "tokens": args.tokens,
        "steps": args.steps,
        "rounds": args.rounds,
        "runs": entries,
    }
    return finish(results, args.json, checks(entries) if args.check else [])


def main() -> int:
    end_as_child(child)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["0.5b"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--host-memory", nargs="+", default=["least", "1GiB"], help="memascend's budgets for a rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=5, help=f"of which {DROPPED} are dropped")
    parser.add_argument("--rounds", type=int, default=1, help="of all systems by turns; medians are shown")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for one run")
    parser.add_argument("--fio", action="store_true", help="also measure the disk with fio")
    parser.add_argument("--workdir", type=Path, help="keeps the models (default: a temporary directory here)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and machine here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    args = parser.parse_args()
    if args.steps <= DROPPED:
        parser.error(f"--steps has to be more than the {DROPPED} that are dropped")
    return in_workdir(args.workdir, partial(compare, args=args))


if __name__ == "__main__":
    run(main)
