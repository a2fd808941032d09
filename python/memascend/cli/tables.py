"""Measurements as the text and tables that the command prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memascend.common.sizes import format_decimal, format_size
from memascend.common.timeline import describe
from memascend.hardware.drives import rate_of
from memascend.report.counters import SSD_COUNTERS


def step_text(step: dict[str, Any]) -> list[str]:
    """Return one step's record as the parts of the text beside the bar, the most important ones first."""
    parts = [f"loss {step['loss']:.3f}", f"{step['seconds']:.3g} s/step"]
    if step["host_bytes_budget"] is not None:
        parts.append(f"host {format_size(step['host_bytes_in_use'])} of {format_size(step['host_bytes_budget'])}")
    parts.append(f"{step['tokens_per_s']:,.0f} tokens/s")
    if step["waited_seconds"] is not None:
        parts.append(describe(step["waited_seconds"]).partition(", ")[2])  # The seconds of a step come first.
    if step["host_bytes_budget"] is not None:
        read, written = (step[name] / step["seconds"] / 1e9 for name in SSD_COUNTERS)
        parts.append(f"SSD {read:.2f} GB/s read, {written:.2f} written")
    return parts


def bench_text(measured: dict[str, Any]) -> str:
    """Return a measurement of `memascend.hardware.drives.measure` as a table."""
    direct = "direct I/O" if measured["direct_io"] else "buffered I/O: the page cache is measured too"
    lines = [
        f"{measured['place']}: {measured['engine']} ({', '.join(measured['features'])}), {direct}, "
        f"blocks of {measured['block_bytes']} bytes, requests cut at {format_size(measured['part_bytes'])}",
        f"  {'':<24}{'MB/s':>9}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'CPU s/GiB':>11}",
    ]
    titles = {
        "write": "write, 1 MiB",
        "read": "read, 1 MiB",
        "mix": "55 % reads, 1 MiB",
        "random_read": "random read, 4 KiB",
    }
    for name, title in titles.items():
        rates = measured["workloads"][name]
        times = "".join(f"{rates[f'latency_{part}'] * 1e3:>9.2f}" for part in ("p50", "p99", "max"))
        lines.append(
            f"  {title:<24}{rates['bytes_per_second'] / 1e6:>9.0f}{rates['requests_per_second']:>12.0f}{times}"
            f"{rates['cpu_seconds_per_gib']:>11.3f}"
        )
    for option, gain in measured["polling"].items():
        verdict = ("" if option in measured["worth_it"] else "not ") + "worth a processor"
        gains = f"{gain['mix'] - 1:+.0%} of the mix, {gain['random_read'] - 1:+.0%} random reads"
        lines.append(f"  with {option}: {gains}: {verdict}")
    lines.extend(f"  note: {notice}" for notice in measured["notices"])
    return "\n".join(lines)


def gpu_text(measured: dict[str, Any]) -> str:
    """Return a measurement of `memascend.hardware.gpu.measure_gpu` as a table."""
    rows = [(f"products, {dtype}", rate / 1e12, "TFLOP/s") for dtype, rate in measured["flops"].items()]
    rows += [
        (title, measured[name] / 1e9, "GB/s")
        for name, title in (
            ("h2d", "to the GPU, pinned"),
            ("d2h", "from the GPU, pinned"),
            ("dram", "host memory, copy"),
        )
    ]
    lines = [f"{measured['gpu']}, {format_size(measured['memory_bytes'])}"]
    return "\n".join([*lines, *(f"  {title:<24}{rate:>9.1f} {unit}" for title, rate, unit in rows)])


def bench_tail(measurements: list[dict[str, Any]], remembered_in: Path | None) -> str:
    """Return the shares of a store on the measured drives, and the file that remembers the measurements."""
    lines = []
    if len(measurements) > 1:
        rates = [rate_of(measured) for measured in measurements]
        shares = (
            f"{measured['place']} {rate / sum(rates):.0%}" for measured, rate in zip(measurements, rates, strict=True)
        )
        lines.append(f"a store on all of these gives them: {', '.join(shares)}")
    lines.append("not remembered" if remembered_in is None else f"remembered in {remembered_in}")
    return "\n".join(lines)


def savings_text(savings: list[dict[str, Any]] | None) -> str:
    """Return the changes that would write less than the run in a store, a line for each; None where it is not known."""
    if savings is None:
        return "what would write less is not known: the model is no causal one of transformers, or has no optimizer yet"
    if not savings:
        return "no other options would write less"
    return "\n".join(
        f"{saving['change']} would write {format_decimal(saving['step_bytes'])} a step, {saving['saved']:.0%} less "
        "than now, at the least host memory"
        for saving in savings
    )
