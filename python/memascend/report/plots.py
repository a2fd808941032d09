"""Plots as figures of HTML around an SVG, which need no script to be seen. The script shows the values of a step.

Lines are drawn in a box that is stretched to the width of the page; titles, ticks and legends are text beside it, so
that they are as large as other text on every screen and on paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memascend.report.html import Markup, escape
from memascend.report.run import Values
from memascend.report.scales import Axis, drawn, shown, unit_for

#: The box that lines are drawn in.
WIDTH, HEIGHT = 1000, 300
#: About as many steps are drawn, of all series of a plot together.
POINTS_MAX = 900
#: Colours in the style sheet; beyond these they are used again.
COLOURS = 8


@dataclass(frozen=True)
class Plot:
    """The series and units of one figure."""

    name: str  # of its elements
    title: str
    note: str
    quantity: str  # one of `scales.UNITS`
    steps: Sequence[int]
    series: Mapping[str, Values]
    #: Whether the series are parts of a whole, drawn upon each other.
    stacked: bool = False
    #: Whether the axis begins at zero.
    zero: bool = True
    logarithmic: bool = False
    #: Series that have values at some steps only, which belong together.
    sparse: tuple[str, ...] = ()
    #: Series that others are held against.
    bounds: tuple[str, ...] = ()

    @property
    def present(self) -> dict[str, Values]:
        """The series that have any value, of parts of a whole those that add to it."""
        if self.stacked:
            return {name: values for name, values in self.series.items() if any(values)}
        return {name: values for name, values in self.series.items() if any(value is not None for value in values)}


def figure(plot: Plot) -> Markup:
    """Return the figure of a plot that has values."""
    series = plot.present
    everything = [value for values in series.values() for value in values if value is not None]
    tops = _sums(series) if plot.stacked else everything
    unit, size = unit_for(plot.quantity, max(abs(value) for value in tops))
    scaled = {name: [None if v is None else v / size for v in values] for name, values in series.items()}
    y = Axis.around([value / size for value in tops], zero=plot.zero, logarithmic=plot.logarithmic)
    x = Axis(plot.steps[0], max(plot.steps[-1], plot.steps[0] + 1))
    columns = [*scaled.values(), *([_totals(scaled)] if plot.stacked else [])]
    positions = drawn(columns, POINTS_MAX)
    steps = [plot.steps[position] for position in positions]
    points = {name: [values[position] for position in positions] for name, values in scaled.items()}
    lines = _areas(points, steps, x, y) if plot.stacked else _lines(points, steps, x, y, plot)
    heading = f"{plot.title}, {unit}" if unit else plot.title
    return Markup(
        f'<figure class="plot" id="{escape(plot.name)}">'
        f"<figcaption><h3>{escape(heading)}</h3><p>{escape(plot.note)}</p></figcaption>"
        f"{_legend(scaled, plot.stacked)}"
        f'<div class="box"><div class="y" aria-hidden="true">{_y_ticks(y)}</div>'
        f'<div class="canvas" tabindex="0" role="group" aria-label="{escape(heading)}: arrow keys show values">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{escape(plot.name)}-title {escape(plot.name)}-desc">'
        f'<title id="{escape(plot.name)}-title">{escape(heading)}</title>'
        f'<desc id="{escape(plot.name)}-desc">{escape(_described(scaled, plot.steps, unit))}</desc>'
        f"{_grid(y)}{lines}</svg>"
        '<div class="cursor" hidden></div><div class="tip" role="status" hidden></div></div>'
        f'<div class="x" aria-hidden="true">{_x_ticks(x, plot.steps)}</div></div>'
        f'<script type="application/json" class="values">{_values(points, steps, unit, plot.stacked)}</script></figure>'
    )


def _totals(series: Mapping[str, Values]) -> Values:
    """Return the sum of all series at each step; None where none has a value."""
    rows = zip(*series.values(), strict=True)
    return [None if all(v is None for v in row) else sum(v for v in row if v is not None) for row in rows]


def _sums(series: Mapping[str, Values]) -> list[float]:
    return [total for total in _totals(series) if total is not None]


# ---- lines ------------------------------------------------------------------------------------------------------


def _at(step: float, value: float, x: Axis, y: Axis) -> str:
    return f"{x.share(step) * WIDTH:.1f} {(1 - y.share(value)) * HEIGHT:.1f}"


def _lines(points: Mapping[str, Values], steps: Sequence[int], x: Axis, y: Axis, plot: Plot) -> str:
    paths = []
    for number, (name, values) in enumerate(points.items()):
        pieces: list[list[str]] = [[]]
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                pieces[-1].append(_at(step, value, x, y))
            elif name not in plot.sparse and pieces[-1]:
                pieces.append([])
        # A piece of one point is a dot: a line without length has round ends.
        path = "".join(f"M{'L'.join(piece)}{'h0' if len(piece) == 1 else ''}" for piece in pieces if piece)
        kind = "line bound" if name in plot.bounds else "line"
        paths.append(f'<path class="{kind} c{number % COLOURS}" d="{path}"/>')
        if name in plot.sparse:
            dots = "".join(f"M{point}h0" for piece in pieces for point in piece)
            paths.append(f'<path class="dots c{number % COLOURS}" d="{dots}"/>')
    return "".join(paths)


def _areas(points: Mapping[str, Values], steps: Sequence[int], x: Axis, y: Axis) -> str:
    """Draw areas upon each other; a step without a value adds nothing."""
    alone = len(steps) == 1  # One step is as wide as the box.
    wide = [x.low, x.high] if alone else steps
    below = [0.0] * len(wide)
    paths = []
    for number, values in enumerate(points.values()):
        values = values * 2 if alone else values
        above = [base + (value or 0.0) for base, value in zip(below, values, strict=True)]
        edge = [_at(step, value, x, y) for step, value in zip(wide, above, strict=True)]
        back = [_at(step, value, x, y) for step, value in zip(wide, below, strict=True)]
        paths.append(f'<path class="area c{number % COLOURS}" d="M{"L".join([*edge, *reversed(back)])}Z"/>')
        below = above
    return "".join(paths)


# ---- titles, legends and values ---------------------------------------------------------------------------------


def _grid(y: Axis) -> str:
    rows = "".join(f"M0 {(1 - y.share(tick)) * HEIGHT:.1f}H{WIDTH}" for tick in y.ticks())
    return f'<path class="grid" d="{rows}"/>' if rows else ""


def _y_ticks(y: Axis) -> str:
    return "".join(f'<span style="top:{(1 - y.share(tick)) * 100:.1f}%">{shown(tick)}</span>' for tick in y.ticks())


def _x_ticks(x: Axis, steps: Sequence[int]) -> str:
    ticks = [steps[0], *(int(tick) for tick in x.ticks(4) if tick == int(tick)), steps[-1]]
    ends = (0.0, x.share(steps[-1]))
    inner = [tick for tick in ticks[1:-1] if all(abs(x.share(tick) - end) > 0.12 for end in ends)]
    places = dict.fromkeys([ticks[0], *inner, ticks[-1]])
    return "".join(f'<span style="left:{x.share(tick) * 100:.1f}%">{tick:,}</span>' for tick in places)


def _legend(series: Mapping[str, Values], stacked: bool) -> str:
    """Return a line for each series, with its last value; the uppermost of a stack first."""
    entries = [
        f'<li><span class="swatch c{number % COLOURS}"></span>{escape(name)} <b>{shown(_present(values)[-1])}</b></li>'
        for number, (name, values) in enumerate(series.items())
    ]
    return f'<ul class="legend">{"".join(reversed(entries) if stacked else entries)}</ul>'


def _present(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _described(series: Mapping[str, Values], steps: Sequence[int], unit: str) -> str:
    """Describe the plot in words."""
    told = []
    for name, values in series.items():
        here = _present(values)
        told.append(
            f"{name}: first {shown(here[0])}, last {shown(here[-1])}, least {shown(min(here))}, most {shown(max(here))}"
        )
    return f"Steps {steps[0]:,} to {steps[-1]:,}{f', in {unit}' if unit else ''}. {'; '.join(told)}."


def _values(points: Mapping[str, Values], steps: Sequence[int], unit: str, stacked: bool) -> str:
    """Return the values shown at each step drawn, for the script: as text, so that it formats no numbers."""
    suffix = f" {unit}" if unit else ""
    rows = {name: [None if v is None else shown(v) for v in values] for name, values in points.items()}
    if stacked:
        rows["total"] = [None if v is None else shown(v) for v in _totals(points)]
    data = {"steps": steps, "series": list(rows.items()), "unit": suffix, "colours": COLOURS, "areas": len(points)}
    # Nothing in a text can end the element.
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
