"""The engines beside fio, on one file: the part `fio` of io.py."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _common import markdown
from _io_common import GIB, MIB, PAGE, Missing, alternate, cpu_time, median, ratio, scramble

ROOT = Path(__file__).resolve().parent.parent
BANDWIDTH_MIN, IOPS_MIN, CPU_MAX = 0.98, 0.95, 1.0


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
