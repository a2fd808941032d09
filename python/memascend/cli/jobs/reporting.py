"""`memascend report`: without PyTorch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from memascend.cli.metrics import records_of
from memascend.common.interrupts import Interrupts
from memascend.errors import DataError
from memascend.report.page import page_of, write_page
from memascend.report.run import read_run

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from memascend.report.run import RunRecords


def report(chosen: argparse.Namespace) -> int:
    """Write the page on a run."""
    run = read_run(records_of(chosen.run))
    refresh = None if run.end else chosen.refresh
    write_page(page_of(run, chosen.tbw, refresh), chosen.out)
    print(f"wrote {chosen.out}: open it in a browser", flush=True)
    with Interrupts():
        while refresh is not None:
            time.sleep(refresh)
            run = _read_again(chosen.run, run)
            refresh = None if run.end else refresh
            write_page(page_of(run, chosen.tbw, refresh), chosen.out)
    return 0


def _read_again(named: Path, before: RunRecords) -> RunRecords:
    """Return the run as it is now, or as it was where its file is on its way to the directory of the model."""
    try:
        return read_run(records_of(named))
    except DataError:
        return before
