"""One measurement of gpu.py in a process of its own: `_gpu_child.py JOB`, a JSON object that names its task.

The interpreter with DeepSpeed runs it too, so memascend is imported where it is used. On the CPU (the smoke run) the
same code runs, and what only CUDA can tell is None.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from _common import mem_available, rss, versions
from _llama import llama_config, write_model

LEARNING_RATE, MAX_NORM, SEED = 1e-4, 1.0, 1
PHASES = ("forward", "backward", "clip", "update")
#: What a copy is measured in: units of a model are about so large.
PIECES = 8


class Where:
    """The device that computes."""

    def __init__(self, name: str) -> None:
        self.cuda = name != "cpu"
        self.device = torch.device(name)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function, repeats: int) -> float:
        """The median time of a call, after one that warms up; with nothing else going on."""
        taken = []
        for _ in range(repeats + 1):
            self.synchronize()
            began = time.perf_counter()
            function()
            self.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def settle(self) -> None:
        """Take a step of a toy: contexts, handles and what libraries allocate once are not counted."""
        from transformers import LlamaForCausalLM

        config = llama_config((64, 128, 2, 4, 2), 256)
        toy = LlamaForCausalLM(config).to(self.device, torch.bfloat16)
        ids = torch.zeros(1, 64, dtype=torch.long, device=self.device)
        toy(input_ids=ids, labels=ids).loss.backward()
        self.synchronize()
        del toy
        if self.cuda:
            torch.cuda.empty_cache()

    def in_use(self) -> int | None:
        """Bytes of the device in use by any process, by the driver."""
        if not self.cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def peaks(self) -> dict:
        if not self.cuda:
            return {"allocated_bytes": None, "reserved_bytes": None}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }


class HostMemory:
    """How far MemAvailable falls: pinned memory may be in no process's resident set, but it is not available."""

    def __init__(self) -> None:
        self.before = self.least = mem_available()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self.least = min(self.least, mem_available())

    def stop(self) -> int:
        """The most bytes that were taken from the system since this began."""
        self._end.set()
        self._thread.join()
        return self.before - min(self.least, mem_available())


# --- what trains ---


class MemascendRun:
    """An offloaded model, computing on the device."""

    def __init__(self, job: dict, where: Where) -> None:
        import memascend
        from memascend.offloading.api import offload_of

        on_device = {"device": str(where.device), "device_memory": job["device_memory"]} if where.cuda else {}
        self.model = memascend.from_pretrained(
            job["model_dir"],
            store=[f"{place}/gpu-store" for place in job["store"]],
            host_memory=job["host_memory"],
            recompute=job["policy"] != "keep",
            activations=None if job["policy"] == "keep" else job["policy"],
            batch_tokens=job["batch"] * job["sequence"],
            durability=job["durability"],
            **on_device,
        ).train()
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE, states=job["states"])
        self.state = offload_of(self.model)
        #: Seconds by kind, where the model keeps account of them.
        self.timeline = getattr(self.state, "timeline", None)

    def counters(self) -> dict:
        """What has moved so far, and how often this thread has waited for the device."""
        stats = self.state.runtime.stats()
        found = {name: stats[name] for name in ("ssd_bytes_read", "ssd_bytes_written")}
        link = self.state.runtime.device.stats() if self.state.device is not None else {}
        return found | {name: link.get(name, 0) for name in ("h2d_bytes", "d2h_bytes", "waits_python")}

    def update_bytes(self) -> int:
        """Bytes of host memory that one update of every parameter reads and writes."""
        planes = {
            place.name: sum(plane.bytes(place.numel) for plane in place.rule.planes)
            for place in self.state.places
            if place.rule is not None
        }
        return sum(
            2 * (place.nbytes + planes[place.name]) + place.nbytes
            for place in self.state.places
            if place.name in planes
        )

    def backward(self, loss) -> None:
        loss.backward()

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        import memascend

        return memascend.parameters_of(self.model)

    def close(self) -> dict:
        import memascend

        self.optimizer.flush()
        stats, plan = self.state.stats(), memascend.plan_of(self.model)
        update_bytes = self.update_bytes()
        memascend.close(self.model)
        names = ("engine", "direct_io", "host_allocator", "host_bytes_planned", "host_bytes_budget", "parameters")
        names += ("host_bytes_reserved", "device_bytes_planned", "device_bytes_budget", "notices")
        return {name: stats.get(name) for name in names} | {"plan": plan, "update_bytes": update_bytes}


