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
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from _common import machine, run, versions
from _io_common import GIB, MIB, Missing
from _io_fio import beside_fio, report_fio
from _io_peers import beside_peers, child_peer, report_peers
from _io_volumes import child_volumes, report_volumes, two_volumes

ROOT = Path(__file__).resolve().parent.parent
ALTERNATIONS_MIN = 5
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
