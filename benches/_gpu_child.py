"""One measurement of gpu.py in a process of its own: `_gpu_child.py JOB`, a JSON object that names its task.

The interpreter with DeepSpeed runs it too, so memascend is imported where it is used. On the CPU (the smoke run) the
same code runs, and figures that only CUDA gives are None.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from _common import rss
from _gpu_rates import compute, rates
from _gpu_systems import RUNS
from _gpu_where import HostMemory, Where
from _llama import llama_config, write_model

SEED = 1
PHASES = ("forward", "backward", "clip", "update")


class Step:
    """One optimizer step in its phases, with the counters of each."""

    def __init__(self, run, job: dict, number: int, where: Where) -> None:
        generator = torch.Generator().manual_seed(SEED + number)
        shape = (job["accumulate"], job["batch"], job["sequence"])
        self.ids = torch.randint(0, job["vocabulary"], shape, generator=generator)
        self.run, self.where, self.accumulate = run, where, job["accumulate"]
        # DeepSpeed divides by the number of micro-batches itself.
        self.divides = not job["system"].startswith("zero")
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: {} for phase in PHASES}
        #: Where the profiler's trace goes, if it is wanted.
        self.trace = job.get("trace")
        #: Synchronising calls that PyTorch warned of, by phase and place; filled where they are asked for.
        self.synchronising: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.caught: list[warnings.WarningMessage] = []

    @contextmanager
    def phase(self, name: str):
        before, began, seen = self.run.counters(), time.perf_counter(), len(self.caught)
        yield
        self.seconds[name] += time.perf_counter() - began
        for key, value in self.run.counters().items():
            self.moved[name][key] = self.moved[name].get(key, 0) + value - before[key]
        for message in self.caught[seen:]:
            if "synchroniz" in str(message.message):
                self.synchronising[name][f"{Path(message.filename).name}:{message.lineno}"] += 1

    def take(self) -> dict:
        """Take the step; the record of it."""
        began = time.perf_counter()
        losses = []
        for ids in self.ids:
            ids = ids.to(self.where.device, non_blocking=True)
            with self.phase("forward"):
                loss = self.run.model(input_ids=ids, labels=ids, use_cache=False).loss
            with self.phase("backward"):
                self.run.backward(loss / self.accumulate if self.divides and self.accumulate > 1 else loss)
            losses.append(loss.detach())
            # As in `memascend finetune`: a loss that is kept would keep its graph.
            del loss
        with self.phase("clip"):
            self.run.clip()
            # The one value of a step that is asked for, when nothing is left to be computed.
            losses = [float(loss) for loss in losses]
        with self.phase("update"):
            self.run.update()
        moved = {}
        for phase in self.moved.values():
            for key, value in phase.items():
                moved[key] = moved.get(key, 0) + value
        return {
            "seconds": time.perf_counter() - began,
            "losses": [loss.hex() for loss in losses],
            "loss": sum(losses) / len(losses),
            "phases": self.seconds,
            "moved": moved,
            "waits": {
                phase: moved.get("waits_python") if self.where.cuda else None for phase, moved in self.moved.items()
            },
            "timeline": None if self.run.timeline is None else self.run.timeline.lap(),
        }

    def take_inspected(self) -> dict:
        """Take it with the profiler on, and with PyTorch telling of every call that makes the host wait."""
        if not self.where.cuda:
            return self.take() | {"synchronising": None, "profile": None}
        from torch.profiler import ProfilerActivity, profile

        with warnings.catch_warnings(record=True) as self.caught:
            warnings.simplefilter("always")
            # PyTorch 2.11 warns that it clears events between cycles, unless they accumulate.
            activities = [ProfilerActivity.CUDA]
            if self.trace is not None:
                activities.append(ProfilerActivity.CPU)  # memascend's spans are of the host
            with profile(activities=activities, acc_events=True) as profiler:
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    record = self.take()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        if self.trace is not None:
            profiler.export_chrome_trace(self.trace)
        return record | {"synchronising": self.synchronising, "profile": busy(profiler)}


Interval = tuple[float, float]


def busy(profiler) -> dict:
    """Return the seconds of kernels on the device, of copies each way, and the share of copies beside kernels.

    As the profiler saw them; `overlapped_share` is None where nothing was copied.
    """
    from torch.autograd import DeviceType

    kernels: list[Interval] = []
    copies: dict[str, list[Interval]] = {"HtoD": [], "DtoH": []}
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.name.startswith("Memcpy"):
            for direction, there in copies.items():
                if direction in event.name:
                    there.append(interval)
        elif not event.name.startswith("Memset"):
            kernels.append(interval)
    computing, copying = union(kernels), union(copies["HtoD"] + copies["DtoH"])
    copied = length(copying)
    return {
        "kernel_seconds": length(computing),
        "h2d_seconds": sum(end - start for start, end in copies["HtoD"]),
        "d2h_seconds": sum(end - start for start, end in copies["DtoH"]),
        "overlapped_share": (copied + length(computing) - length(union(computing + copying))) / copied
        if copied
        else None,
    }


def union(intervals: list[Interval]) -> list[Interval]:
    """Return the times that any of the intervals covers, in order and apart."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def train(job: dict, keep) -> dict:
    """Return a warm-up, measured steps, and one that is inspected; the result is kept after each."""
    where = Where(job["device"])
    with ExitStack() as stack:
        if job["deterministic"]:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            # The plain product: the fused backward passes add up in the order in which blocks end.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(SEED)
        began = time.perf_counter()
        where.settle()
        # Contexts, handles and the first kernels of libraries.
        settle_s = time.perf_counter() - began
        if job["system"] in ("memascend", "resident"):
            import memascend  # noqa: F401 (the time of importing is not the run's)
        return _train(job, where, keep, settle_s)


