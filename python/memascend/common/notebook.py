"""What notebooks show of plans and counters: ordinary values, with a table where a cell ends with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from memascend.common.html import table
from memascend.common.sizes import format_size
from memascend.common.timeline import COMPUTE, KINDS


class Line(Protocol):
    """One consumer of memory; see `memascend.plan.host.Line`."""

    consumer: str
    nbytes: int
    count: int
    note: str

    @property
    def total(self) -> int:
        """Bytes of all buffers."""


class Plan(Protocol):
    """A plan of host or device memory."""

    @property
    def budget(self) -> int:
        """The bytes that the user allows."""

    @property
    def total(self) -> int:
        """Bytes that all consumers take together."""

    @property
    def lines(self) -> Sequence[Line]:
        """The lines of all consumers."""

    def table(self) -> str:
        """Write the plan as text."""


class PlanText(str):
    """The plans of a model as text; a notebook shows them as tables."""

    _html = ""

    @classmethod
    def of(cls, plans: dict[str, Plan]) -> PlanText:
        """Return the plans, by what they are a plan of."""
        text = cls("\n".join(plan.table() for plan in plans.values()))
        text._html = "".join(_plan_table(name, plan) for name, plan in plans.items())
        return text

    def _repr_html_(self) -> str:
        return self._html


def _plan_table(name: str, plan: Plan) -> str:
    return table(
        f"{name}: {format_size(plan.total)} of a budget of {format_size(plan.budget)}",
        ("consumer", "buffers", "bytes of each", "bytes", "what for"),
        [
            (line.consumer, line.count, format_size(line.nbytes), format_size(line.total), line.note)
            for line in plan.lines
            if line.count
        ],
    )


class Stats(dict[str, Any]):
    """The counters of a model, a dictionary; a notebook shows them as tables."""

    def _repr_html_(self) -> str:
        names = {**KINDS, COMPUTE: COMPUTE}
        tables = [
            table("counters", (), [(name, shown(name, value)) for name, value in self.items() if _is_flat(value)])
        ]
        if seconds := self.get("seconds"):
            whole = sum(seconds.values()) or 1.0
            rows = [
                (names.get(kind, kind), f"{spent:.1f} s", f"{spent / whole:.0%}") for kind, spent in seconds.items()
            ]
            tables.append(table("where the time went", ("blocked on", "time", "share"), rows))
        if volumes := self.get("volumes"):
            wanted = ("share", "bytes_read", "bytes_written", "busy_seconds", "bytes_per_busy_second", "engine")
            rows = [(volume["path"], *(shown(name, volume[name]) for name in wanted)) for volume in volumes]
            tables.append(table("volumes", ("path", *(name.replace("_", " ") for name in wanted)), rows))
        if notices := self.get("notices"):
            tables.append(table("notices", (), [(notice,) for notice in notices]))
        return "".join(tables)


def _is_flat(value: Any) -> bool:
    return not isinstance(value, dict | list | tuple)


def shown(name: str, value: Any) -> str:
    """Return a counter with its unit, which its name says."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_per_busy_second"):
        return f"{value / 1e9:.2f} GB/s"
    if "bytes" in name:
        return format_size(value)
    if name.endswith("seconds"):
        return f"{value:.1f} s"
    return f"{value:.0%}" if name == "share" else f"{value:,}"
