"""The bytes that a run of the command line will write to its drives: forecast, and said before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.common.sizes import AUTO, format_decimal, format_rating, format_share
from memascend.forecast.endurance import USUAL_RATING_BYTES, endurance, savings, written
from memascend.forecast.traffic import traffic
from memascend.hardware.drives import busiest_share
from memascend.hardware.memory_limits import total_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memascend.cli.settings import Settings
    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit
    from memascend.memory_plan.lines import Plan

#: Changes that a warning names; the plan and the report have all of them.
CHANGES_TOLD = 3
#: Without --tbw, the share of `USUAL_RATING_BYTES` that is worth a line.
NOTABLE_SHARE = 0.01
#: Options that a run which goes on may have others of.
_CHANGEABLE = ("--host-memory", "--durability")


def forecast_traffic(
    model: nn.Module, units: Sequence[Unit], plan: Plan, config: Any, work: Workload, settings: Settings
) -> dict[str, Any]:
    """Return the bytes that a step moves and that a run of `settings` writes, for the first record of the metrics file.

    Bytes read are left out with a device, whose memory is not planned here; with a budget that follows the machine,
    `plan` is the least, and the run writes that at most.
    """
    moved = traffic(model, units, plan, config, work)
    told: dict[str, Any] = {}
    if settings.host_memory != AUTO:
        told["ssd_bytes_written"] = moved.written.total()
        if settings.device is None:
            told["ssd_bytes_read"] = moved.read.total()
    told["endurance"] = endurance(
        moved,
        units,
        steps=settings.steps,
        tbw=settings.tbw,
        busiest_share=busiest_share(settings.store),
        savings=savings(model, units, plan, config, work),
    )
    return told


def for_steps(endurance: dict[str, Any], steps: int, *, begins: bool) -> dict[str, Any]:
    """Return a forecast of endurance for the steps that a run has left; one that goes on has written its weights."""
    begin = endurance["begin_bytes"] if begins else 0
    total = begin + steps * endurance["step"]["total_bytes"]
    counted = {"steps": steps, "steps_given": True, "begin_bytes": begin}
    return endurance | counted | written(total, endurance["rated_bytes"], endurance["busiest_share"])


def text_of(endurance: dict[str, Any], percent: float, *, begins: bool) -> str | None:
    """Say which share of the drives' rating a run will write, and above `percent` of it which changes would write less.

    Without a rating, a run that writes little is not spoken of. A run that goes on cannot have other states.
    """
    used = endurance["rating_used"]
    text = f"the run will write {format_decimal(endurance['total_bytes'])} in {endurance['steps']:,} steps, "
    if used is None:
        share = endurance["total_bytes"] * endurance["busiest_share"] / USUAL_RATING_BYTES
        if share < NOTABLE_SHARE:
            return None
        rating = format_rating(USUAL_RATING_BYTES)
        text += f"{format_share(share)} what a drive rated for {rating} takes in its life (--tbw TB for yours)"
        used = share
    else:
        text += f"{format_share(used)} the {format_rating(endurance['rated_bytes'])} that a drive is rated for (--tbw)"
    if used * 100 <= percent:
        return text
    possible = [
        saving
        for saving in endurance["savings"]
        if (saving["budget_bytes"] or 0) <= total_memory() and (begins or saving["change"].startswith(_CHANGEABLE))
    ]
    largest = sorted(possible, key=lambda saving: -saving["saved"])[:CHANGES_TOLD]
    less = ", ".join(f"{saving['change']} saves {saving['saved']:.0%}" for saving in largest)
    return f"{text}, more than --tbw-share {percent:g}%: {less or 'take fewer --steps, or another drive'}"