def _train(job: dict, where: Where, keep, settle_s: float) -> dict:
    baseline_rss, in_use = rss(), where.in_use()
    reserved = torch.cuda.memory_reserved(where.device) if where.cuda else 0
    host = HostMemory()
    watch = _watch() if job["watch"] else None
    if where.cuda:
        torch.cuda.reset_peak_memory_stats(where.device)
    began = time.perf_counter()
    run = RUNS[job["system"]](job, where)
    setup_s = time.perf_counter() - began
    found = {"settle_s": settle_s, "setup_s": setup_s, "steps": [], "cut_short": None}
    total = job["warmup"] + job["steps"] + job["inspect"]
    driver = 0
    for number in range(total):
        if number and time.time() + found["steps"][-1]["seconds"] > job["until"]:
            found["cut_short"] = f"no time for more than {number} of {total} steps"
            break
        step = Step(run, job, number, where)
        kind = "warm-up" if number < job["warmup"] else "measured"
        if number == total - 1 and job["inspect"]:
            kind = "inspected"
        record = step.take_inspected() if kind == "inspected" else step.take()
        if where.cuda:
            driver = max(driver, where.in_use() - in_use + reserved)
        found["steps"].append({"kind": kind, **record})
        found |= {"device_peak": where.peaks() | {"driver_bytes": driver if where.cuda else None}}
        found["host_peak"] = {
            "resident_bytes": rss()["hwm"] - baseline_rss["rss"],
            "unavailable_bytes": host.before - host.least,
        }
        keep(found)
        print(f"step {number}: {found['steps'][-1]}", flush=True)
    if watch is not None:
        found["host_peak"]["held_bytes"] = watch.take()[0] - watch.before
        watch.stop()
    if job["compare"]:
        found["weights"] = {name: digest(tensor) for name, tensor in run.weights()}
    found |= run.close()
    found["host_peak"]["unavailable_bytes"] = host.stop()
    if watch is not None and found.get("host_allocator") == "cuda":
        found["host_peak"]["pinned_in_rss"] = share = pinned_in_rss()
        found["host_peak"]["held_bytes"] += int((1 - share) * found["host_bytes_reserved"])
    return found


def _watch():
    """Return a reading of memascend's host memory, as plan_accuracy.py takes it."""
    from plan_accuracy import Watch

    watch = Watch()
    watch.before = watch.steady()
    watch.start()
    return watch


def pinned_in_rss() -> float:
    """Return which share of memory pinned by CUDA counts as this process's anonymous memory: drivers differ."""
    import memascend

    nbytes = 256 << 20
    before = rss()["anon"]
    memory = memascend.empty_pinned(nbytes, torch.uint8, allocator="cuda")
    memory.fill_(1)
    return min(1.0, max(0.0, (rss()["anon"] - before) / nbytes))


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def write(job: dict, keep) -> dict:
    config = llama_config(job["shape"], job["vocabulary"], job["positions"])
    write_model(config, Path(job["model_dir"]), job["device"])
    return {}


def describe(job: dict, keep) -> dict:
    """Return the device, as PyTorch and the driver name it."""
    if job["device"] == "cpu" or not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(torch.device(job["device"]))
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


TASKS = {"train": train, "compute": compute, "rates": rates, "write": write, "describe": describe}


def run(job: dict) -> None:
    """Do a job, and end the process."""
    result = Path(job["result"])

    def keep(found: dict) -> None:
        part = result.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(result)

    keep(TASKS[job["task"]](job, keep))
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads and process group must not hold the exit up


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
