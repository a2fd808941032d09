#!/usr/bin/env python
"""The engines beside fio, the store beside DeepSpeed's aio_handle and files of torch.save, two volumes beside one.

    python benches/io.py fio                                    # needs fio and cargo
    python benches/io.py peers --deepspeed-python DS_VENV/bin/python
    python benches/io.py volumes                                # needs root, loop devices and cgroup v1's blkio
    python benches/io.py all --check --output benches/results/io.json

Compared figures are measured by turns, the order rotated with every round. A ratio is the median of the
rounds' ratios, so that a drift of the drive hits both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import machine, markdown, rss, run, versions

ROOT = Path(__file__).resolve().parent.parent
CENSUS = ROOT / "benches/configs/qwen2.5-7b.json"
MIB, GIB, PAGE = 2**20, 2**30, 4096
BANDWIDTH_MIN, IOPS_MIN, CPU_MAX = 0.98, 0.95, 1.0
TWICE_MIN, SUM_MIN = 1.9, 0.95
ALTERNATIONS_MIN = 5


class Missing(Exception):
    """Something that this machine lacks."""


@contextlib.contextmanager
def cpu_time(who: int = resource.RUSAGE_SELF) -> Iterator[list[float]]:
    """Fill a list with the user and system seconds of this process (every thread) or of its ended children."""
    taken: list[float] = []
    before = resource.getrusage(who)
    yield taken
    after = resource.getrusage(who)
    taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def alternate(names: Sequence[str], rounds: int, run: Callable[[str], dict]) -> dict[str, list[dict]]:
    """Run each name once per round. Every round begins with another one."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            results[name].append(run(name))
    return results


def ratio(ours: list[dict], theirs: list[dict], key: str) -> float:
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def median(runs: list[dict], key: str) -> float:
    return statistics.median(run[key] for run in runs)


# --- beside fio ---


@dataclass(frozen=True)
class Workload:
    name: str
    read_percent: int
    random: bool
    request_bytes: int
    depth: int


WORKLOADS = [
    Workload("sequential read, 1 MiB", 100, False, MIB, 32),
    Workload("sequential write, 1 MiB", 0, False, MIB, 32),
    Workload("55/45 mix, 1 MiB", 55, False, MIB, 32),
    Workload("random read, 4 KiB", 100, True, PAGE, 64),
]
#: The largest lease, and the most requests of a batch: half of them may be in flight.
BATCH_BYTES, BATCH_MAX = 32 * MIB, 1024


def measured(seconds: float, requests: int, nbytes: int, cpu: float) -> dict:
    return {
        "seconds": seconds,
        "bytes_per_second": nbytes / seconds,
        "requests_per_second": requests / seconds,
        "cpu_seconds_per_gib": cpu / (nbytes / GIB),
    }


class Fio:
    """fio on a file that is there and full."""

    def __init__(self, target: Path, size: int) -> None:
        if shutil.which("fio") is None:
            raise Missing("fio is not installed (Debian and Ubuntu: apt-get install fio)")
        self.common = [
            "fio",
            "--name=beside",
            f"--filename={target}",
            f"--size={size}",
            "--ioengine=io_uring",
            "--direct=1",
            "--output-format=json",
            # Work that costs fio processor time and the engines do not do.
            "--scramble_buffers=0",
            "--norandommap=1",
        ]
        self._start_cost: dict[str, float] = {}

    def _run(self, workload: Workload, *more: str) -> tuple[dict, float]:
        kind = {0: "write", 100: "read"}.get(workload.read_percent, "rw")
        command = [
            *self.common,
            f"--rw={'rand' * workload.random}{kind}",
            f"--rwmixread={workload.read_percent}",
            f"--bs={workload.request_bytes}",
            f"--iodepth={workload.depth}",
            *more,
        ]
        with cpu_time(resource.RUSAGE_CHILDREN) as cpu:
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        # Notes of fio's come before the JSON.
        return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0], cpu[0]

    def start_cost(self, workload: Workload) -> float:
        """Processor seconds of a run of one request: starting, filling the buffers, ending."""
        if workload.name not in self._start_cost:
            runs = [self._run(workload, "--number_ios=1")[1] for _ in range(3)]
            self._start_cost[workload.name] = statistics.median(runs)
        return self._start_cost[workload.name]

    def run(self, workload: Workload, seconds: float) -> dict:
        job, cpu = self._run(workload, "--time_based", f"--runtime={round(seconds * 1000)}ms")
        directions = [job["read"], job["write"]]
        elapsed = max(direction["runtime"] for direction in directions) / 1000
        nbytes = sum(direction["io_bytes"] for direction in directions)
        requests = sum(direction["total_ios"] for direction in directions)
        # A run too short to tell must not make a ratio negative.
        result = measured(elapsed, requests, nbytes, max(cpu - self.start_cost(workload), 0.001))
        # Of fio's own thread: without those that the kernel starts for a ring.
        told = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return {**result, "told_cpu_seconds_per_gib": told / (nbytes / GIB)}


