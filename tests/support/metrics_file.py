"""Metrics files as `memascend finetune` writes them, of any length and without a run."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOLUMES = ("/nvme0/run", "/nvme1/run")
MIB = 1 << 20


def opening(record: str = "start", **changed: Any) -> dict[str, Any]:
    """Return the first record of a run on two drives."""
    return {
        "record": record,
        "time": 1.7e9,
        "settings": {"model_dir": "path/to/llama", "host_memory": 64 * MIB, "lr": 1e-3, "seq_len": 32},
        "machine": {"platform": "Linux", "processors": 2, "memory_bytes": 24 << 30, "memascend": "0.1.0"},
        "parameters": 6_000_000,
        "tokens": 100_000,
        "blocks": 3125,
        "steps": 100,
        "forecast": {
            "ssd_bytes_read": 110 * MIB,
            "ssd_bytes_written": 80 * MIB,
            "host_memory": {"total_bytes": 500 * MIB},
            "endurance": {
                "step": {"weights_bytes": 20 * 10**6, "exp_avg_bytes": 60 * 10**6, "total_bytes": 80 * 10**6},
                "savings": [{"change": "--states 8bit", "step_bytes": 50 * 10**6, "saved": 0.375}],
            },
        },
        "plan": {
            "host": {
                "total_bytes": 60 * MIB,
                "lines": [
                    {
                        "consumer": "weights of layer",
                        "count": 3,
                        "nbytes": MIB - 1,
                        "total_bytes": 3 * MIB,
                        "note": "x",
                    },
                    {"consumer": "staging", "count": 16, "nbytes": MIB // 4, "total_bytes": 4 * MIB, "note": ""},
                ],
            }
        },
        "store": {
            "engine": "ring",
            "notices": ["buffered I/O is used"],
            "volumes": [{"path": path} for path in VOLUMES],
        },
    } | changed


def step(number: int, **changed: Any) -> dict[str, Any]:
    """Return the record of one step; its figures follow from its number."""
    return {
        "record": "step",
        "step": number,
        "loss": 5.0 / (1 + number / 50) + 0.1 * math.sin(number),
        "grad_norm": 1.0 + number % 7,
        "lr": 1e-3 / number,
        "skipped": False,
        "tokens": 512,
        "tokens_per_s": 256.0 + number,
        "seconds": 2.0,
        "ssd_bytes_read": 100 * MIB,
        "ssd_bytes_written": 80 * MIB,
        "host_bytes_in_use": 30 * MIB,
        "host_bytes_peak": 40 * MIB,
        "host_bytes_budget": 64 * MIB,
        "volumes": [[60 * MIB, 50 * MIB, 0.5], [40 * MIB, 30 * MIB, 0.25]],
        "waited_seconds": {
            "ssd_read": 0.5,
            "ssd_write": 0.25,
            "h2d": 0.0,
            "d2h": 0.0,
            "cpu_update": 0.25,
            "compute": 1.0,
        },
        "peak_rss_bytes": 480 * MIB,
    } | changed


def end(**changed: Any) -> dict[str, Any]:
    """Return the last record of a run."""
    classes = [[MIB, 3, 2 * MIB], [MIB // 4, 16, MIB]]
    return {"record": "end", "time": 1.7e9 + 600, "steps": 60, "store": {"host_classes_at_peak": classes}} | changed


def write(path: Path, *records: dict[str, Any] | str) -> Path:
    """Write records (or lines) as a metrics file."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def usual(path: Path, steps: int = 60) -> Path:
    """Write a run of some steps that has ended, with evaluations."""
    evaluations = ({"record": "eval", "step": number, "loss": 4.0} for number in range(20, steps + 1, 20))
    return write(path, opening(), *map(step, range(1, steps + 1)), *evaluations, end())
