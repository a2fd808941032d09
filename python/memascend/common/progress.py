"""Progress of long work on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from memascend.common.sizes import format_size

PLAIN_LINE_SECONDS = 10.0  # without a terminal: at most one line in this time, and always the first and last step


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, title: str, total: int, *, unit: str = "step", stream: TextIO | None = None) -> None:
        """Show `total` units of work under `title`. With unit "B" the numbers are bytes."""
        self._stream = stream if stream is not None else sys.stderr
        self._title, self._total, self._unit = title, total, unit
        self._bar: Any = None
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
                dynamic_ncols=True,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar:12}| {elapsed}<{remaining}{postfix}",
            )

    def update(self, done: int, text: str = "") -> None:
        """Show that `done` of the total is done, with `text` beside it."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            if text:
                self._bar.refresh()
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_LINE_SECONDS or done == self._total:
            self._shown = now
            amount = (format_size(done), format_size(self._total)) if self._unit == "B" else (done, self._total)
            self._stream.write(f"{self._title} {amount[0]}/{amount[1]}{'  ' + text if text else ''}\n")
            self._stream.flush()

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
