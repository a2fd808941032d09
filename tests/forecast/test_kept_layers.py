"""`memascend plan`: the activations that a budget keeps, beside those that a run keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from traffic import SMALL, build, saved, steps

import memascend
from memascend.errors import DataError
from memascend.forecast.forecast import Gpu, as_text, forecast
from memascend.hardware.gpu import Rate
from memascend.layout.units import partition
from memascend.memory_plan.host import make_plan
from memascend.memory_plan.lines import HEAP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


RATES = {"flops": Rate(1e12, "given"), "update": Rate(4e9, "given")}


@pytest.mark.parametrize("layers", [0, 3, 8])
def test_the_layers_that_a_plan_keeps_are_those_of_a_run(
    tmp_path: Path, offloaded: Callable[..., nn.Module], layers: int
) -> None:
    folder, work = saved(SMALL, tmp_path / "config"), {"seq_len": 128, "batch_size": 4, "micro_batch_size": 2}
    most = make_plan(partition(build(SMALL)), 1 << 62).total + HEAP_BYTES
    whole = forecast(folder, **work, budget=most + (1 << 30))["host_memory"]
    assert whole["kept_layers"] == whole["kept_layers_of"] == 16
    each = whole["kept_layers_bytes"] // 16
    budget = most + (2 * layers) * each + each // 2

    model = offloaded(build(SMALL), host_memory=budget, micro_batch_size=2)
    seen = steps(model, memascend.AdamW(model.parameters(), lr=1e-4), 3, 1, 4, 128, SMALL.vocab_size)
    found = forecast(folder, **work, budget=budget, processor=RATES)
    kept = found["host_memory"]["kept_layers"]
    assert kept == 2 * layers
    ours = seen[-1]["layers_kept"] / 2
    assert abs(ours - kept) <= 2 and seen[-1]["layers_recomputed"] == 48 - 2 * ours
    assert seen[-1]["activation_bytes_kept_peak"] <= found["host_memory"]["kept_layers_bytes"] + each
    assert (f"{kept} of 16 calls of layers are not computed again" in as_text(found)) == (kept > 0)

    assert found["whole"]["planned_bytes"] == most + found["host_memory"]["kept_layers_bytes"]
    flops = _flops(found)
    least = _flops(forecast(folder, **work, processor=RATES))
    weights = sum(place.numel for unit in partition(build(SMALL)) if unit.repeated for place in unit.places)
    assert flops == pytest.approx(least - 2 * 512 * weights * layers / 8, rel=0.02)
    assert (flops < least) == (layers > 0)


def _flops(found: dict[str, Any]) -> int:
    return next(one["amount"] for one in found["step"]["resources"] if one["resource"] == "flops")


def test_memory_that_a_plan_lends_is_that_of_a_run(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    folder, work = saved(SMALL, tmp_path / "config"), {"seq_len": 128, "batch_size": 4, "micro_batch_size": 2}
    given: dict[str, Any] = {"durability": "none", "spare_memory": "activations"}
    most = make_plan(partition(build(SMALL)), 1 << 62)
    budget = most.total - most.states.total // 2
    states = forecast(folder, **work, budget=budget, durability="none")
    found = forecast(folder, **work, budget=budget, processor=RATES, **given)
    assert states["host_memory"]["kept_layers"] < found["host_memory"]["kept_layers"]
    assert found["whole"]["planned_bytes"] <= budget

    model = offloaded(build(SMALL), host_memory=budget, micro_batch_size=2, **given)
    seen = steps(model, memascend.AdamW(model.parameters(), lr=1e-4), 4, 1, 4, 128, SMALL.vocab_size)
    kept, (before, last) = found["host_memory"]["kept_layers"], seen[-2:]
    assert abs(last["layers_kept"] - before["layers_kept"] - kept) <= 2
    for direction in ("read", "written"):
        moved = last[f"ssd_bytes_{direction}"] - before[f"ssd_bytes_{direction}"]
        told = found["ssd_traffic"]["planned"][direction]["total_bytes"]
        assert moved == pytest.approx(told, rel=0.03)
        assert told > states["ssd_traffic"]["planned"][direction]["total_bytes"]


@pytest.mark.parametrize("options", [{"ranks": 2}, {"gpu": Gpu(8 << 30, {})}], ids=str)
def test_where_a_plan_lends_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = saved(SMALL, tmp_path / "config")
    with pytest.raises(DataError, match="--spare-memory activations works only on the CPU, in one process"):
        forecast(folder, seq_len=128, batch_size=4, spare_memory="activations", **options)
