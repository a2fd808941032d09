"""The plot and the figures of the README are those of the committed results."""

from __future__ import annotations

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
