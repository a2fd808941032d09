"""Rates of the machine: `python -m device.probe --out probe.json`, with `benches` on PYTHONPATH.

Sections are measured one after another and kept after each row, the ones that floors need first. A section that fails
is told and does not end the rest; none begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from . import copies, rates
from .timing import MIB

#: Bytes, matrices and repeats of a real run, and of a rehearsal.
SIZES: dict[str, dict[str, Any]] = {
    "full": {"bytes": 1024 * MIB, "piece_bytes": 256 * MIB, "drive_bytes": 1024 * MIB, "drive_s": 0.5, "copy_s": 0.2}
    | {"matrix": 8192, "parameters": 32 * MIB, "repeats": 5, "wake_ups": 200},
    "toy": {"bytes": 16 * MIB, "piece_bytes": 16 * MIB, "drive_bytes": 32 * MIB, "drive_s": 0.05, "copy_s": 0.0}
    | {"matrix": 256, "parameters": MIB, "repeats": 2, "wake_ups": 20},
}


def sections(store: Path, size: dict[str, Any]) -> dict[str, Callable[[], Iterable[dict]]]:
    """Return the probe's parts by name, in their order."""
    nbytes, repeats = size["bytes"], size["repeats"]
    places = {"store": store, "shm": Path("/dev/shm")}
    return {
        "copies": lambda: copies.by_memory(nbytes, size["copy_s"]),
        "device_memory": lambda: rates.device_memory(nbytes, repeats),
        "products": lambda: rates.products(size["matrix"], repeats),
        "updates": lambda: rates.updates(size["parameters"], repeats),
        "host_copies": lambda: rates.host_copies(nbytes, repeats),
        "drives": lambda: rates.drives(places, size["drive_bytes"], size["drive_s"]),
        "wake_ups": lambda: copies.wake_ups(size["wake_ups"]),
        "pieces": lambda: copies.in_pieces(size["piece_bytes"]),
        "drive_into": lambda: rates.drive_into(store, size["drive_bytes"]),
    }


def probe(parts: dict[str, Callable[[], Iterable[dict]]], seconds: float, keep: Callable[[dict], None]) -> dict:
    """Run each part within `seconds` in all; the rows by part, with `failed` and `seconds` by part beside them."""
    found: dict[str, Any] = {"failed": {}, "seconds": {}}
    began = time.monotonic()
    for name, part in parts.items():
        start = time.monotonic()
        if start - began > seconds:
            found["failed"][name] = f"not begun: {seconds:.0f} s had passed"
            continue
        rows = found[name] = []
        try:
            for row in part():
                rows.append(row)
                keep(found)
                print(f"[{time.monotonic() - began:5.1f} s] {name}: {shown(row)}", flush=True)
        except Exception as error:  # a part that fails must not cost the others
            found["failed"][name] = f"{type(error).__name__}: {error}"[:300]
        found["seconds"][name] = round(time.monotonic() - start, 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        keep(found)
    return found


def shown(row: dict) -> str:
    """Return a row as a line: rates in GB/s or TFLOP/s."""
    parts = []
    for key, value in row.items():
        if isinstance(value, float) and key.endswith("flops_per_s"):
            parts.append(f"{key.removesuffix('_flops_per_s')} {value / 1e12:.1f} TFLOP/s")
        elif isinstance(value, float) and "bytes_per_s" in key:
            parts.append(f"{key.replace('_bytes_per_s', '')} {value / 1e9:.2f} GB/s")
        elif isinstance(value, float):
            parts.append(f"{key} {value:.3g}")
        elif not isinstance(value, dict):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path(), help="a directory on the drive to measure")
    parser.add_argument("--out", type=Path, required=True, help="the results, complete after each row")
    parser.add_argument("--size", choices=SIZES, default="full", help="of what is measured (default: full)")
    parser.add_argument("--seconds", type=float, default=60, help="begin no part after so many (default: 60)")
    parser.add_argument("--only", default="", metavar="A,B", help="some parts")
    args = parser.parse_args()
    parts = sections(args.store, SIZES[args.size])
    chosen = args.only.split(",") if args.only else list(parts)
    if not set(chosen) <= parts.keys():
        parser.error(f"--only: the parts are {', '.join(parts)}")

    def keep(found: dict) -> None:
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(args.out)

    found = probe({name: parts[name] for name in parts if name in chosen}, args.seconds, keep)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
