#!/usr/bin/env python
"""Page-locked memory: the time to get it, its cost, and the rates of copies from and to a device.

    python benches/pinned.py                              # 1 GiB and 4.01 GiB, by every allocator that works here
    python benches/pinned.py --gib 0.5 --repeats 3 --json out.json
    python benches/pinned.py --check

Beside memascend's allocators stands torch's own pinned memory, which takes a power of two and keeps it. It needs a
CUDA device, as "cuda" and "registered" do. Without one the script measures the rest and names the missing parts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import finish, machine, markdown, rss, run

import memascend

GIB, MIB, PAGE = 2**30, 2**20, 4096
#: (name, huge pages)
BACKENDS = [
    ("pageable", False),
    ("locked", False),
    ("locked", True),
    ("registered", False),
    ("registered", True),
    ("cuda", False),
]
NEED_CUDA = ("cuda", "registered")
#: The system may round a mapping up to a huge page, or a page.
SLACK = 2 * MIB + PAGE
RATIO_LIMIT = 0.97


def mapped_bytes(address: int, length: int) -> int:
    """Return the bytes of the mappings that hold a range, by size: drivers differ in the resident part."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, end = (int(part, 16) for part in fields[0].split("-"))
        # Addresses that CUDA only reserved have no permissions.
        if start < address + length and address < end and fields[1][:2] == "rw":
            total += end - start
    return total


def resident_bytes() -> int:
    now = rss()
    return now["anon"] + now["file"] + now["shmem"]


