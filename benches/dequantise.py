#!/usr/bin/env python
"""Dequantisation's rate beside a plain copy's and the drive's, form by form.

    python benches/dequantise.py                                  # matrices of 4096 x 14336
    python benches/dequantise.py --forms nf4 awq --repeats 5 --json out.json
    python benches/dequantise.py --dir /nvme --check --json benches/results/dequantise.json
    MEMASCEND_ISA=avx2 python benches/dequantise.py

Each form's matrix lies in a file of random numbers, and is fetched like a layer that stays as it is published: threads
read the packed bytes, and dequantise them to bf16 into the layer's buffer. "cached" reads through the page cache, which
holds the file: this is the rate of the kernels and their copies. "direct" reads from the drive. A round also times the
elements in bf16 without a form, a copy of them in memory (`torch.Tensor.copy_`, all threads) and plain O_DIRECT reads.
Rates count the bytes made (out) and read (in). Times are medians over rounds; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import GB, finish, fio, instruction_sets, machine, markdown, run

from memascend._memascend import FILE_WINDOWS, ExternalFile, Packing, Runtime
from memascend.formats.quantised.tensors import E2M1
from memascend.layout.bits import BLOCK
from memascend.layout.quantising import NF4, dynamic_code
from memascend.memory_plan.arena import Arena

MI, PAGE = 2**20, 4096
#: The kernels' rate of packed bytes against the drive's: with less a layer waits for them.
DRIVE_MIN = 1.0
#: Bytes of a plain read of the drive.
READ_BYTES = 8 * MI
PLAIN, COPY, DRIVE = "bf16", "copy", "drive"

#: Where a part of a matrix lies.
Place = tuple[ExternalFile, int]


@dataclass(frozen=True)
class Form:
    """A matrix in a form: its parts, the numbers first, and how they are read, given the places of the parts."""

    parts: Mapping[str, torch.Tensor]
    packing: Callable[[Mapping[str, Place]], Packing | None]


def forms(rows: int, width: int) -> dict[str, Form]:
    """Return a matrix in each form that is read in place. Its numbers are random, its scales ordinary."""
    generator = torch.Generator().manual_seed(0)
    count = rows * width

    def numbers(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)

    def scales(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(number, generator=generator) * 0.01 + 0.001).to(dtype)

    blocks, groups, of_rows = -(-rows // 128) * -(-width // 128), count // 128, (1, 128)
    zeros = {bits: numbers(groups * bits // 8) for bits in (4, 8)}
    nested = {"scales": numbers(count // 64), "factors": scales(-(-count // 64 // 256))}
    code = dynamic_code().tolist()
    added = {4: 0x1111_1111, 8: 0x0101_0101}
    index = (torch.randperm(rows, generator=generator) // 128).int()

    def gptq(bits: int, ordered: bool) -> Form:
        parts = {"numbers": numbers(count * bits // 8), "zeros": zeros[bits], "scales": scales(groups, torch.float16)}
        return Form(
            parts if ordered else parts | {"index": index},
            lambda at: Packing.words(rows, width, 128, at["zeros"], at["scales"], added[bits], bits, at.get("index")),
        )

    return {
        PLAIN: Form({"numbers": numbers(2 * count)}, lambda at: None),
        "fp8 blocks": Form(
            {"numbers": numbers(count), "scales": scales(blocks)},
            lambda at: Packing.rows("e4m3", width, (128, 128), at["scales"]),
        ),
        "int8 rows": Form(
            {"numbers": numbers(count), "scales": scales(rows)},
            lambda at: Packing.rows("int8", width, (1, width), at["scales"], step=1 / 127),
        ),
        "nf4": Form(
            {"numbers": numbers(count // 2), **nested},
            lambda at: Packing.four_bits(64, NF4, at["scales"], (256, at["factors"], code, 0.01)),
        ),
        "base-bits 8": Form(
            {"numbers": numbers(count), "scales": scales(-(-count // BLOCK[8]))},
            lambda at: Packing.bytes(BLOCK[8], code, at["scales"]),
        ),
        "mxfp4": Form(
            {"numbers": numbers(count // 2), "scales": numbers(count // 32) % 20 + 110},
            lambda at: Packing.mxfp4(rows, width, at["scales"]),
        ),
        "nvfp4": Form(
            {"numbers": numbers(count // 2), "scales": scales(count // 16, torch.float8_e4m3fn).view(torch.uint8)},
            lambda at: Packing.four_bits(16, E2M1, at["scales"], format="e4m3", divisor=3.0, low_first=True),
        ),
        "packed int4": Form(
            {"numbers": numbers(count // 2), "scales": scales(groups, torch.bfloat16)},
            lambda at: Packing.rows("packed 4", width, of_rows, at["scales"], "bfloat16"),
        ),
        "packed int4, zeros": Form(
            {"numbers": numbers(count // 2), "scales": scales(groups, torch.bfloat16), "zeros": zeros[4]},
            lambda at: Packing.rows("packed 4", width, of_rows, at["scales"], "bfloat16", zeros=at["zeros"]),
        ),
        "awq": Form(
            {"numbers": numbers(count // 2), "zeros": zeros[4], "scales": scales(groups, torch.float16)},
            lambda at: Packing.words(rows, width, 128, at["zeros"], at["scales"], None),
        ),
        "gptq": gptq(4, ordered=True),
        "gptq 8 bits": gptq(8, ordered=True),
        "gptq, any order": gptq(4, ordered=False),
    }


class Matrix:
    """A matrix in a file, opened to be read as a unit of a runtime."""

    def __init__(self, runtime: Runtime, path: Path, form: Form, nbytes: int, direct: bool) -> None:
        stat = path.stat()
        file = ExternalFile(path, stat.st_size, stat.st_mtime_ns, direct)
        places, position = {}, 0
        for name, values in form.parts.items():
            places[name] = file, position
            position += round_up(values.nbytes)
        self.unit = runtime.units.add_unit()
        runtime.units.read_from_files(self.unit, [(*places["numbers"], 0, nbytes, form.packing(places))])
        self.direct, self._runtime, self._nbytes = file.direct, runtime, nbytes

    def fetch(self) -> None:
        lease = self._runtime.memory.lease_unit(self._nbytes)
        assert lease is not None
        self._runtime.units.fetch(self.unit, [], lease, []).wait()


def round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def write(path: Path, form: Form) -> int:
    """Write a matrix, each part from a page on; returns its bytes without the gaps."""
    with path.open("wb") as file:
        for values in form.parts.values():
            raw = values.view(torch.uint8).numpy().tobytes()
            file.write(raw.ljust(round_up(len(raw)), b"\0"))
        file.flush()
        os.fsync(file.fileno())
    return sum(values.nbytes for values in form.parts.values())


def cached(path: Path) -> None:
    """Have the page cache hold a file."""
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass


def drive_reads(path: Path) -> Callable[[], None] | None:
    """Return a function that reads all of a file past the page cache, as many at a time as a fetch does."""
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except OSError:
        return None
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(FILE_WINDOWS)]

    def read(number: int) -> None:
        fd = os.open(path, flags)
        try:
            for position in range(number * READ_BYTES, os.fstat(fd).st_size, FILE_WINDOWS * READ_BYTES):
                os.preadv(fd, [buffers[number]], position)
        finally:
            os.close(fd)

    def read_all() -> None:
        with ThreadPoolExecutor(FILE_WINDOWS) as threads:
            list(threads.map(read, range(FILE_WINDOWS)))

    return read_all


def measure(chosen: list[str], rows: int, width: int, repeats: int, directory: Path) -> list[dict]:
    """Return a row for each form, with its rates beside the copy's and the drive's."""
    nbytes = 2 * rows * width
    arena = Arena([("matrices", nbytes, 1)], [], 64 * 1024, 16, 64 * 1024, 64 * 1024, 1)
    runtime = Runtime([directory / "store"], arena, allocator="pageable")
    made = forms(rows, width)
    source, target = torch.ones(nbytes // 2, dtype=torch.bfloat16), torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    stored: dict[str, int] = {}
    files: dict[str, Path] = {}
    try:
        for name in dict.fromkeys([PLAIN, *chosen]):
            files[name] = directory / f"{len(files)}.bin"
            stored[name] = write(files[name], made[name])
            cached(files[name])
            calls[f"{name} cached"] = Matrix(runtime, files[name], made[name], nbytes, direct=False).fetch
            through = Matrix(runtime, files[name], made[name], nbytes, direct=True)
            if through.direct:
                calls[f"{name} direct"] = through.fetch
        made.clear()
        reads = drive_reads(files[PLAIN])
        if reads is not None:
            calls[DRIVE] = reads
        seconds = by_turns(calls, repeats)
    finally:
        runtime.close(False)
        for file in files.values():
            file.unlink(missing_ok=True)
    drive_bytes = round_up(stored[PLAIN])
    return [result(name, nbytes, stored[name], drive_bytes, seconds) for name in stored]


def by_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each in every round, after one that warms up. Every round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(repeats + 1):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            began = time.perf_counter()
            calls[name]()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def result(name: str, nbytes: int, stored: int, drive_bytes: int, seconds: Mapping[str, list[float]]) -> dict:
    """Return the figures of a form."""
    row: dict = {"form": name, "bytes": nbytes, "stored_bytes": stored, "bytes_a_weight": stored / (nbytes // 2)}
    for how in ("cached", "direct"):
        spent = seconds.get(f"{name} {how}")
        if spent is None:
            continue
        row[f"{how}_s"] = statistics.median(spent)
        row[f"{how}_out_gb_s"] = nbytes / row[f"{how}_s"] / GB
        row[f"{how}_in_gb_s"] = stored / row[f"{how}_s"] / GB
        # Seconds of the same bytes: a copy of those that are made, a read of those that are stored.
        row[f"{how}_of_copy"] = statistics.median(b / a for a, b in zip(spent, seconds[COPY], strict=True))
        if DRIVE in seconds:
            share = stored / drive_bytes
            row[f"{how}_of_drive"] = statistics.median(
                share * b / a for a, b in zip(spent, seconds[DRIVE], strict=True)
            )
    row["copy_gb_s"] = nbytes / statistics.median(seconds[COPY]) / GB
    if DRIVE in seconds:
        row["drive_gb_s"] = drive_bytes / statistics.median(seconds[DRIVE]) / GB
    return row


def report(rows: list[dict]) -> str:
    figures = ("cached_out_gb_s", "cached_in_gb_s", "cached_of_copy", "cached_of_drive", "direct_out_gb_s")
    table = [
        [row["form"], f"{row['bytes_a_weight']:.3f}"]
        + [f"{row[figure]:.2f}" if figure in row else "" for figure in (*figures, "direct_of_drive")]
        for row in rows
    ]
    header = ["form", "bytes a weight", "cached: GB/s out", "in", "of a copy", "of the drive", "direct: GB/s out"]
    text = markdown([*header, "of the drive"], table)
    drive = f", the drive {rows[0]['drive_gb_s']:.2f} GB/s" if "drive_gb_s" in rows[0] else ""
    return f"{text}\n\nA copy makes {rows[0]['copy_gb_s']:.2f} GB/s{drive}."


def faults(rows: list[dict]) -> list[str]:
    """Return the results that miss the limit."""
    found = []
    for row in rows:
        if row["form"] == PLAIN:
            continue
        if "cached_of_drive" not in row:
            found.append(f"{row['form']}: the drive was not measured, where O_DIRECT is refused: choose another --dir")
        elif row["cached_of_drive"] < DRIVE_MIN:
            found.append(f"{row['form']}: {row['cached_of_drive']:.2f} of the drive's rate, not {DRIVE_MIN}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(forms(128, 128))
    parser.add_argument("--forms", nargs="+", default=names, choices=names, metavar="FORM", help=", ".join(names))
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="in multiples of 128 (default: 4096)")
    parser.add_argument("--width", type=int, default=14336, metavar="N", help="in multiples of 128 (default: 14336)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="rounds (default: 9)")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory of the drive (default: this one)")
    parser.add_argument("--fio", action="store_true", help="measure the drive with fio too")
    parser.add_argument("--json", type=Path, help="write the results here")
    limit = f"kernels at {DRIVE_MIN} of the drive's rate at least"
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the limit is missed: {limit}")
    args = parser.parse_args()
    if args.rows % 128 or args.width % 128 or min(args.rows, args.width, args.repeats) < 1:
        parser.error("--rows and --width are multiples of 128, --repeats at least 1")
    about = machine(args.dir)
    about["instruction_sets"] = instruction_sets()
    about["threads"] = {"copy": torch.get_num_threads(), "fetch": FILE_WINDOWS}
    about["load_before"] = os.getloadavg()[0]
    print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="dequantise-", dir=args.dir) as directory:
        rows = measure(args.forms, args.rows, args.width, args.repeats, Path(directory))
        disk = fio(Path(directory)) if args.fio else None
    print("\n" + report(rows))
    missed = faults(rows)
    results = {"machine": about, "repeats": args.repeats, "rows": rows, "fio": disk, "missed": missed}
    return finish(results, args.json, missed if args.check else [])


if __name__ == "__main__":
    run(main)
