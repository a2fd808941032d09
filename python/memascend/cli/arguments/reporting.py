"""The options of `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.values import path, positive, positive_rate


def add_report(subcommands: Any) -> None:
    """Add the subcommand `report`."""
    parser = subcommand(
        subcommands,
        "report",
        help="show a run as a page: loss, speed, where the time went, drives, memory",
        description="Write one HTML page on a run, finished or not: loss, learning rate, gradient norm, speed, where\n"
        "each step's seconds went, the traffic of each drive and its wear, memory, and the plan beside what was\n"
        "measured.",
    )
    add = parser.add_argument
    text = "the model directory that `memascend finetune` writes or wrote, its store, or its metrics file"
    add("run", type=path, metavar="RUN", help=text)
    text = "while the run goes on, write the page anew every N seconds, and have the browser read it anew"
    add("--refresh", type=positive, metavar="N", help=text)
    text = "the page; a report that is there is replaced (default: %(default)s)"
    add("--out", type=path, default=Path("report.html"), metavar="FILE", help=text)
    text = "rated endurance of each drive in terabytes written (TBW), to show the share that the run has used"
    add("--tbw", type=positive_rate, metavar="TB", help=text)