class ResidentRun:
    """The transformers model on the device under memascend.AdamW without a store: the same arithmetic."""

    timeline = None

    def __init__(self, job: dict, where: Where) -> None:
        from transformers import LlamaForCausalLM

        import memascend

        model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16)
        self.model = model.to(where.device).train()
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE, states=job["states"])

    def counters(self) -> dict:
        return {}

    backward, clip = MemascendRun.backward, MemascendRun.clip
    update, weights = MemascendRun.update, MemascendRun.weights

    def close(self) -> dict:
        return {}


class DeepSpeedRun:
    """ZeRO-Infinity (parameters and states on NVMe) or ZeRO-Offload (states and the update on the CPU)."""

    timeline = None

    def __init__(self, job: dict, where: Where) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import deepspeed
        from transformers import LlamaForCausalLM

        infinity = job["system"] == "zero-infinity"
        self.config = {
            "train_micro_batch_size_per_gpu": job["batch"],
            "gradient_accumulation_steps": job["accumulate"],
            "bf16": {"enabled": True},
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 1e-2}},
            "zero_optimization": self._infinity(job) if infinity else self._offload(),
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        deepspeed.init_distributed(dist_backend="nccl" if where.cuda else "gloo")
        if infinity:
            with deepspeed.zero.Init(config_dict_or_path=self.config, dtype=torch.bfloat16):
                model = LlamaForCausalLM(llama_config(job["shape"], job["vocabulary"], job["positions"]))
            self._fill(model, Path(job["model_dir"]), deepspeed)
        else:
            model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        self.model, *_ = deepspeed.initialize(model=model, config=self.config, model_parameters=model.parameters())

    @staticmethod
    def _infinity(job: dict) -> dict:
        nvme = {"device": "nvme", "nvme_path": job["store"][0], "pin_memory": True}
        largest = job["vocabulary"] * job["shape"][0]  # elements of the embedding
        zero = {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 5, "buffer_size": largest},
            "offload_optimizer": {**nvme, "buffer_count": 4},
            # As in peak_memory.py: with the defaults the second step ends in "Not enough buffers 0".
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": int(5e7),
        }
        return zero | (job.get("zero") or {})

    @staticmethod
    def _offload() -> dict:
        return {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}}

    @staticmethod
    def _fill(model, directory: Path, deepspeed) -> None:
        from safetensors import safe_open

        weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        for name, param in model.named_parameters():
            with (
                deepspeed.zero.GatheredParameters([param], modifier_rank=0),
                safe_open(directory / weight_map[name], framework="pt") as file,
            ):
                param.data.copy_(file.get_tensor(name))

    def counters(self) -> dict:
        return {}

    def backward(self, loss) -> None:
        self.model.backward(loss)
        # It counts micro-batches itself, and does nothing in all but the last.
        self.model.step()

    def clip(self) -> None:
        pass

    def update(self) -> None:
        pass

    def close(self) -> dict:
        config = json.loads(json.dumps(self.config))
        for part in config["zero_optimization"].values():
            if isinstance(part, dict):
                part.pop("nvme_path", None)
        return {"deepspeed_config": config, "versions": versions("deepspeed", "torch", "transformers")}


RUNS = {
    "memascend": MemascendRun,
    "resident": ResidentRun,
    "zero-infinity": DeepSpeedRun,
    "zero-offload": DeepSpeedRun,
}


# --- one step, and what is seen of it ---


class Step:
    """One optimizer step in its phases; what the counters say of each."""

    def __init__(self, run, job: dict, number: int, where: Where) -> None:
        generator = torch.Generator().manual_seed(SEED + number)
        shape = (job["accumulate"], job["batch"], job["sequence"])
        self.ids = torch.randint(0, job["vocabulary"], shape, generator=generator)
        self.run, self.where, self.accumulate = run, where, job["accumulate"]
        # DeepSpeed divides by the number of micro-batches itself.
        self.divides = job["system"] in ("memascend", "resident")
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: {} for phase in PHASES}
        #: Synchronising calls that PyTorch warned of, by phase; filled where they are asked for.
        self.synchronising = {phase: [] for phase in PHASES}
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
                self.synchronising[name].append(f"{Path(message.filename).name}:{message.lineno}")

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
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    record = self.take()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return record | {"synchronising": self.synchronising, "profile": busy(profiler)}


