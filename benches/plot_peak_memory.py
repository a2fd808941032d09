#!/usr/bin/env python
"""Draw docs/assets/peak_memory.svg from the results of peak_memory.py: memory and step time beside the peers.

    python benches/plot_peak_memory.py            # writes the file
    python benches/plot_peak_memory.py --check    # exit 1 when the file differs from the results

The drawing is written as text, so that it needs no library and is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benches" / "results"
DRAWING = ROOT / "docs" / "assets" / "peak_memory.svg"
LABELS = {
    "memascend": "memascend",
    "zero-infinity": "ZeRO-Infinity, NVMe",
    "in-memory": "in memory, torch AdamW",
}
COLOURS = {"memascend": "#4051b5", "zero-infinity": "#c77d2e", "in-memory": "#8a8f98"}
WIDTH, ROW, BAR = 850, 26, 16
LEFT, PANEL = 170, 270  # of the first panel's bars, in pixels, and the length of the longest bar


def rows() -> list[tuple[str, str, float | None, float | None]]:
    """Return (model, system, peak in GB, seconds of a step); None where it does not fit."""
    table: list[tuple[str, str, float | None, float | None]] = []
    for model in ("0.51b", "1.6b"):
        results = json.loads((RESULTS / f"peak_memory-{model}.json").read_text())["results"]
        measured = {result["system"]: result for result in results if "step_s" in result}
        for system in LABELS:
            result = measured.get(system, {})
            table.append((model, system, result.get("peak_gb"), result.get("step_s")))
    return table


def bars(table: list, column: int, left: int, unit: str) -> list[str]:
    """Return one panel: a bar and a figure for every row."""
    longest = max(row[column] for row in table if row[column] is not None)
    lines = []
    for index, row in enumerate(table):
        top = row_top(index)
        value = row[column]
        if value is None:
            lines.append(f'<text class="faint" x="{left}" y="{top + 13}">does not fit</text>')
            continue
        length = PANEL * value / longest
        lines.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[row[1]]}"/>')
        figure = f"{value:.2f} {unit}" if unit == "GB" else f"{value:.1f} {unit}"
        lines.append(f'<text x="{left + length + 5:.1f}" y="{top + 13}">{figure}</text>')
    return lines


def row_top(index: int) -> int:
    """Return the upper edge of a row; a heading stands above each model's."""
    return 58 + index * ROW + (index // len(LABELS)) * 34


def drawing() -> str:
    """Return the picture as SVG."""
    table = rows()
    height = row_top(len(table) - 1) + 54
    right = LEFT + PANEL + 80
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        "<title>Peak host memory and step time beside ZeRO-Infinity and training in memory</title>",
        "<style>text { font: 12px sans-serif; fill: #24292f }",
        ".head { font-weight: bold } .faint { fill: #6e7781 }</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text class="head" x="{LEFT}" y="20">peak host memory above imports</text>',
        f'<text class="head" x="{right}" y="20">time of a step</text>',
    ]
    for index, (model, system, _, _) in enumerate(table):
        top = row_top(index)
        if index % len(LABELS) == 0:
            lines.append(f'<text class="head" x="10" y="{top - 8}">{model.upper()} parameters</text>')
        lines.append(f'<text x="10" y="{top + 13}">{LABELS[system]}</text>')
    lines += bars(table, 2, LEFT, "GB") + bars(table, 3, right, "s")
    lines.append(
        f'<text class="faint" x="10" y="{height - 8}">AdamW, bf16 weights, 128 tokens; 2 cores, 24 GiB, one SSD; '
        "benches/peak_memory.py</text>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when the file is not what the results give")
    if parser.parse_args().check:
        return 0 if DRAWING.read_text() == drawing() else 1
    DRAWING.write_text(drawing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
