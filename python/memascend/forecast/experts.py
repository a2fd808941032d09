"""The experts of a mixture, read with their layers or one by one: the least memory of each, and the bytes of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_decimal, format_size
from memascend.errors import BudgetError
from memascend.forecast.traffic import traffic
from memascend.layout.experts import has_experts
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.options import EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit

_SAID = {"whole": "with their layers", "pieces": "one by one"}


def compare(
    model: nn.Module,
    units_of: Callable[[str], Sequence[Unit]],
    budget: int | None,
    config: Any,
    work: Workload,
    options: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the memory and traffic of each way to read a model's experts; None without such experts.

    `units_of` divides the model for a value of `experts`, and `options` go to its plans. Within `budget` the
    better way moves fewer bytes; without one it has the smaller least. `memascend.forecast.report` describes the keys.
    """
    if not has_experts(model):
        return None
    ways: dict[str, dict[str, Any]] = {}
    for way in EXPERTS:
        units = units_of(way)
        least = smallest_plan(units, **options)
        ways[way] = {"is_read_so": way == "whole" or any(unit.is_experts for unit in units)}
        ways[way] |= {"smallest_bytes": least.total, "step_bytes": None}
        try:
            plan = least if budget is None else make_plan(units, budget, **options)
        except BudgetError:
            continue
        ways[way]["step_bytes"] = traffic(model, units, plan, config, replace(work, experts=way)).total
    return {"better": _better(ways, budget), "budget_bytes": budget, **ways}


def _better(ways: Mapping[str, Mapping[str, Any]], budget: int | None) -> str:
    """Return the way that moves fewer bytes within the budget; without one, that with the smaller least."""
    if not ways["pieces"]["is_read_so"]:
        return "whole"
    key = "smallest_bytes" if budget is None else "step_bytes"
    within = [way for way in EXPERTS if ways[way][key] is not None]
    return min(within, key=lambda way: ways[way][key])


def as_line(compared: Mapping[str, Any]) -> str:
    """Write the result of `compare` in a line."""
    if not compared["pieces"]["is_read_so"]:
        return "experts are so small that they are read with their layers: one by one they would take no less memory"
    said = []
    for way in EXPERTS:
        found = compared[way]
        text = f"{_SAID[way]} a run takes {format_size(found['smallest_bytes'])} at least"
        if compared["budget_bytes"] is not None and found["step_bytes"] is not None:
            text += f", and moves {format_decimal(found['step_bytes'])} a step within this budget"
        said.append(text)
    return f"experts: {'; '.join(said)}. The better one is --experts {compared['better']}"