def memory_of_torch(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def memory_of(allocator: str, huge_pages: bool = False) -> Callable[[int], torch.Tensor]:
    return lambda nbytes: memascend.empty_pinned(nbytes, torch.uint8, allocator=allocator, huge_pages=huge_pages)


def allocation(name: str, huge_pages: bool, make: Callable[[int], torch.Tensor], nbytes: int, repeats: int) -> dict:
    """Time, cost and return of one size by one allocator."""
    seconds, freeing = [], []
    for _ in range(repeats):
        before = resident_bytes()
        began = time.perf_counter()
        tensor = make(nbytes)
        seconds.append(time.perf_counter() - began)
        address = tensor.data_ptr()
        mapped, resident = mapped_bytes(address, nbytes), resident_bytes() - before
        began = time.perf_counter()
        del tensor
        freeing.append(time.perf_counter() - began)
        left = mapped_bytes(address, nbytes)
    return {
        "allocator": name,
        "huge_pages": huge_pages,
        "asked_bytes": nbytes,
        "mapped_bytes": mapped,
        "resident_bytes": resident,
        "left_bytes": left,
        "seconds": statistics.median(seconds),
        "free_seconds": statistics.median(freeing),
    }


def copies(nbytes: int, rounds: int) -> list[dict]:
    """Bandwidth of copies with our memory and with torch's, by turns, so that a drift of the machine hits both."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rows = []
    for allocator in NEED_CUDA:
        hosts = {allocator: memory_of(allocator)(nbytes), "torch": memory_of_torch(nbytes)}
        for host in hosts.values():
            host.fill_(1)
        for direction in ("to device", "from device"):
            speeds: dict[str, list[float]] = {name: [] for name in hosts}
            for number in range(rounds + 1):
                for name, host in hosts.items():
                    target, source = (device, host) if direction == "to device" else (host, device)
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda.synchronize()
                    start.record()
                    target.copy_(source, non_blocking=True)
                    end.record()
                    end.synchronize()
                    if number:  # the first round warms up
                        speeds[name].append(nbytes / (start.elapsed_time(end) / 1000))
            ours, theirs = (statistics.median(speeds[name]) for name in (allocator, "torch"))
            rows.append(
                {
                    "allocator": allocator,
                    "direction": direction,
                    "bytes": nbytes,
                    "bytes_per_s": ours,
                    "torch_bytes_per_s": theirs,
                    "ratio": ours / theirs,
                }
            )
    return rows


def measure(sizes: list[int], repeats: int) -> tuple[list[dict], dict[str, str]]:
    """Return every allocator that works here, and why the others do not. torch's comes last: it keeps freed memory."""
    rows, missing = [], {}
    for name, huge_pages in BACKENDS:
        make = memory_of(name, huge_pages)
        try:
            # One-time allocations of a library are not part of an allocation.
            make(MIB)
            rows += [allocation(name, huge_pages, make, nbytes, repeats) for nbytes in sizes]
        except memascend.HostMemoryError as error:
            missing[name] = str(error)
    if torch.cuda.is_available():
        memory_of_torch(MIB)
        # Only the first is an allocation: the next ones get the same memory again.
        rows += [allocation("torch", False, memory_of_torch, nbytes, 1) for nbytes in sizes]
    else:
        missing["torch's pinned memory"] = "there is no CUDA device"
    return rows, missing


def report(allocations: list[dict], copied: list[dict]) -> str:
    rows = [
        [
            row["allocator"] + " (huge pages)" * row["huge_pages"],
            f"{row['asked_bytes'] / GIB:.2f}",
            f"{row['mapped_bytes'] / GIB:.2f}",
            f"{row['mapped_bytes'] - row['asked_bytes']:,}",
            f"{row['resident_bytes'] / GIB:.2f}",
            f"{row['left_bytes'] / GIB:.2f}",
            f"{row['seconds']:.4f}",
            f"{row['free_seconds']:.4f}",
        ]
        for row in sorted(allocations, key=lambda row: row["asked_bytes"])
    ]
    header = ["allocator", "asked GiB", "reserved GiB", "bytes more", "resident GiB", "left GiB", "get s", "free s"]
    text = markdown(header, rows)
    if copied:
        rows = [
            [
                row["allocator"],
                row["direction"],
                f"{row['bytes_per_s'] / 1e9:.1f}",
                f"{row['torch_bytes_per_s'] / 1e9:.1f}",
                f"{row['ratio']:.3f}",
            ]
            for row in copied
        ]
        text += "\n\n" + markdown(["copies", "direction", "GB/s", "torch's GB/s", "ratio"], rows)
    return text


def faults(allocations: list[dict], copied: list[dict]) -> list[str]:
    """Return the results that miss a limit. torch's own memory is for comparison and not checked."""
    found = []
    for row in allocations:
        # The kernel may join ordinary memory with its neighbours' into one mapping.
        if row["allocator"] in ("torch", "pageable"):
            continue
        what = f"{row['allocator']}{' with huge pages' * row['huge_pages']}, {row['asked_bytes']} bytes"
        if not row["asked_bytes"] <= row["mapped_bytes"] <= row["asked_bytes"] + SLACK:
            found.append(f"{what}: {row['mapped_bytes']} bytes are reserved")
        if row["resident_bytes"] > row["asked_bytes"] + SLACK:
            found.append(f"{what}: {row['resident_bytes']} bytes are resident")
        if row["left_bytes"] > SLACK:
            found.append(f"{what}: {row['left_bytes']} bytes were not given back")
    for row in copied:
        if row["ratio"] < RATIO_LIMIT:
            found.append(f"{row['allocator']}, {row['direction']}: {row['ratio']:.3f} of torch's speed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 4.01], metavar="GIB", help="sizes to allocate")
    parser.add_argument("--copy-gib", type=float, default=1, metavar="GIB", help="size to copy (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each (default: 5)")
    parser.add_argument("--json", type=Path, help="write the results here")
    text = f"exit 1 if memory costs more than its size, stays, or is copied at less than {RATIO_LIMIT} of torch's speed"
    parser.add_argument("--check", action="store_true", help=text)
    args = parser.parse_args()

    about = machine(Path())
    about["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    allocations, missing = measure([int(gib * GIB) for gib in args.gib], args.repeats)
    copied = []
    if torch.cuda.is_available():
        copied = copies(int(args.copy_gib * GIB), args.repeats)
    else:
        missing["the bandwidth of copies"] = "there is no CUDA device"
    print("\n" + report(allocations, copied))
    if missing:
        print("\nNot measured:\n" + "\n".join(f"- {what}: {why}" for what, why in missing.items()))
    # Only the names of missing measurements: the reasons hold paths of this machine.
    results = {"machine": about, "allocations": allocations, "copies": copied, "not_measured": list(missing)}
    return finish(results, args.json, faults(allocations, copied) if args.check else [])


if __name__ == "__main__":
    run(main)
