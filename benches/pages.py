#!/usr/bin/env python
"""Effect of a buffer's pages on a drive: GB/s from and to huge pages, pages as they come, and scattered pages.

    python benches/pages.py --workdir DIR --json benches/results/pages.json

A driver gets a request as runs of memory. Of a buffer in pages of 4 KiB, physical neighbours make longer runs, which
grow rarer the longer a machine works. "As they come" are the pages that the system has now; "scattered" are pages that
were touched in random order, as on a machine whose free memory lies in pieces. All move the same file by turns, in
requests of 1 MiB of one engine, `--depth` in flight; halves of them are read and written in the mix.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from pathlib import Path

import torch
from _common import GB, finish, in_workdir, machine, markdown, size

import memascend
from memascend._memascend import FileEngine, FileTransfers

MIB, PAGE = 2**20, 4096
MIXES = ("read", "write", "mix")


def scattered(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    pages = list(range(0, nbytes, PAGE))
    random.Random(0).shuffle(pages)
    for page in pages:
        memory[page] = 1
    return torch.frombuffer(memory, dtype=torch.uint8)


def pinned(nbytes: int, huge_pages: bool) -> torch.Tensor:
    return memascend.empty_pinned(nbytes, torch.uint8, allocator="locked", huge_pages=huge_pages)


def rate(engine: FileEngine, file: Path, buffer: torch.Tensor, mix: str, nbytes: int) -> float:
    """Return the bytes per second: each MiB of the buffer moves a MiB of the file, and then the next that is due."""
    pieces = [(FileTransfers(engine), buffer[start : start + MIB]) for start in range(0, buffer.numel(), MIB)]
    half = nbytes // 2
    began = time.perf_counter()
    for number in range(nbytes // MIB):
        transfers, piece = pieces[number % len(pieces)]
        transfers.wait()
        operation = ("read", "write")[number % 2] if mix == "mix" else mix
        # Writes of the mix go to the other half of the file.
        offset = number * MIB if mix != "mix" else (operation == "write") * half + number // 2 * MIB
        transfers.start(operation, file, offset, piece.data_ptr(), MIB, piece)
    for transfers, _ in pieces:
        transfers.wait()
    return nbytes / (time.perf_counter() - began)


def compare(workdir: Path, args: argparse.Namespace) -> int:
    file, nbytes = workdir / "pages.tmp", args.size // (2 * MIB) * 2 * MIB
    engine = FileEngine()
    buffers = {
        "huge pages": pinned(args.depth * MIB, True),
        "as they come": pinned(args.depth * MIB, False),
        "scattered": scattered(args.depth * MIB),
    }
    for buffer in buffers.values():
        buffer.random_(0, 256)
    try:
        rate(engine, file, buffers["huge pages"], "write", nbytes)  # lays the file out
        found: dict[tuple[str, str], list[float]] = {(name, mix): [] for name in buffers for mix in MIXES}
        for _ in range(args.rounds):
            for name, mix in found:
                found[name, mix].append(rate(engine, file, buffers[name], mix, nbytes))
    finally:
        file.unlink(missing_ok=True)
    middle = {key: statistics.median(rates) for key, rates in found.items()}
    rows = []
    for name in buffers:
        row = [name]
        for mix in MIXES:
            row += [f"{middle[name, mix] / GB:.2f}", f"{middle[name, mix] / middle['scattered', mix]:.2f}"]
        rows.append(row)
    header = ["buffers in", *(word for mix in MIXES for word in (f"{mix}, GB/s", "of scattered"))]
    print(markdown(header, rows))
    results = {
        "machine": machine(workdir),
        "engine": engine.name,
        "depth": args.depth,
        "rounds": args.rounds,
        "bytes_per_second": {name: {mix: found[name, mix] for mix in MIXES} for name in buffers},
    }
    return finish(results, args.json, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=size, default="2GiB", help="of the file (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=16, help="requests of 1 MiB in flight (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workdir", type=Path, help="on the drive to measure (default: made here)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return in_workdir(args.workdir, lambda workdir: compare(workdir, args))


if __name__ == "__main__":
    raise SystemExit(main())
