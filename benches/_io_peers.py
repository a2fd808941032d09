"""The store beside DeepSpeed's aio_handle and files of torch.save: the part `peers` of io.py."""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from _common import markdown, rss
from _io_common import GIB, MIB, PAGE, alternate, check_stamp, child, cpu_time, median, scramble, stamp

CENSUS = Path(__file__).resolve().parent / "configs/qwen2.5-7b.json"
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
