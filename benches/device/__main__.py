"""`python -m device`, with `benches` on PYTHONPATH: the stages that ONLY names, and a table of their results."""

from __future__ import annotations

import os
import signal
import sys

from .runner import Run, adopt_orphans
from .stages import CALL_SECONDS, FILES_MAX, SUMMARY, UnknownStage, chosen, settings_of
from .summary import table


def stop(number: int, frame: object) -> None:
    """End a run that is asked to end as Ctrl-C does: measurements are kept."""
    raise KeyboardInterrupt


def main() -> int:
    try:
        stages = chosen(os.environ.get("ONLY", ""))
    except UnknownStage as error:
        print(error, file=sys.stderr)
        return 2
    limits = sum(stage.limit for stage in stages)
    if limits >= CALL_SECONDS:
        print(
            f"note: these stages may take {limits} s: choose some by ONLY where a call is limited to {CALL_SECONDS} s"
        )
    settings = settings_of(dict(os.environ))
    signal.signal(signal.SIGTERM, stop)
    adopt_orphans()
    run = Run(settings)
    run.prepare()
    try:
        for stage in stages:
            run.stage(stage)
    except KeyboardInterrupt:
        print("stopped: what was measured is kept", flush=True)
    run.finish()
    print(table(run.records, settings.out))
    print(f"\n{settings.out / SUMMARY} holds all of it (at most {FILES_MAX} files are in that folder)")
    return 0 if all(record["ended"] in ("passed", "skipped") for record in run.records) else 1


if __name__ == "__main__":
    sys.exit(main())
