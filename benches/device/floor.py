"""The least time of a step on a machine, from the step's traffic and the machine's rates.

Each part of the machine works at the rate that the probe measured in the same call, and all of them work at once: the
floor is the time of the part with the most to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Of a hundred bytes of the probe's mixed workload, those that are read (`memascend bench`).
MIX_READ_SHARE = 0.55
#: Page-locked host memory: of PyTorch, of memascend, and of a program that registers its own.
PINNED = ("torch", "cuda", "registered", "registered-4k")
#: The kind of wait (`memascend.stats(model)["seconds"]`) while a part of the machine works.
WAITS = {"ssd": ("ssd_read", "ssd_write"), "h2d": ("h2d",), "d2h": ("d2h",), "update": ("cpu_update",)}


@dataclass(frozen=True)
class Rates:
    """Rates of a machine's parts, in bytes and floating-point operations per second; None where not measured."""

    ssd_read: float | None = None
    ssd_write: float | None = None
    ssd_mix: float | None = None
    h2d: float | None = None
    d2h: float | None = None
    #: The update's bytes of host memory, with as many threads as are fastest.
    update: float | None = None
    #: Bytes read and written by a copy in host memory, with as many threads as are fastest.
    dram: float | None = None
    #: Products of bf16 matrices.
    product: float | None = None


@dataclass(frozen=True)
class Moved:
    """The load of a step: bytes moved, and floating-point operations."""

    ssd_read: float = 0
    ssd_written: float = 0
    h2d: float = 0
    d2h: float = 0
    #: Read and written by the update on the CPU: 26 bytes a parameter with fp32 states and bf16 weights.
    update: float = 0
    flops: float = 0


def rates_of(probe: Mapping[str, Any], store: str = "store") -> Rates:
    """Return the rates that `python -m device.probe` measured; `store` names the place of the drive."""
    copies = [row for row in probe.get("copies", []) if row.get("kind") in PINNED]
    drives = [row["workloads"] for row in probe.get("drives", []) if row.get("place") == store and "workloads" in row]
    update, dram = probe.get("updates", []), probe.get("host_copies", [])
    products = [row for row in probe.get("products", []) if row.get("dtype") == "bfloat16"]
    drive = drives[0] if drives else {}
    return Rates(
        ssd_read=drive.get("read"),
        ssd_write=drive.get("write"),
        ssd_mix=drive.get("mix"),
        h2d=_fastest(copies, "h2d_bytes_per_s"),
        d2h=_fastest(copies, "d2h_bytes_per_s"),
        update=_fastest(update, "bytes_per_s"),
        dram=_fastest(dram, "bytes_per_s"),
        product=_fastest(products, "flops_per_s"),
    )


def _fastest(rows: list[Mapping[str, Any]], key: str) -> float | None:
    return max((row[key] for row in rows if row.get(key)), default=None)


def drive_seconds(read: float, written: float, rates: Rates) -> float | None:
    """Return the least seconds in which a drive reads and writes so many bytes.

    As many of them as have the probe's mixture go at its rate, or each direction by itself if that is faster: a drive
    may do both at once. No direction takes less than it does alone.
    """
    if not (rates.ssd_read and rates.ssd_write):
        return None
    apart = read / rates.ssd_read + written / rates.ssd_write
    alone = max(read / rates.ssd_read, written / rates.ssd_write)
    if not rates.ssd_mix:
        return alone
    mixed = min(read / MIX_READ_SHARE, written / (1 - MIX_READ_SHARE))
    rest = (read - mixed * MIX_READ_SHARE) / rates.ssd_read + (written - mixed * (1 - MIX_READ_SHARE)) / rates.ssd_write
    return max(alone, min(apart, mixed / rates.ssd_mix + rest))


def floors(moved: Moved, rates: Rates) -> dict[str, float]:
    """Return the least seconds of each part of the machine; a part whose rate is not known is left out."""
    through_host = moved.ssd_read + moved.ssd_written + moved.h2d + moved.d2h + moved.update
    found = {
        "ssd": drive_seconds(moved.ssd_read, moved.ssd_written, rates),
        "h2d": _seconds(moved.h2d, rates.h2d),
        "d2h": _seconds(moved.d2h, rates.d2h),
        "update": _seconds(moved.update, rates.update),
        "dram": _seconds(through_host, rates.dram),
        "flops": _seconds(moved.flops, rates.product),
    }
    return {part: seconds for part, seconds in found.items() if seconds is not None}


