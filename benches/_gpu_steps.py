"""Evaluation of measured steps by gpu.py: medians, floors, and details of the inspected step."""

from __future__ import annotations

import statistics

from device.floor import Moved, Rates, llama_flops, report


def off_by(measured: int | None, planned: int | None) -> float | None:
    return measured / planned - 1 if measured is not None and planned else None


def all_losses(told: dict) -> list[str]:
    """Return the losses as hexadecimal floats: equal where their bits are."""
    return [loss for step in told["steps"] for loss in step["losses"]]


def medians(records: list[dict | None]) -> dict | None:
    if not records or any(record is None or None in record.values() for record in records):
        return None
    return {key: statistics.median(record[key] for record in records) for key in records[0]}


def rates_here(found: dict) -> Rates:
    """Return the rates that gpu.py measures itself without a probe: neither the update's nor the product's."""
    ssd, copies = found["ssd"], found["copies"]
    return Rates(
        ssd_read=ssd["read"],
        ssd_write=ssd["write"],
        ssd_mix=ssd["mix"],
        h2d=copies["h2d"]["plain"],
        d2h=copies["d2h"]["plain"],
        dram=found["dram_bytes_per_s"],
    )


def moved_by(told: dict, model: tuple, tokens: int, sequence: int, **passes: bool) -> Moved:
    """Return the traffic of a measured step by the run's own counters (medians), and its operations."""
    steps = [step for step in told["steps"] if step["kind"] == "measured"]
    counters = {key: statistics.median(step["moved"][key] for step in steps) for key in steps[0]["moved"]}
    shape, words, _ = model
    return Moved(
        ssd_read=counters.get("ssd_bytes_read", 0),
        ssd_written=counters.get("ssd_bytes_written", 0),
        h2d=counters.get("h2d_bytes", 0),
        d2h=counters.get("d2h_bytes", 0),
        update=told.get("update_bytes") or 0,
        flops=llama_flops(shape, words, tokens, sequence, **passes),
    )


def step_figures(told: dict, tokens: int, parameters: int) -> dict:
    """Return the times, waits and peaks of the measured steps."""
    measured = [step for step in told["steps"] if step["kind"] == "measured"]
    seconds = statistics.median(step["seconds"] for step in measured)
    row = {
        "step_s": seconds,
        "steps_s": [step["seconds"] for step in measured],
        "phases_s": medians([step["phases"] for step in measured]),
        "timeline_s": medians([step["timeline"] for step in measured]),
        "moved": medians([step["moved"] for step in measured]),
        "update_bytes": told.get("update_bytes"),
        "tokens_per_s": tokens / seconds,
        # Of the model alone: recomputation and attention not counted.
        "model_flops_per_s": 6 * parameters * tokens / seconds,
        "waits_per_step": medians([step["waits"] for step in measured]),
        "device_peak": told["device_peak"],
        "host_peak": told["host_peak"],
        "losses": [step["loss"] for step in told["steps"]],
        "setup_s": told["setup_s"],
        "settle_s": told.get("settle_s"),
        "cut_short": told["cut_short"],
    }
    names = ("engine", "direct_io", "host_allocator", "notices", "device_bytes_planned", "host_bytes_planned")
    row |= {name: told.get(name) for name in names}
    inspected = [step for step in told["steps"] if step["kind"] == "inspected"]
    return row | (inspection(inspected[0]) if inspected else {})


def beside_floors(row: dict, moved: Moved, rates: Rates, pass_seconds: float | None) -> dict:
    """Compare the step with the least time of the hardware, and with that and a pass of the resident model.

    `hardware` is `device.floor.report`. `floor_s`, `of_floor` and `bound_by` take the measured pass for the operations,
    as no program reaches the product's rate in all of a model; they are None where a part has no rate but the update
    and the product.
    """
    hardware = report(row["step_s"], moved, rates, row["timeline_s"])
    found = {"hardware": hardware, "compute_s": pass_seconds}
    parts = {name: spent for name, spent in hardware["floors_s"].items() if name != "flops"}
    missing = [name for name in ("ssd", "h2d", "d2h", "dram") if name not in parts]
    if pass_seconds is None:
        missing.append("compute")
    else:
        parts["compute"] = pass_seconds
    bound_by = None if missing else max(parts, key=lambda name: parts[name])
    floor = None if bound_by is None else parts[bound_by]
    found |= {"floors_s": parts, "floors_missing": missing, "floor_s": floor, "bound_by": bound_by}
    found["of_floor"] = row["step_s"] / floor if floor else None
    return found | {"idle_by_compute": None if pass_seconds is None else 1 - pass_seconds / row["step_s"]}


def inspection(step: dict) -> dict:
    """Return the inspected step's synchronising calls, seconds of kernels and rates of copies."""
    found = {"synchronising": step["synchronising"], "inspected_step_s": step["seconds"], "profile": step["profile"]}
    if step["profile"]:
        profile = step["profile"]
        found["idle_by_profile"] = 1 - profile["kernel_seconds"] / step["seconds"]
        for way in ("h2d", "d2h"):
            busy = profile[f"{way}_seconds"]
            found[f"{way}_bytes_per_busy_s"] = step["moved"][f"{way}_bytes"] / busy if busy else None
    return found