def busy(profiler) -> dict:
    """Seconds in which the device ran any kernel, and seconds of copies each way, as the profiler saw them."""
    from torch.autograd import DeviceType

    kernels, copies = [], {"HtoD": 0.0, "DtoH": 0.0}
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        start, end = event.time_range.start, event.time_range.end
        if event.name.startswith("Memcpy"):
            for direction in copies:
                copies[direction] += (end - start) / 1e6 if direction in event.name else 0.0
        elif not event.name.startswith("Memset"):
            kernels.append((start, end))
    union, reached = 0.0, 0.0
    for start, end in sorted(kernels):
        union += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {"kernel_seconds": union / 1e6, "h2d_seconds": copies["HtoD"], "d2h_seconds": copies["DtoH"]}


def train(job: dict, keep) -> dict:
    """A warm-up, measured steps, and one that is inspected; the result is kept after each."""
    where = Where(job["device"])
    with ExitStack() as stack:
        if job["deterministic"]:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            # The plain product: the fused backward passes add up in the order in which blocks end.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(SEED)
        where.settle()
        if job["system"] in ("memascend", "resident"):
            import memascend  # noqa: F401 (what importing takes is not the run's)
        return _train(job, where, keep)


def _train(job: dict, where: Where, keep) -> dict:
    baseline_rss, in_use = rss(), where.in_use()
    reserved = torch.cuda.memory_reserved(where.device) if where.cuda else 0
    host = HostMemory()
    watch = _watch() if job["watch"] else None
    if where.cuda:
        torch.cuda.reset_peak_memory_stats(where.device)
    began = time.perf_counter()
    run = RUNS[job["system"]](job, where)
    found = {"setup_s": time.perf_counter() - began, "steps": [], "cut_short": None}
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
    """A reading of what memascend holds in host memory, as plan_accuracy.py takes it."""
    from plan_accuracy import Watch

    watch = Watch()
    watch.before = watch.steady()
    watch.start()
    return watch


def pinned_in_rss() -> float:
    """Which share of memory pinned by CUDA counts as this process's anonymous memory: drivers differ."""
    import memascend

    nbytes = 256 << 20
    before = rss()["anon"]
    memory = memascend.empty_pinned(nbytes, torch.uint8, allocator="cuda")
    memory.fill_(1)
    return min(1.0, max(0.0, (rss()["anon"] - before) / nbytes))


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


# --- rates ---


def compute(job: dict, keep) -> dict:
    """Seconds that a pass takes with everything on the device: of a layer with recomputation, and of the rest.

    From models of one layer and of three: their difference is two layers, and what is left of the first is embedding,
    head and loss.
    """
    from transformers import LlamaForCausalLM

    where, seconds = Where(job["device"]), {}
    where.settle()
    hidden, intermediate, _, heads, kv_heads = job["shape"]
    ids = torch.randint(0, job["vocabulary"], (job["batch"], job["sequence"])).to(where.device)
    for layers in (1, 3):
        config = llama_config((hidden, intermediate, layers, heads, kv_heads), job["vocabulary"], job["positions"])
        with where.device:
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

        def once(model=model) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        seconds[layers] = where.seconds(once, job["repeats"])
        del model, once
    layer = (seconds[3] - seconds[1]) / 2
    ends = seconds[1] - layer
    return {"layer_seconds": layer, "ends_seconds": ends, "pass_seconds": ends + job["shape"][2] * layer}


def rates(job: dict, keep) -> dict:
    """Bytes per second of copies to and from the device, of host memory and of the store's drives."""
    found: dict = {"copies": copies(job, Where(job["device"]))}
    keep(found)
    found["dram_bytes_per_s"] = dram(job["bytes"], job["repeats"])
    keep(found)
    found["ssd"] = ssd(job)
    return found


