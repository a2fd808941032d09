"""Savings by more host memory: bytes on the SSD, and their time, from the least budget to everything in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memascend.forecast.traffic import traffic
from memascend.memory_plan.host import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from memascend.forecast.traffic import Traffic
    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan

#: Each budget is so many times the one before.
RATIO = math.sqrt(2)
#: More than any model takes.
_NO_LIMIT = 1 << 62


def curve(
    model: nn.Module,
    units: Sequence[Unit],
    smallest: Plan,
    config: Any,
    work: Workload,
    device_plan: DevicePlan | None,
    seconds: Callable[[Traffic], float] | None,
) -> list[dict[str, Any]]:
    """Return the traffic of a step with budgets from the least that works to one beyond which nothing changes.

    `seconds` gives the least time of a step from its traffic. Each entry has `budget_bytes`, `read_bytes`,
    `written_bytes`, `bytes_per_parameter` and, with `seconds`, `seconds_at_least`.
    """
    options: dict[str, Any] = {
        "update": smallest.update,
        "on_device": smallest.on_device,
        "threads": smallest.update_threads,
        "inputs": smallest.inputs,
    }
    least, most = smallest.total, make_plan(units, _NO_LIMIT, **options).total
    count = max(1, math.ceil(math.log(most / least, RATIO))) if most > least else 0
    budgets = [least, *(math.ceil(least * (most / least) ** (number / count)) for number in range(1, count + 1))]
    parameters = sum(place.numel for unit in units for place in unit.places)
    points = []
    for budget in budgets:
        moved = traffic(model, units, make_plan(units, budget, **options), config, work, device_plan)
        point = {
            "budget_bytes": budget,
            "read_bytes": moved.read.total(),
            "written_bytes": moved.written.total(),
            "bytes_per_parameter": round(moved.total / parameters, 3),
        }
        if seconds is not None:
            point["seconds_at_least"] = round(seconds(moved), 3)
        points.append(point)
    return points
