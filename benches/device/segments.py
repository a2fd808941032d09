"""Peaks beside the plan with PyTorch's expandable segments and without, under one budget of device memory.

    python -m device.segments --store DIR --models DIR --out segments.json       # with `benches` on PYTHONPATH

Expandable segments grow in place, so free memory of one size serves another. Their saving, beside a plan that counts
whole segments, is the difference in `device_reserved_bytes` of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "gpu.py"
#: PyTorch 2.9 renamed the variable, and reads the old name too.
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
SETTINGS = {"off": "expandable_segments:False", "on": "expandable_segments:True"}
SHOWN = ("device_planned_bytes", "device_reserved_bytes", "device_allocated_bytes", "device_driver_bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--device-memory", default="3GiB")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    model, tokens, budget = ("tiny", "256", "256MiB") if args.toy else ("0.4B", "16384", args.device_memory)
    found: dict = {"model": model, "tokens": int(tokens), "device_memory": budget, "rows": []}
    for number, (name, setting) in enumerate(SETTINGS.items()):
        left = args.seconds - (time.monotonic() - began)
        part = args.out.with_suffix(f".{name}")
        words = ["--only", "plan", "--models", model, "--tokens", tokens, "--device-memory", budget]
        words += ["--sequence", "128" if args.toy else "4096", "--policies", "host", "--host-memory", "4GiB"]
        words += ["--minutes", f"{left / (len(SETTINGS) - number) / 60:.2f}", "--out", str(part)]
        words += ["--store", str(args.store), "--workdir", str(args.models), *(["--toy"] if args.toy else [])]
        part.unlink(missing_ok=True)
        subprocess.run([sys.executable, str(BENCH), *words], env={**os.environ, VARIABLE: setting})
        rows = json.loads(part.read_text())["rows"]["plan"] if part.is_file() else []
        part.unlink(missing_ok=True)
        found["rows"] += [row | {"expandable_segments": name} for row in rows]
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        print(row["expandable_segments"], {key: row.get(key) for key in SHOWN}, row.get("failed", ""))
    measured = sum("failed" not in row for row in found["rows"])
    # A simulated device has no virtual addresses to map.
    return 0 if measured == len(SETTINGS) or (args.toy and measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
