"""Axes: units, ranges, ticks, and which of many steps are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Quantities of plots, with the units of their numbers: (name, size of one).
UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "bytes": tuple((name, 1024.0**power) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
    "bytes per second": (("MB/s", 1e6), ("GB/s", 1e9)),
    "seconds": (("ms", 1e-3), ("s", 1.0)),
    "tokens per second": (("tokens/s", 1.0),),
    "": (("", 1.0),),
}
#: Beyond this ratio of the largest to the smallest value, an axis may be logarithmic.
LOG_FROM = 200
#: A logarithmic axis begins above this.
LOG_LEAST = 1e-100


def unit_for(quantity: str, largest: float) -> tuple[str, float]:
    """Return the unit in which numbers up to `largest` are read well, and its size."""
    fitting = [unit for unit in UNITS[quantity] if unit[1] <= largest]
    return fitting[-1] if fitting else UNITS[quantity][0]


def shown(value: float) -> str:
    """Write a number with four significant digits, without an exponent where it is short."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = 3 if not value else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Axis:
    """A range of values, as shares of a length from 0 to 1."""

    low: float
    high: float
    logarithmic: bool = False

    @staticmethod
    def around(values: Sequence[float], *, zero: bool = False, logarithmic: bool = False) -> Axis:
        """Return an axis that holds all values, and zero if wanted; a logarithmic one where that helps."""
        low, high = min(values), max(values)
        if logarithmic and low > LOG_LEAST and high / low > LOG_FROM:
            return Axis(low / 1.2, high * 1.2, True)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
        return Axis(low if zero and low == 0 else low - margin, high + margin)

    def share(self, value: float) -> float:
        """Return the place of a value on the axis."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / ((high - low) or 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values within the axis."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            apart = max(1, math.ceil((last - first) / most))
            return [10.0**power for power in range(first, last + 1, apart)]
        rough = (self.high - self.low) / most
        if rough < 1e-300:
            return []
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * count for count in range(first, last + 1)]


def drawn(columns: Sequence[Sequence[float | None]], most: int) -> list[int]:
    """Return the positions of at most about `most` steps to draw: the least and the most of each column stay.

    Steps are divided into ranges of the same length. Of each, and of each column, the positions with the least and the
    most value and the first one without a value are drawn, so that neither spikes nor gaps go.
    """
    count = max((len(column) for column in columns), default=0)
    if count <= most:
        return list(range(count))
    ranges = max(1, most // (3 * len(columns)))
    positions = {0, count - 1}
    for number in range(ranges):
        members = range(number * count // ranges, (number + 1) * count // ranges)
        for column in columns:
            here = [(value, position) for position in members if (value := column[position]) is not None]
            if here:
                positions |= {min(here)[1], max(here)[1]}
            positions |= set([position for position in members if column[position] is None][:1])
    return sorted(positions)
