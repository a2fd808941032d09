"""The plot and the figures of the README match the committed results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]
PLOT = runpy.run_path(str(ROOT / "benches" / "plot_peak_memory.py"))


def test_the_plot_is_that_of_the_results() -> None:
    assert PLOT["DRAWING"].read_text() == PLOT["drawing"](), "run benches/plot_peak_memory.py"


def test_the_tables_have_the_figures_of_the_results() -> None:
    measured = [row for row in PLOT["rows"]() if row[2] is not None]
    assert len(measured) == 5
    for page in ("README.md", "docs/measurements.md"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        for _, system, peak_gb, step_s in measured:
            figures = (f"{peak_gb:.2f} GB", f"{step_s:.1f} s")
            assert any(all(figure in line for figure in figures) for line in lines), (page, system, figures)


def test_the_bytes_of_a_step_are_the_same_everywhere() -> None:
    moved = {
        (model, result["system"]): f"{result['ssd_read_per_parameter'] + result['ssd_written_per_parameter']:.1f}"
        for model in ("0.51b", "1.6b")
        for result in json.loads((PLOT["RESULTS"] / f"peak_memory-{model}.json").read_text())["results"]
        if result.get("ssd_read_per_parameter")
    }
    assert len(moved) == 4
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    for figure in moved.values():
        assert any(line.replace("*", "").endswith(f" {figure} |") for line in rows), figure
    small, large, beside = moved["0.51b", "memascend"], moved["1.6b", "memascend"], moved["0.51b", "zero-infinity"]
    assert f"moves {small} bytes per parameter where ZeRO-Infinity moves {beside}" in _text("docs/index.md")
    assert f"moves {small}, the 1.6B model {large}" in _text("docs/how-it-works.md")
    assert f"the 0.51B model of the README moves {small}" in _text("ARCHITECTURE.md")


def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())