def rust_bench() -> Path:
    """Build the engines' own bench and return the program."""
    if shutil.which("cargo") is None:
        raise Missing("cargo is not installed, and --rust-bench names no program")
    command = ["cargo", "bench", "-p", "memascend-nvme", "--bench", "io", "--no-run", "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit("the bench of memascend-nvme could not be built")
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Path([message["executable"] for message in messages if message.get("executable")][-1])


def run_rust(program: Path, volume: Path, workload: Workload, size: int, seconds: float) -> dict:
    command = [
        str(program),
        *("--dir", str(volume), "--keep", "--json"),
        *("--read-percent", str(workload.read_percent)),
        *(["--random"] if workload.random else []),
        *("--bytes", str(workload.request_bytes)),
        *("--depth", str(workload.depth)),
        *("--size", str(size)),
        *("--seconds", str(seconds)),
    ]
    done = subprocess.run(command, cwd=volume, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the engines' bench failed: {done.stderr.strip()}")
    told = json.loads(done.stdout)
    if not told["direct"]:
        raise SystemExit(f"{volume} refuses O_DIRECT: choose another --dir")
    return told


def through_leases(volume, workload: Workload, size: int, seconds: float) -> dict:
    """Two batches at a time, each with half the depth in flight: Python waits for one and starts it again."""
    import numpy

    random, nbytes = numpy.random.default_rng(1), workload.request_bytes
    batch, half = min(BATCH_BYTES // nbytes, BATCH_MAX), workload.depth // 2
    places = size // nbytes
    at = {"read": 0, "write": 0}
    chosen = 0.0

    def offsets(operation: str, count: int) -> list[int]:
        if workload.random:
            return (random.integers(places, size=count) * nbytes).tolist()
        first = at[operation]
        at[operation] += count
        return [place % places * nbytes for place in range(first, first + count)]

    # A batch of the mix has a lease for its reads and one for its writes.
    leases = [{name: volume.lease(batch * nbytes) for name in at} for _ in range(2)]
    assert all(lease is not None for pair in leases for lease in pair.values())
    flights: list[list] = [[], []]
    requests, turn = 0, 0
    with cpu_time() as cpu:
        began = time.perf_counter()
        until = began + seconds
        while True:
            # Chosen while both batches are under way.
            chosen += batch * workload.read_percent / 100
            reads = round(chosen)
            chosen -= reads
            parts = [
                (name, offsets(name, count)) for name, count in (("read", reads), ("write", batch - reads)) if count
            ]
            for transfers in flights[turn]:
                transfers.wait()
            flights[turn] = []
            if time.perf_counter() >= until:
                break
            for name, places_of in parts:
                depth = max(1, round(half * len(places_of) / batch))
                flights[turn].append(volume.start(name, places_of, leases[turn][name], nbytes, depth))
            requests += batch
            turn = 1 - turn
        for transfers in flights[1 - turn]:
            transfers.wait()
        elapsed = time.perf_counter() - began
    return measured(elapsed, requests, requests * nbytes, cpu[0])


def run_measure(volume, workload: Workload, size: int, seconds: float) -> dict:
    with cpu_time() as cpu:
        told = volume.measure(
            read_percent=workload.read_percent,
            random=workload.random,
            request_bytes=workload.request_bytes,
            depth=workload.depth,
            span_bytes=size,
            seconds=seconds,
        )
    return measured(told["seconds"], told["requests"], told["bytes_read"] + told["bytes_written"], cpu[0])


def scramble(view) -> None:
    """Fill memory with noise: a drive may be faster with zeros, and fio writes noise."""
    noise = os.urandom(MIB)
    for start in range(0, len(view), MIB):
        view[start : start + MIB] = noise[: len(view) - start]


def scramble_all(volume, nbytes: int) -> None:
    """Fill every free buffer of a volume with noise."""
    leases = []
    while (lease := volume.lease(nbytes)) is not None:
        scramble(memoryview(lease))
        leases.append(lease)


def fill(volume, size: int) -> None:
    """Write the whole file once: blocks that were never written are not read from the drive."""
    leases = [volume.lease(BATCH_BYTES) for _ in range(2)]
    flights: list = [None, None]
    for number, start in enumerate(range(0, size, BATCH_BYTES)):
        if flights[number % 2]:
            flights[number % 2].wait()
        places = list(range(start, min(start + BATCH_BYTES, size), MIB))
        flights[number % 2] = volume.start("write", places, leases[number % 2], MIB)
    for transfers in flights:
        if transfers:
            transfers.wait()
    volume.flush()


def beside_fio(args: argparse.Namespace, workdir: Path) -> dict:
    """fio, the engine in Rust and the engine from Python on one file."""
    from memascend._memascend import Volume

    size = args.size // MIB * MIB
    home = Path(tempfile.mkdtemp(prefix="io-", dir=workdir))
    names = ["batches", "measure", "rust"]
    batches, single, rust = (home / name for name in names)
    file = "memascend.volume"
    opened = []
    try:
        fio = Fio(rust / file, size)
        program = args.rust_bench.resolve() if args.rust_bench else rust_bench()
        # One file under three names. A new volume empties its file, so all are made before it is filled; the bench
        # takes a file with a note beside it as it is.
        opened.append(Volume(batches, buffer_bytes=BATCH_BYTES, buffer_count=4))
        for other in (single, rust):
            other.mkdir()
            os.link(batches / file, other / file)
        (rust / "memascend.json").write_text("{}")
        opened.append(Volume(single, buffer_bytes=MIB, buffer_count=max(w.depth for w in WORKLOADS)))
        for volume in opened:
            volume.reserve(size)
        scramble_all(opened[0], BATCH_BYTES)
        scramble_all(opened[1], MIB)
        fill(opened[0], size)
        about = opened[0].stats()
        if not about["direct_io"]:
            raise SystemExit(f"{workdir} refuses O_DIRECT: choose another --dir")
        inodes = {(home / name / file).stat().st_ino for name in names}
        assert len(inodes) == 1, "the three names are of one file"
        rows = []
        for workload in [w for w in WORKLOADS if args.only in w.name]:
            runners = {
                "fio": lambda w=workload: fio.run(w, args.seconds),
                "rust": lambda w=workload: run_rust(program, rust, w, size, args.seconds),
                "python, leases": lambda w=workload: through_leases(opened[0], w, size, args.seconds),
                "python, measure": lambda w=workload: run_measure(opened[1], w, size, args.seconds),
            }
            fio.start_cost(workload)
            runs = alternate(list(runners), args.alternations, lambda name, r=runners: r[name]())
            rows.append({"workload": workload.name, "depth": workload.depth, "runs": runs, **against(workload, runs)})
            print(f"  {workload.name}: done", file=sys.stderr)
    finally:
        for volume in opened:
            volume.close()
        shutil.rmtree(home)
    return {
        "engine": about["engine"],
        "features": about["features"],
        "fio": subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip(),
        "size_bytes": size,
        "seconds": args.seconds,
        "alternations": args.alternations,
        "rows": rows,
    }


def against(workload: Workload, runs: dict[str, list[dict]]) -> dict:
    """Return the ratios to fio, and which of them miss."""
    speed, least = ("requests_per_second", IOPS_MIN) if workload.random else ("bytes_per_second", BANDWIDTH_MIN)
    ratios, misses = {}, []
    for name in runs:
        if name == "fio":
            continue
        told = statistics.median(
            a["cpu_seconds_per_gib"] / b["told_cpu_seconds_per_gib"]
            for a, b in zip(runs[name], runs["fio"], strict=True)
        )
        found = {
            "speed": ratio(runs[name], runs["fio"], speed),
            "cpu": ratio(runs[name], runs["fio"], "cpu_seconds_per_gib"),
            "cpu_to_told": told,
        }
        ratios[name] = found
        if found["speed"] < least:
            misses.append(f"{workload.name}, {name}: {found['speed']:.3f} of fio's speed, not {least}")
        if found["cpu"] > CPU_MAX:
            misses.append(f"{workload.name}, {name}: {found['cpu']:.3f} of fio's CPU time")
    return {"ratios": ratios, "misses": misses}


def report_fio(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        for name, runs in row["runs"].items():
            ratios = row["ratios"].get(name)
            rows.append(
                [
                    row["workload"],
                    name,
                    f"{median(runs, 'bytes_per_second') / 1e6:.0f}",
                    f"{median(runs, 'requests_per_second'):.0f}",
                    f"{ratios['speed']:.3f}" if ratios else "",
                    f"{median(runs, 'cpu_seconds_per_gib'):.3f}",
                    f"{ratios['cpu']:.2f}" if ratios else "",
                ]
            )
    header = ["workload", "by", "MB/s", "requests/s", "to fio", "CPU s/GiB", "to fio"]
    return markdown(header, rows)


# --- beside DeepSpeed and torch.save ---

LEASE_BYTES, LEASE_COUNT, SMALL_BYTES, SMALL_COUNT = 32 * MIB, 6, 64 * 1024, 64
#: How much of DeepSpeed's locked memory is in flight at once, unless one tensor is larger.
GROUP_BYTES = 256 * MIB
#: (several tensors under way, threads)
DEEPSPEED_SETTINGS = [(False, 1), (True, 1), (True, 2)]
PEER_PHASES = ["write", "write_again", "read"]


def census(size: int) -> list[int]:
    """Return the bytes of every tensor of Qwen2.5-7B in bfloat16, large ones scaled to `size` bytes in all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CENSUS))
    sizes = [parameter.numel() * 2 for parameter in model.parameters()]
    small = sum(nbytes for nbytes in sizes if nbytes < MIB)
    factor = min(1.0, (size - small) / (sum(sizes) - small))
    if factor <= 0:
        raise SystemExit(f"--size: the small tensors alone take {small} bytes")
    scaled = (nbytes if nbytes < MIB else int(nbytes * factor) for nbytes in sizes)
    return [-(-nbytes // PAGE) * PAGE for nbytes in scaled]


def stamp(view, number: int) -> None:
    """Mark both ends of a tensor, so that reading back the wrong bytes is noticed."""
    struct.pack_into("<Q", view, 0, number)
    struct.pack_into("<Q", view, len(view) - 8, ~number & (2**64 - 1))


def check_stamp(view, number: int) -> None:
    found = struct.unpack_from("<Q", view, 0)[0], struct.unpack_from("<Q", view, len(view) - 8)[0]
    if found != (number, ~number & (2**64 - 1)):
        raise SystemExit(f"tensor {number} came back as another: {found}")


def sync_filesystem(directory: Path) -> None:
    """Everything written is on the drive: one call for all files, cheaper than an fsync for each."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(descriptor)


def phases(steps: dict[str, Callable[[], None]], before_read: Callable[[], None] = lambda: None) -> dict:
    """Return the times each step; a read begins without a page cache."""
    result = {}
    for name, step in steps.items():
        if name == "read":
            before_read()
        with cpu_time() as cpu:
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
        result[name] = {"seconds": seconds, "cpu_seconds": cpu[0]}
    return result


def peer_memascend(directory: Path, sizes: list[int], _setting: list) -> dict:
    """Return a store of one volume, one request for each tensor; larger ones than a lease in as many as it takes."""
    from memascend._memascend import Runtime
    from memascend.memory_plan.arena import Arena

    baseline = rss()["hwm"]
    classes = [("small", SMALL_BYTES, SMALL_COUNT), ("large", LEASE_BYTES, LEASE_COUNT)]
    runtime = Runtime([directory / "store"], Arena(classes, [], 64 * 1024, 16, 64 * 1024, 64 * 1024, 1))
    pieces = [min(LEASE_BYTES, left) for nbytes in sizes for left in range(nbytes, 0, -LEASE_BYTES)]
    units = [runtime.units.add_unit() for _ in pieces]
    extents: list = []
    leases = [runtime.memory.lease_unit(nbytes) for _, nbytes, count in classes for _ in range(count)]
    for lease in leases:
        scramble(memoryview(lease))
    del leases, lease

    def leased(nbytes: int, finish_oldest: Callable[[], None]):
        while (lease := runtime.memory.lease_unit(nbytes)) is None:
            finish_oldest()
        return lease

    def write() -> None:
        running: deque[int] = deque()
        for number, nbytes in enumerate(pieces):
            if len(extents) == number:
                extents.append([(runtime.store.create_tensor(f"tensor {number}", nbytes), 0, nbytes)])
            lease = leased(nbytes, lambda: runtime.units.wait_unit(running.popleft()))
            stamp(memoryview(lease)[:nbytes], number)
            runtime.units.write_unit(units[number], extents[number], lease)
            del lease
            running.append(units[number])
        for unit in running:
            runtime.units.wait_unit(unit)
        with open(directory / "store/memascend.volume", "rb") as volume:
            os.fsync(volume.fileno())

    def read() -> None:
        running: deque[tuple] = deque()

        def finish_oldest() -> None:
            ticket, lease, number = running.popleft()
            ticket.wait()
            check_stamp(memoryview(lease)[: pieces[number]], number)

        for number, nbytes in enumerate(pieces):
            lease = leased(nbytes, finish_oldest)
            running.append((runtime.units.fetch(units[number], extents[number], lease, []), lease, number))
            del lease
        while running:
            finish_oldest()

    result = phases({"write": write, "write_again": write, "read": read})
    result["peak_bytes"] = rss()["hwm"] - baseline
    runtime.close(False)
    return result


def peer_deepspeed(directory: Path, sizes: list[int], setting: list) -> dict:
    """aio_handle as its tensor swapper uses it: a file for each tensor, locked memory, O_DIRECT."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    together, threads = setting
    handle = (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=MIB, queue_depth=32, single_submit=False, overlap_events=True, intra_op_parallelism=threads
        )
    )
    baseline = rss()["hwm"]
    capacity = max(GROUP_BYTES if together else 0, *sizes)
    locked = handle.new_cpu_locked_tensor(capacity, torch.empty(0, dtype=torch.uint8))
    view = memoryview(locked.numpy())
    scramble(view)
    groups: list[list[tuple[int, int]]] = []
    end = capacity + 1
    for number, nbytes in enumerate(sizes):
        if not together or end + nbytes > capacity:
            groups.append([])
            end = 0
        groups[-1].append((number, end))
        end += nbytes

    def move(transfer: Callable, before: Callable | None, after: Callable | None) -> None:
        for group in groups:
            for number, start in group:
                if before:
                    before(view[start : start + sizes[number]], number)
                transfer(locked[start : start + sizes[number]], str(directory / f"{number}.swp"))
            if together and handle.wait() != len(group):
                raise SystemExit("DeepSpeed did not finish every transfer")
            for number, start in group:
                if after:
                    after(view[start : start + sizes[number]], number)

    def write() -> None:
        move(handle.async_pwrite if together else handle.sync_pwrite, stamp, None)
        sync_filesystem(directory)

    def read() -> None:
        move(handle.async_pread if together else handle.sync_pread, None, check_stamp)

    result = phases({"write": write, "write_again": write, "read": read})
    result["peak_bytes"] = rss()["hwm"] - baseline
    result["pinned"] = bool(handle.is_pinned(locked[PAGE : 2 * PAGE]))
    return result


def peer_torch(directory: Path, sizes: list[int], _setting: list) -> dict:
    """Return a file for each tensor by torch.save and torch.load, through the page cache."""
    import torch

    baseline = rss()["hwm"]
    memory = bytearray(max(sizes))
    scramble(memoryview(memory))
    paths = [directory / f"{number}.pt" for number in range(len(sizes))]

    def write() -> None:
        for number, (path, nbytes) in enumerate(zip(paths, sizes, strict=True)):
            stamp(memoryview(memory)[:nbytes], number)
            # A view of a tensor would be saved with all of its storage.
            torch.save(torch.frombuffer(memory, dtype=torch.uint8, count=nbytes), path)
        sync_filesystem(directory)

    def forget() -> None:
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        for number, path in enumerate(paths):
            check_stamp(memoryview(torch.load(path, weights_only=True).numpy()), number)

    result = phases({"write": write, "write_again": write, "read": read}, forget)
    if paths[-1].stat().st_size > sizes[-1] + MIB:
        raise SystemExit("torch.save wrote more than the tensor")
    result["peak_bytes"] = rss()["hwm"] - baseline
    return result


PEERS = {"memascend": peer_memascend, "deepspeed": peer_deepspeed, "torch": peer_torch}


def child(function: str, job: dict, python: Path, cgroup: Path | None = None) -> dict:
    """Run a function of this file in a process of its own, in `cgroup` from the beginning."""

    def enter() -> None:
        if cgroup:
            (cgroup / "cgroup.procs").write_text("0")

    done = subprocess.run(
        [str(python), __file__, "child", function],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        preexec_fn=enter,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    if done.returncode != 0:
        raise SystemExit(f"{function} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def child_peer(job: dict) -> dict:
    return PEERS[job["peer"]](Path(job["directory"]), job["sizes"], job["setting"])


def beside_peers(args: argparse.Namespace, workdir: Path) -> dict:
    sizes = census(args.size)
    peers: dict[str, tuple] = {"memascend": ("memascend", [], Path(sys.executable))}
    if args.deepspeed_python:
        for together, threads in DEEPSPEED_SETTINGS:
            how = "several tensors at once" if together else "one tensor at a time"
            name = f"DeepSpeed aio_handle, {how}, {threads} thread{'s' * (threads > 1)}"
            peers[name] = ("deepspeed", [together, threads], args.deepspeed_python)
    peers["torch.save, torch.load"] = ("torch", [], Path(sys.executable))

    def run(name: str) -> dict:
        peer, setting, python = peers[name]
        with tempfile.TemporaryDirectory(prefix="io-", dir=workdir) as directory:
            job = {"peer": peer, "directory": directory, "sizes": sizes, "setting": setting}
            result = child("child_peer", job, python)
        # Pending writes and discards of the others are not this one's.
        sync_filesystem(workdir)
        total = sum(sizes)
        for phase in PEER_PHASES:
            result[f"{phase}_bytes_per_second"] = total / result[phase]["seconds"]
        cpu = sum(result[phase]["cpu_seconds"] for phase in PEER_PHASES)
        result["cpu_seconds_per_gib"] = cpu / (total * len(PEER_PHASES) / GIB)
        print(f"  {name}: done", file=sys.stderr)
        return result

    about = None
    if args.deepspeed_python:
        command = [str(args.deepspeed_python), "-c", "import importlib.metadata as m; print(m.version('deepspeed'))"]
        about = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "tensors": len(sizes),
        "bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "alternations": args.alternations,
        "lease_bytes": LEASE_BYTES,
        "deepspeed": about,
        "runs": alternate(list(peers), args.alternations, run),
    }


def report_peers(result: dict) -> str:
    rows = []
    for name, runs in result["runs"].items():
        speeds = [f"{median(runs, f'{phase}_bytes_per_second') / 1e6:.0f}" for phase in PEER_PHASES]
        cpu, peak = median(runs, "cpu_seconds_per_gib"), median(runs, "peak_bytes")
        rows.append([name, *speeds, f"{cpu:.3f}", f"{peak / MIB:.0f}"])
    return markdown(["by", "write MB/s", "write again MB/s", "read MB/s", "CPU s/GiB", "peak MiB"], rows)


# --- two volumes ---

DEVICE_BYTES = GIB
#: Bytes per second of a direction, on average of both. Far below the rate of a loop device in memory, or the throttle
#: is not the limit.
THROTTLES = {"equal": (400 * 10**6, 400 * 10**6), "3:1": (600 * 10**6, 200 * 10**6)}
TENSOR_BYTES = [mib * MIB for mib in range(8, 65, 8)]
TENSOR_COUNT, IN_FLIGHT, WARM_UP_SECONDS = 16, 8, 1.5
MIX = {"read_percent": 55, "random": False, "request_bytes": MIB, "depth": 32}


def throttles_directory() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind == "cgroup" and "blkio" in options.split(","):
            return Path(point)
    raise Missing("cgroup v1's blkio controller is not mounted")


@contextlib.contextmanager
def loop_devices(directory: Path, count: int) -> Iterator[list[Path]]:
    """Block devices formatted for memascend, on files in `directory`."""
    from memascend._memascend import format_device

    if os.geteuid() != 0:
        raise Missing("loop devices and throttles need root")
    if shutil.which("losetup") is None:
        raise Missing("losetup is not installed (util-linux; on Debian and Ubuntu the package mount)")
    devices: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="io-", dir=directory) as files:
        try:
            for number in range(count):
                file = Path(files) / f"{number}"
                with open(file, "wb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, DEVICE_BYTES)
                command = ["losetup", "--find", "--show", "--direct-io=on", str(file)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    raise Missing(f"no loop device: {done.stderr.strip()}")
                devices.append(Path(done.stdout.strip()))
                format_device(devices[-1], devices[-1])
            yield devices
        finally:
            for device in devices:
                subprocess.run(["losetup", "--detach", str(device)], check=True)


@contextlib.contextmanager
def throttled(devices: Sequence[Path], rates: Sequence[int]) -> Iterator[Path]:
    """Yield a cgroup in which each device gives and takes so many bytes per second."""
    group = throttles_directory() / f"memascend-bench-{os.getpid()}"
    group.mkdir()
    try:
        for device, rate in zip(devices, rates, strict=True):
            number = device.stat().st_rdev
            # In the proportion of the mix: otherwise the queue slowly becomes reads alone, and until then a volume
            # seems faster than it is.
            for direction, percent in (("read", MIX["read_percent"]), ("write", 100 - MIX["read_percent"])):
                line = f"{os.major(number)}:{os.minor(number)} {2 * rate * percent // 100}"
                (group / f"blkio.throttle.{direction}_bps_device").write_text(line)
        yield group
    finally:
        # A process that has just ended may still be listed.
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
        else:
            print(f"could not remove {group}", file=sys.stderr)


def volume_rate(device: Path, seconds: float) -> float:
    """Return the bytes per second of one volume alone."""
    from memascend._memascend import Volume

    volume = Volume(device, buffer_bytes=MIB, buffer_count=MIX["depth"])
    told = volume.measure(**MIX, span_bytes=DEVICE_BYTES // 2, seconds=seconds)
    volume.close()
    return (told["bytes_read"] + told["bytes_written"]) / told["seconds"]


def store_rate(devices: Sequence[str], rates: Sequence[float], seconds: float) -> dict:
    """Return the bytes per second of tensors read and written 55 to 45, some at a time, in the steady state."""
    from memascend._memascend import Runtime
    from memascend.memory_plan.arena import Arena

    classes = [("tensors", max(TENSOR_BYTES), IN_FLIGHT)]
    arena = Arena(classes, [], 64 * 1024, 16, 64 * 1024, 64 * 1024, 1)
    runtime = Runtime(list(devices), arena, rates=list(rates))
    sizes = [TENSOR_BYTES[number % len(TENSOR_BYTES)] for number in range(TENSOR_COUNT)]
    tensors = [
        (runtime.units.add_unit(), [(runtime.store.create_tensor(f"tensor {n}", size), 0, size)])
        for n, size in enumerate(sizes)
    ]
    written: list[int | None] = [None] * TENSOR_COUNT
    moved = {"read": 0, "write": 0}
    running: deque[tuple] = deque()

    def finish_oldest() -> None:
        number, ticket, lease, expected = running.popleft()
        if ticket is None:
            return runtime.units.wait_unit(tensors[number][0])
        ticket.wait()
        if expected is not None:
            check_stamp(memoryview(lease)[: sizes[number]], expected)
        return None

    def begin(turn: int) -> None:
        number = turn % TENSOR_COUNT
        unit, extent = tensors[number]
        while (lease := runtime.memory.lease_unit(sizes[number])) is None:
            finish_oldest()
        if moved["read"] * 45 <= moved["write"] * 55:
            moved["read"] += sizes[number]
            ticket = runtime.units.fetch(unit, extent, lease, [])
            running.append((number, ticket, lease, written[number]))
        else:
            moved["write"] += sizes[number]
            written[number] = turn
            stamp(memoryview(lease)[: sizes[number]], turn)
            runtime.units.write_unit(unit, extent, lease)
            running.append((number, None, None, None))

    def reading() -> tuple[float, int, list[int]]:
        each = [volume["bytes_read"] + volume["bytes_written"] for volume in runtime.stats()["volumes"]]
        return time.perf_counter(), sum(each), each

    turn, first = 0, None
    began = time.perf_counter()
    while True:
        begin(turn)
        turn += 1
        now = time.perf_counter() - began
        if first is None and now >= WARM_UP_SECONDS:
            first = reading()
        if now >= WARM_UP_SECONDS + seconds:
            break
    last = reading()
    while running:
        finish_oldest()
    shares = [volume["share"] for volume in runtime.stats()["volumes"]]
    runtime.close(False)
    elapsed = last[0] - first[0]
    return {
        "bytes_per_second": (last[1] - first[1]) / elapsed,
        "volumes_bytes_per_second": [(b - a) / elapsed for a, b in zip(first[2], last[2], strict=True)],
        "shares": shares,
    }


def child_volumes(job: dict) -> dict:
    devices, seconds = job["devices"], job["seconds"]
    rates = [volume_rate(device, seconds) for device in devices]
    on = {"first": ([devices[0]], [rates[0]]), "second": ([devices[1]], [rates[1]]), "both": (devices, rates)}
    runs = alternate(list(on), job["alternations"], lambda name: store_rate(*on[name], seconds))
    return {"rates": rates, "runs": runs}


def two_volumes(args: argparse.Namespace, _workdir: Path) -> dict:
    throttles_directory()
    rows, misses = [], []
    with loop_devices(args.devices_in, 2) as devices:
        free = [volume_rate(device, 1.0) for device in devices]
        for name, rates in THROTTLES.items():
            with throttled(devices, rates) as group:
                job = {
                    "devices": [str(device) for device in devices],
                    "seconds": args.seconds,
                    "alternations": args.alternations,
                }
                result = child("child_volumes", job, Path(sys.executable), group)
            runs = result["runs"]
            alone = [
                {"bytes_per_second": a["bytes_per_second"] + b["bytes_per_second"]}
                for a, b in zip(runs["first"], runs["second"], strict=True)
            ]
            to_sum = ratio(runs["both"], alone, "bytes_per_second")
            row = {"speeds": name, "throttles": rates, **result, "to_sum": to_sum, "to_mean": 2 * to_sum}
            rows.append(row)
            if min(free) < 2 * max(rates):
                misses.append(f"{name}: a device does {min(free) / 1e6:.0f} MB/s unthrottled: the throttle is no limit")
            if name == "equal" and row["to_mean"] < TWICE_MIN:
                misses.append(f"two equal volumes: {row['to_mean']:.3f} of one, not {TWICE_MIN}")
            if name != "equal" and to_sum < SUM_MIN:
                misses.append(f"volumes of {name}: {to_sum:.3f} of their sum, not {SUM_MIN}")
            print(f"  {name}: done", file=sys.stderr)
    return {
        "devices": f"loop devices on files in {'memory' if on_tmpfs(args.devices_in) else 'a directory'}, "
        "throttled by cgroup v1's blkio",
        "device_bytes": DEVICE_BYTES,
        "unthrottled_bytes_per_second": free,
        "seconds": args.seconds,
        "alternations": args.alternations,
        "rows": rows,
        "misses": misses,
    }


def on_tmpfs(directory: Path) -> bool:
    done = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True)
    return done.stdout.strip() == "tmpfs"


def report_volumes(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        runs = row["runs"]
        rows.append(
            [
                row["speeds"],
                " and ".join(f"{rate / 1e6:.0f}" for rate in row["throttles"]),
                " and ".join(f"{rate / 1e6:.0f}" for rate in row["rates"]),
                " and ".join(f"{share:.2f}" for share in runs["both"][0]["shares"]),
                *(f"{median(runs[name], 'bytes_per_second') / 1e6:.0f}" for name in ("first", "second", "both")),
                f"{row['to_mean']:.3f}" if row["speeds"] == "equal" else "",
                f"{row['to_sum']:.3f}",
            ]
        )
    header = ["speeds", "throttled to", "measured", "shares", "first", "second", "both", "of one", "of the sum"]
    return markdown(header, rows)


# --- the command line ---

PARTS = {
    "fio": ("Beside fio, medians", beside_fio, report_fio),
    "peers": ("The tensors of Qwen2.5-7B, medians", beside_peers, report_peers),
    "volumes": ("Two volumes, medians (MB/s)", two_volumes, report_volumes),
}
CHILDREN = {"child_peer": child_peer, "child_volumes": child_volumes}


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 4GiB, 512M")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " "))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--dir", type=Path, help="where files go (default: a new directory beside the repository's)")
    parser.add_argument(
        "--size", type=parse_bytes, default=4 * GIB, help="of fio's file, of all tensors (default: 4GiB)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement (default: %(default)s)")
    parser.add_argument("--alternations", type=int, default=5, help="rounds; a result needs 5 (default: %(default)s)")
    parser.add_argument("--deepspeed-python", type=Path, help="an interpreter with DeepSpeed (default: without it)")
    parser.add_argument("--only", default="", metavar="TEXT", help="of fio's workloads, those with this in their name")
    parser.add_argument("--rust-bench", type=Path, help="the built bench of memascend-nvme (default: cargo builds it)")
    parser.add_argument(
        "--devices-in", type=Path, default=Path("/dev/shm"), help="where loop devices' files go (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write results and machine here, as JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a ratio misses its bar or cannot be measured")
    args = parser.parse_args()
    if args.size < 256 * MIB or args.seconds <= 0 or args.alternations < 1:
        parser.error("--size is at least 256MiB, --seconds more than 0, --alternations at least 1")
    return args


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        job = json.loads(sys.stdin.read())
        print("\n" + json.dumps(CHILDREN[sys.argv[2]](job)))
        return 0
    # Killed politely, it still detaches devices and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    args = arguments()
    chosen = list(PARTS) if args.part == "all" else [args.part]
    results: dict = {}
    missing: dict[str, str] = {}
    misses: list[str] = []
    with contextlib.ExitStack() as stack:
        if args.dir:
            args.dir.mkdir(parents=True, exist_ok=True)
        home = args.dir or ROOT.parent
        workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="io-", dir=home))).resolve()
        about = machine(workdir)
        about["versions"] |= versions("numpy")
        print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
        for name in chosen:
            title, measure, report = PARTS[name]
            load = os.getloadavg()[0]
            try:
                results[name] = {"load_before": load, **measure(args, workdir)}
            except Missing as error:
                missing[name] = str(error)
                print(f"\n{title}: not measured: {error}")
                continue
            found = results[name]
            misses += found.get("misses", []) + [
                miss for row in found.get("rows", []) for miss in row.get("misses", [])
            ]
            print(f"\n{title} (load {load:.2f} before)\n\n{report(found)}", flush=True)
    if args.alternations < ALTERNATIONS_MIN:
        misses.append(f"{args.alternations} alternations are a trial: a result needs {ALTERNATIONS_MIN}")
    if args.only:
        misses.append(f"of fio's workloads only those with {args.only!r} in their name")
    if "peers" in results and not args.deepspeed_python:
        missing["deepspeed"] = "no --deepspeed-python"
    print("\nmisses: " + ("; ".join(misses) or "none"))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, **results, "not_measured": missing, "misses": misses}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if args.check and (misses or missing) else 0


if __name__ == "__main__":
    run(main)
