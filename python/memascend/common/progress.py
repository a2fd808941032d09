"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from memascend.common.sizes import format_size

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line in this time, and always the first and last step
#: Of a terminal that does not say how wide it is, as in a container, or says 0.
USUAL_COLUMNS = 80
#: Columns from which a bar is drawn; in a narrower line its room is for the numbers.
BAR_COLUMNS = 100
_WITH_BAR = "{desc} {n_fmt}/{total_fmt} |{bar:12}| {elapsed}<{remaining}{postfix}"
_WITHOUT_BAR = "{desc} {n_fmt}/{total_fmt}{bar:0} {elapsed}<{remaining}{postfix}"  # tqdm cuts only a line with a bar
#: Columns that the time which remains may grow by until the line is drawn.
_SPARE_COLUMNS = 4


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, title: str, total: int, *, unit: str = "step", stream: TextIO | None = None) -> None:
        """Show `total` units of work under `title`. With unit "B" the numbers are bytes."""
        self._stream = stream if stream is not None else sys.stderr
        self._title, self._total, self._unit = title, total, unit
        self._bar: Any = None
        #: The first amount, and when it was done: the rate after it says how much time is left.
        self._first: tuple[int, float] | None = None
        self._ended = False
        self._began = time.monotonic()
        #: The amount and the parts shown last.
        self._done, self._parts = 0, list[str]()
        self._shown = -math.inf if unit == "step" else time.monotonic()  # of other work a line comes only after a while
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=title,
                total=total,
                unit=unit,
                unit_scale=unit == "B",
                unit_divisor=1024,
                file=self._stream,
                ncols=self._columns(),
                nrows=2,  # or else tqdm asks for the size, and draws nothing on a terminal without rows
                bar_format=_WITH_BAR,
            )

    def update(self, done: int, parts: Sequence[str] = ()) -> None:
        """Show that `done` of the total is done, with `parts` of a text beside it, the most important ones first.

        A line on a terminal has the parts that it has room for; lines elsewhere have all.
        """
        self._done, self._parts = done, list(parts)
        if self._bar is not None:
            self._lay_out(done, parts)
            self._bar.update(done - self._bar.n)
            if parts:
                self._bar.refresh()
            return
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        ends = done == self._total and not self._ended  # Work after the last step is shown at times too.
        if now - self._shown >= PLAIN_LINE_SECONDS or ends:
            self._shown, self._ended = now, done == self._total
            amount = (format_size(done), format_size(self._total)) if self._unit == "B" else (done, self._total)
            self._stream.write(
                "  ".join([f"{self._title} {amount[0]}/{amount[1]}", *parts, self._elapsed(), *self._left(done, now)])
                + "\n"
            )
            self._stream.flush()

    def pulse(self, part: str) -> None:
        """Show a part beside the amount; elsewhere than on a terminal in a line, where none came for a while."""
        if self._bar is not None:
            self._lay_out(self._bar.n, [part, *self._parts])
            self._bar.refresh()
        elif time.monotonic() - self._shown >= PLAIN_LINE_SECONDS:
            self._shown = time.monotonic()
            self._stream.write("  ".join([f"{self._title} {self._done}/{self._total}", part, self._elapsed()]) + "\n")
            self._stream.flush()

    def _elapsed(self) -> str:
        return f"{_clock(time.monotonic() - self._began)} elapsed"

    def _left(self, done: int, now: float) -> list[str]:
        """Return a part of a line that says how long the remainder takes at the rate so far, where that is known."""
        assert self._first is not None
        first_done, begin = self._first
        if not first_done < done < self._total:
            return []
        return [f"{_clock((now - begin) / (done - first_done) * (self._total - done))} left"]

    def _columns(self) -> int:
        """Return the width of the terminal."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or USUAL_COLUMNS
        except (OSError, ValueError):  # The terminal is gone, or the stream is no file.
            return USUAL_COLUMNS

    def _lay_out(self, done: int, parts: Sequence[str]) -> None:
        """Give the line the terminal's width, and the parts that fit."""
        bar = self._bar
        bar.ncols = self._columns()
        bar.bar_format = _WITH_BAR if bar.ncols >= BAR_COLUMNS else _WITHOUT_BAR
        beside = {**bar.format_dict, "n": done, "postfix": "", "ncols": None}
        room = bar.ncols - len(bar.format_meter(**beside)) - _SPARE_COLUMNS
        shown: list[str] = []
        for part in parts:
            if len("  ".join([*shown, part])) + 2 <= room:  # tqdm puts two characters before them
                shown.append(part)
        bar.set_postfix_str("  ".join(shown), refresh=False)

    def note(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
