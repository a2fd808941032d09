"""The plot and the figures of the README match the committed results, and tables of plans match the forecast."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from memascend.errors import BudgetError
from memascend.forecast.deepspeed import forecast as behind_deepspeed
from memascend.forecast.forecast import Gpu, forecast
from memascend.hardware.gpu import Rate

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "benches" / "configs"
GIB = 1 << 30
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


def test_the_plan_behind_deepspeed_is_that_of_the_forecast(tmp_path: Path) -> None:
    on_nvme = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": on_nvme, "offload_param": {**on_nvme, "max_in_cpu": 0, "buffer_size": 6e8}}
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    found = behind_deepspeed.forecast(CONFIGS / "llama-3.1-8b.json", tmp_path / "ds_config.json")
    assert behind_deepspeed.as_text(found) in (ROOT / "docs/how-to/deepspeed.md").read_text()


def test_the_plan_of_a_long_context_is_that_of_the_forecast() -> None:
    page = _text("docs/how-to/long-contexts.md")
    rates = dict.fromkeys(("flops", "h2d", "d2h", "dram", "ssd", "update"), Rate(1e9, "given"))

    def planned(tile_tokens: str | None) -> dict[str, Any]:
        gpu = Gpu(24 * GIB, rates, "ssd")
        known = {"seq_len": 131072, "batch_size": 1, "budget": 16 * GIB, "tile_tokens": tile_tokens}
        return forecast(CONFIGS / "llama-3.1-8b.json", gpu=gpu, **known)

    with pytest.raises(BudgetError, match=r"(?s)the least is 38\.5GiB .*; 75629 fit") as refused:
        planned(None)
    assert "1 x   33.5 GiB" in str(refused.value)
    assert "| 38.5 GiB: refused, 75,629 tokens fit |" in page and "| 33.5 GiB |" in page
    found = planned("auto")
    device, moved = found["gpu"]["device_memory"], found["ssd_traffic"]["planned"]
    layer = next(line for line in device["lines"] if line["consumer"] == "one layer, recomputed")
    cached = device["lines"][0]["note"].removesuffix(" cached")
    assert f"{device['smallest_bytes'] / GIB:.1f} GiB; the rest caches {cached} layers" in page
    assert f"| 33.5 GiB | {layer['nbytes'] / GIB:.1f} GiB |" in page
    read, written, inputs = (
        f"{nbytes / 1e9:.0f}"
        for nbytes in (*(moved[d]["total_bytes"] for d in ("read", "written")), moved["read"]["activations_bytes"])
    )
    assert f"{read} and {written} GB, {inputs} GB of each inputs of layers" in page
    assert f"all but {found['host_memory']['smallest_bytes'] / GIB:.1f} keeps" in page


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_the_plans_of_published_models_are_those_of_the_forecast() -> None:
    """The table of the page on plans, with the least budget that works."""
    head = "| model | least host memory |"
    table = (ROOT / "docs/how-to/plans.md").read_text().partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for row in table:
        model, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        file = next(file for file in CONFIGS.glob("*.json") if _letters(file.stem) == _letters(model))
        found = forecast(file, seq_len=1024, batch_size=1, compare="zero-infinity")
        host, space, moved = found["host_memory"], found["ssd_space"], found["ssd_traffic"]["planned"]
        beside = found["zero_infinity"]
        in_place = space["total_bytes"] - space["second_slot_bytes"]
        assert cells == [
            f"{host['smallest_bytes'] / GIB:.2f} GiB",
            f"{host['overlap_bytes'] / GIB:.2f} GiB",
            f"{space['total_bytes'] / GIB:.1f} GiB, {in_place / GIB:.1f}",
            f"{moved['read_bytes_per_parameter']:.1f} + {moved['written_bytes_per_parameter']:.1f}",
            f"{beside['parameter_pool_bytes'] / GIB:.1f} GiB",
            f"{beside['peak_bytes'] / GIB:.1f} GiB",
        ], model