def _seconds(amount: float, rate: float | None) -> float | None:
    return None if rate is None else amount / rate


def report(step_s: float, moved: Moved, rates: Rates, timeline: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a step beside its floor.

    Args:
        step_s: seconds that the step took.
        moved: its traffic and operations.
        rates: of the same machine, measured in the same call.
        timeline: seconds of the step by kind of wait, `compute` for the remainder; None if not
            counted.

    Returns:
        `floors_s`: seconds by part; `floor_s`, `bound_by`: the largest and its part; `of_floor`: step / floor; `gap_s`:
        step - floor; `not_measured`: parts without a rate; `where_s`: the timeline, the largest first; and
        `waits_beyond_s`: the waits beyond the floor of the part that the step waited for. These six are None where no
        rate is known.
    """
    by_part = floors(moved, rates)
    missing = sorted({"ssd", "h2d", "d2h", "update", "dram", "flops"} - by_part.keys())
    where = dict(sorted((timeline or {}).items(), key=lambda item: -item[1])) or None
    found: dict[str, Any] = {"floors_s": by_part, "not_measured": missing, "where_s": where}
    found |= {"moved": asdict(moved), "rates": asdict(rates)}
    if not any(by_part.values()):
        return found | dict.fromkeys(("floor_s", "bound_by", "of_floor", "gap_s", "waits_beyond_s"))
    bound_by = max(by_part, key=lambda part: by_part[part])
    floor_s = by_part[bound_by]
    found |= {"floor_s": floor_s, "bound_by": bound_by, "of_floor": step_s / floor_s, "gap_s": step_s - floor_s}
    return found | {"waits_beyond_s": waits_beyond(by_part, timeline)}


def waits_beyond(by_part: Mapping[str, float], timeline: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the seconds by which a step waited for each part longer than the part has to work, the largest first.

    Such a wait can be no lack of rate: the part stood still before it, or works below its rate. A wait below a part's
    floor was overlapped with other parts.
    """
    if timeline is None:
        return None
    waits = {part: sum(timeline.get(kind, 0.0) for kind in kinds) for part, kinds in WAITS.items()}
    waits["flops"] = timeline.get("compute", 0.0)
    beyond = {part: spent - by_part.get(part, 0.0) for part, spent in waits.items()}
    return {part: spent for part, spent in sorted(beyond.items(), key=lambda item: -item[1]) if spent > 0}


def llama_flops(
    shape: tuple[int, int, int, int, int],
    vocabulary: int,
    tokens: int,
    sequence: int,
    *,
    recomputed: bool,
    frozen: bool = False,
) -> float:
    """Return the floating-point operations of a step of a Llama that cannot be left out.

    Products of weights: 2 a weight and token forward, 4 backward, and 2 more for layers that are computed again. The
    two products of attention count by half, for the causal mask. The embedding is a lookup.

    Args:
        shape: (hidden, intermediate, layers, heads, key/value heads).
        vocabulary: words.
        tokens: of a step.
        sequence: tokens that attend to one another.
        recomputed: whether layers are computed again in the backward pass.
        frozen: whether the weights have no gradients, as below LoRA's adapters (whose own are not counted).
    """
    hidden, intermediate, layers, heads, kv_heads = shape
    weights = 2 * hidden * hidden + 2 * hidden * (hidden // heads * kv_heads) + 3 * hidden * intermediate
    # Scores and values: 2 products of sequence x sequence x hidden, each of 2 operations, half of them masked.
    layer = 2 * weights * tokens + 2 * tokens * sequence * hidden
    # Of the backward pass, half of the products of weights are their gradients'. Attention has no weights.
    spared = 2 * weights * tokens if frozen else 0
    passes = 4 if recomputed else 3
    head = 2 * vocabulary * hidden * tokens
    return float(layers * (passes * layer - spared) + (2 if frozen else 3) * head)
