"""The figures in the records of a run: the machine, the plan, and each step."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memascend
from memascend.forecast.report import memory_part
from memascend.report.counters import RANK_FIGURES, SSD_COUNTERS, VOLUME_COUNTERS
from memascend.session.api import find_offload, offload_of

if TYPE_CHECKING:
    from torch import nn

_DECIMALS = 6  # of seconds


def _status_bytes(field: str) -> int:
    """Return a kB field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_rss_bytes() -> int:
    """Return the most this process has held resident since it began, or since reset_peak_rss."""
    return _status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Reset the peak to the memory resident now; return False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def machine() -> dict[str, Any]:
    """Return the machine and the versions of libraries."""
    import torch
    import transformers

    return {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memascend": memascend.__version__,
    }


def stats_of(model: nn.Module | None) -> dict[str, Any]:
    """Return the counters of an offloaded model; none for None, which is a model in memory."""
    return {} if model is None else memascend.stats(model)


def opening(model: nn.Module | None) -> dict[str, Any]:
    """Return the first record of a run: the time, the machine, the memory plans and the store's counters.

    `model` is None for a model in memory.
    """
    session = None if model is None else offload_of(model)
    plans = {} if session is None else {"host": session.plan, "device": session.device_plan}
    return {
        "time": time.time(),
        "machine": machine(),
        "plan": {name: memory_part(plan) for name, plan in plans.items() if plan is not None},
        "store": stats_of(model),
    }


class Meter:
    """Turns the cumulative counters of a model into the figures of one step."""

    def __init__(self, model: nn.Module | None) -> None:
        """Count from now on; `model` is None for a model in memory, which has no counters."""
        self._model = model
        self._waited()
        self._before = stats_of(model)
        self._began = time.monotonic()

    def lap(self, tokens: int) -> dict[str, Any]:
        """Return the figures of the step that ends now, of `tokens` tokens.

        - `seconds` since the last lap; `tokens`, `tokens_per_s`.
        - `waited_seconds`: by kind of wait (see `memascend.stats`); None for a model in memory.
        - `ssd_bytes_read`, `ssd_bytes_written`; `volumes`: for each volume its `VOLUME_COUNTERS`.
        - `network_bytes_sent`, where the model is divided over ranks.
        - `host_bytes_in_use`, `host_bytes_peak`, `host_bytes_budget` of the arena, None for a model in memory;
          `peak_rss_bytes` of the process.
        """
        now, after, before = time.monotonic(), stats_of(self._model), self._before
        seconds, self._began, self._before = now - self._began, now, after
        volumes = zip(before.get("volumes", ()), after.get("volumes", ()), strict=True)
        return {
            "tokens": tokens,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "seconds": seconds,
            **{name: after[name] - before[name] if name in after else 0 for name in SSD_COUNTERS},
            **{name: after[name] - before[name] for name in ("network_bytes_sent",) if name in after},
            **{name: after.get(name) for name in ("host_bytes_in_use", "host_bytes_peak", "host_bytes_budget")},
            "volumes": [[_rounded(new[name] - old[name]) for name in VOLUME_COUNTERS] for old, new in volumes],
            "waited_seconds": self._waited(),
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _waited(self) -> dict[str, float] | None:
        """Return the seconds by kind since the last call."""
        if self._model is None:
            return None
        return {kind: _rounded(spent) for kind, spent in offload_of(self._model).timeline.lap().items()}


def figures_of_ranks(model: nn.Module, figures: dict[str, Any]) -> list[list[Any]]:
    """Return the `RANK_FIGURES` of every rank, given this one's `figures`; [] for a model of one process.

    All ranks call this together.
    """
    session = find_offload(model)
    if session is None or not session.membership.divides:
        return []
    mine = json.dumps([figures[name] for name in RANK_FIGURES])
    return [json.loads(text) for text in session.membership.all_gather_object("log a step", mine)]


def _rounded(value: float) -> float:
    return round(value, _DECIMALS) if isinstance(value, float) else value