def dram(nbytes: int, repeats: int) -> float:
    """As STREAM counts a copy: each byte is read and written."""
    source, target = (torch.ones(nbytes // 4, dtype=torch.float32) for _ in range(2))
    return 2 * nbytes / Where("cpu").seconds(lambda: target.copy_(source), repeats)


def ssd(job: dict) -> dict:
    """What `memascend bench` measures, of all the store's places together."""
    from memascend.machine.drives import measure

    told = [measure(place, size=job["ssd_bytes"], seconds=job["ssd_seconds"]) for place in job["store"]]
    return {
        name: sum(one["workloads"][name]["bytes_per_second"] for one in told) for name in ("read", "write", "mix")
    } | {"direct_io": all(one["direct_io"] for one in told)}


def copies(job: dict, where: Where) -> dict:
    """Ours beside a plain copy with PyTorch's pinned memory, by turns, each way: medians of bytes per second.

    Where ours fails, `error` says why, and the plain copies are measured alone.
    """
    nbytes = job["bytes"]
    device = torch.ones(nbytes, dtype=torch.uint8, device=where.device)
    plain = torch.ones(nbytes, dtype=torch.uint8, pin_memory=where.cuda)
    theirs = {
        "h2d": lambda: device.copy_(plain, non_blocking=True),
        "d2h": lambda: plain.copy_(device, non_blocking=True),
    }

    def by_turns(ours: dict) -> dict:
        found = {}
        for direction, copy in theirs.items():
            functions = {"memascend": ours[direction]} if ours else {}
            functions["plain"] = copy
            speeds: dict[str, list[float]] = {name: [] for name in functions}
            for _ in range(job["repeats"]):
                for name, function in functions.items():
                    speeds[name].append(nbytes / where.seconds(function, 1))
            found[direction] = {name: statistics.median(values) for name, values in speeds.items()} | {"bytes": nbytes}
        return found

    try:
        with (
            tempfile.TemporaryDirectory(dir=job["store"][0]) as store,
            link_of(job, where, Path(store), device) as ours,
        ):
            found = by_turns(ours)
            for row in found.values():
                row["ratio"] = row["memascend"] / row["plain"]
            found["d2h"]["measured_on_device"] = ours["measured_on_device"]
            return found
    except Exception as error:  # whatever it is: the steps' floors need the plain rates
        traceback.print_exc()
        return by_turns({}) | {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def link_of(job: dict, where: Where, store: Path, device: torch.Tensor):
    """The two ways of a run: leases uploaded, gradients taken over. On the CPU, copies in host memory stand in."""
    if not where.cuda:
        host = torch.ones_like(device)
        yield {"h2d": lambda: device.copy_(host), "d2h": lambda: host.copy_(device), "measured_on_device": None}
        return
    from memascend._memascend import Runtime
    from memascend.machine.cuda import open_device
    from memascend.plan.host import CHUNK_ELEMENTS_MAX, STAGING_CHUNKS

    nbytes, chunk_bytes = job["bytes"], 2 * CHUNK_ELEMENTS_MAX
    chunks = nbytes // chunk_bytes + STAGING_CHUNKS
    runtime = Runtime(
        [store / "link"],
        [("weights", nbytes, 1)],
        [],
        chunk_bytes,
        chunks,
        CHUNK_ELEMENTS_MAX,
        65_536,
        1,
        device=where.device.index or 0,
    )
    opened = open_device("cuda")
    opened.link = link = runtime.device
    leases = [runtime.lease_unit(nbytes)]
    try:
        unit = runtime.add_unit()
        torch.frombuffer(leases[0], dtype=torch.uint8).fill_(1)
        piece = nbytes // PIECES
        pieces = device.view(torch.bfloat16).chunk(PIECES)
        # Measured once, as the gradient appears; here the copy alone counts.
        sums = [opened.block_sums(each) for each in pieces]
        gradients = [
            runtime.create_gradient(unit, f"piece {number}", "bfloat16", each.numel())
            for number, each in enumerate(pieces)
        ]

        def upload() -> None:
            ready = opened.record()
            for number in range(PIECES):
                offset = number * piece
                event = link.upload(leases[0], offset, piece, device.data_ptr() + offset, [ready])
            event.wait()

        def capture() -> None:
            ready = opened.record()
            captures = [
                runtime.capture_from_device(
                    gradient, 0, each.data_ptr(), each.numel(), False, ready, None if one is None else one.addresses
                )
                for gradient, each, one in zip(gradients, pieces, sums, strict=True)
            ]
            for one in captures:
                one.wait_copied()
            for one, gradient in zip(captures, gradients, strict=True):
                one.wait()
                runtime.clear_gradient(gradient)

        yield {"h2d": upload, "d2h": capture, "measured_on_device": sums[0] is not None}
    finally:
        leases.clear()
        runtime.close(keep=False)


def write(job: dict, keep) -> dict:
    config = llama_config(job["shape"], job["vocabulary"], job["positions"])
    write_model(config, Path(job["model_dir"]), job["device"])
    return {}


def describe(job: dict, keep) -> dict:
    """The device, as PyTorch and the driver name it."""
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


def main() -> None:
    job = json.loads(sys.argv[1])
    result = Path(job["result"])

    def keep(found: dict) -> None:
        part = result.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(result)

    keep(TASKS[job["task"]](job, keep))
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads and process group must not hold the exit up


if __name__ == "__main__":
    main()
