"""The hardware's counters of the overflow kernels, read by Nsight Compute: `python -m device.counters --into FILE`.

`ncu` replays each launch and leaves the clocks as they are. Its output is added to the file under `counters`.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "overflow.py"
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent_of_peak",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "gpu__time_duration.sum": "time",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent_of_peak",
}


def parsed(printed: str) -> list[dict]:
    """Return a row for each launch in the output of `ncu --csv`: kernel, and each metric with its unit."""
    lines = printed.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    launches: dict[str, dict] = {}
    for row in csv.DictReader(lines[start:]):
        name = METRICS.get(row.get("Metric Name", ""))
        if name is not None:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            launch[name] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(launches.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name", "regex:overflow", "--launch-count", "6"]
    command += ["--metrics", ",".join(METRICS), sys.executable, str(BENCH)]
    command += ["--gpu-gib", "1", "--elements", "1", "--threads", "1", "--repeats", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    rows = parsed(done.stdout)
    found = json.loads(args.into.read_text()) if args.into.is_file() else {}
    args.into.write_text(json.dumps(found | {"counters": rows}, indent=1) + "\n")
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
