"""The short tables that end a run: each stage with its one figure, and each step beside its floor.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from _common import markdown


def loaded(out: Path) -> dict[str, Any]:
    """Return the JSON files under `out` by name, without missing or damaged ones."""
    found = {}
    for path in out.glob("*.json"):
        with contextlib.suppress(ValueError, OSError):
            found[path.stem] = json.loads(path.read_text())
    return found


def table(records: list[dict[str, Any]], out: Path) -> str:
    """Return the tables of a run as Markdown."""
    results = loaded(out)
    rows = []
    for record in records:
        headline = HEADLINES.get(record["name"], _nothing)
        try:
            shown = headline(results) if record["ended"] != "skipped" else record["why"]
        except Exception:  # the stage did not come so far, and the rest of the table is wanted
            shown = "no figure"
        rows.append([record["name"], f"{record['limit_s']}", f"{record['seconds']:.0f}", record["ended"], shown])
    text = markdown(["stage", "limit s", "took s", "ended", "figure"], rows)
    steps = step_rows(results)
    if steps:
        header = ["step", "s", "floor s", "bound by", "step / floor", "of resident", "waited for"]
        text += "\n\n" + markdown(header, steps)
    return "\n" + text


def _nothing(results: dict[str, Any]) -> str:
    return ""


def _environment(results: dict[str, Any]) -> str:
    found = results["environment"]
    name = (found["torch"]["gpu"] or {}).get("name", "no GPU")
    gpus = found["gpus"] or [{}]
    link = f"PCIe {gpus[0].get('pcie.link.gen.max', '?')} x{gpus[0].get('pcie.link.width.max', '?')}"
    return f"{name}, {link}, {found['processors']['usable']} processors, {found['io_uring']['engine']} engine"


def _probe(results: dict[str, Any]) -> str:
    from .floor import rates_of

    rates = rates_of(results["probe"])
    parts = [
        ("up", rates.h2d, 1e9, "GB/s"),
        ("down", rates.d2h, 1e9, "GB/s"),
        ("update", rates.update, 1e9, "GB/s"),
        ("drive read", rates.ssd_read, 1e9, "GB/s"),
        ("write", rates.ssd_write, 1e9, "GB/s"),
        ("bf16", rates.product, 1e12, "TFLOP/s"),
    ]
    return ", ".join(f"{name} {value / unit:.3g} {word}" for name, value, unit, word in parts if value)


def _tests(results: dict[str, Any]) -> str:
    found = results["tests"]
    text = f"{found['passed']} passed of {found['collected']} collected, {found['failed']} failed"
    text += f", {found['skipped']} skipped" if found["skipped"] else ""
    return text + (f", {found['not_run']} not run" if found["not_run"] else "")


def _exact(results: dict[str, Any]) -> str:
    rows = [row for row in results["gpu"]["rows"]["exact"] if "losses_equal" in row]
    equal = sum(row["losses_equal"] and row["weights_equal"] for row in rows)
    return f"{equal} of {len(rows)} equal to the resident model bit for bit"


def _overflow(results: dict[str, Any]) -> str:
    rows = results["overflow"]["gpu"]
    share = min(row["copy"] / (2 * row["check"]) for row in rows)
    extra = max(row["extra_bytes"]["check"] for row in rows)
    return f"check at {share:.2f} of the memory's read rate or more, {extra} extra bytes"


def _profile(results: dict[str, Any]) -> str:
    (row,) = results["gpu"]["rows"]["trace"]
    share = row["profile"]["overlapped_share"]
    copies = "no copies seen" if share is None else f"{share:.0%} of copying beside them"
    return f"kernels {row['profile']['kernel_seconds']:.3f} of {row['step_s']:.3f} s, {copies}"


HEADLINES = {
    "environment": _environment,
    "probe": _probe,
    "tests": _tests,
    "exact": _exact,
    "overflow": _overflow,
    "profile": _profile,
}


def step_rows(results: dict[str, Any]) -> list[list[str]]:
    """Return a row for each step that was measured."""
    rows = []
    for row in results.get("gpu", {}).get("rows", {}).get("step", []):
        if "failed" in row:
            rows.append([row["name"], "", "", "", "", "", row["failed"][:80]])
            continue
        hardware = row["hardware"]
        waits = hardware["where_s"] or {}
        shown = ", ".join(f"{kind} {spent:.2f} s" for kind, spent in list(waits.items())[:3])
        floor = hardware["floor_s"]
        cells = [f"{floor:.2f}", hardware["bound_by"], f"{hardware['of_floor']:.2f}"] if floor else ["", "", ""]
        resident = row.get("of_resident")
        rows.append([row["name"], f"{row['step_s']:.2f}", *cells, f"{resident:.2f}" if resident else "", shown])
    return rows
