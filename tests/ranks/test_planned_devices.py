"""The figures of `memascend plan --ranks --gpu` match each rank of a real run: plan, copies and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import rank_programs
from test_planned_ranks import MODELS
from traffic import saved

from memascend.forecast.forecast import Gpu, forecast
from memascend.hardware.gpu import Rate

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 2 * 128
RATES = {name: Rate(1.0, "given") for name in ("flops", "h2d", "d2h", "dram", "ssd", "network")}


@pytest.mark.parametrize(("spare", "accumulate"), [(0, 1), (800 << 20, 2)], ids=["least", "all there, accumulating"])
def test_copies_and_bytes_sent_are_those_of_a_real_run(
    spare: int, accumulate: int, tmp_path: Path, library: Path
) -> None:
    config, device_memory = MODELS["llama"], 22 << 20
    options: dict[str, Any] = {"seq_len": 128, "batch_size": 2, "grad_accum": accumulate, "ranks": 2}
    file = saved(config, tmp_path / "config")
    budget = forecast(file, **options)["host_memory"]["smallest_bytes"] + (8 << 20)
    gpu = Gpu((device_memory + spare) * 16 // 15 + 1, RATES, "recompute", segments=None)
    found = forecast(file, budget=budget, gpu=gpu, **options)
    results = rank_programs.run(
        "on_device",
        2,
        tmp_path,
        doing="trace",
        library=library,
        computing={"device_memory": device_memory + spare, "batch_tokens": TOKENS},
        config=config,
        optimizer="adamw",
        budget=budget,
        accumulate=accumulate,
    )
    predicted = {one["resource"]: one["amount"] for one in found["gpu"]["step"]["resources"]}
    for rank, seen in enumerate(results):
        assert "error" not in seen, seen
        assert seen[-1]["device_bytes_planned"] == found["gpu"]["device_memory"]["total_bytes"]
        assert seen[-1]["host_bytes_planned"] == found["host_memory"]["total_bytes"]
        moved = {name: seen[3][name] - seen[2][name] for name in ("h2d_bytes", "d2h_bytes", "network_bytes_sent")}
        assert moved["h2d_bytes"] == pytest.approx(predicted["h2d"], rel=0.01)
        assert moved["d2h_bytes"] == predicted["d2h"]
        assert moved["network_bytes_sent"] == found["network"]["sent_bytes"][rank]
    # With room for all units, a step copies each once, with its padding, however many passes it has.
    weights = found["model"]["parameters"] * 2
    assert (predicted["h2d"] < 1.2 * weights) == (spare > 0)
