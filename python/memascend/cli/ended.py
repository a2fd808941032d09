"""How the run ended that wrote --out, for the same command with --resume."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memascend.cli.metrics import METRICS_NAME
from memascend.common.shapes import Either, check, count

if TYPE_CHECKING:
    from pathlib import Path

    from memascend.cli.settings import Settings

#: In a model directory whose run a signal has ended before its last step. The metrics may be elsewhere, and after the
#: run has gone on they no longer say how it ended before.
INTERRUPTED_NAME = "interrupted.json"
_NUMBER = Either(float, int)
#: What `ended_text` tells of a run's last record: other files have the name of metrics too.
_TOLD = {
    "steps": count,
    "steps_planned": count,
    "signal_number": Either(count, None),
    "evaluations": [{"step": count, "loss": _NUMBER}],
    "loss": Either(_NUMBER, None),
    "settings": {
        "store": [str],
        "keep_store": bool,
        "save_every": Either(count, None),
        "lora_rank": Either(count, None),
    },
}


def note_interrupted(folder: Path, settings: Settings, steps: int) -> None:
    """Note in a model directory that its run was ended after so many steps."""
    record = {"out": str(settings.out), "store": list(map(str, settings.store)), "steps": steps}
    (folder / INTERRUPTED_NAME).write_text(json.dumps(record) + "\n")


def is_interrupted(settings: Settings) -> bool:
    """Return whether --out holds the model so far of a run that --resume goes on with."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads((settings.out / INTERRUPTED_NAME).read_text())
        return settings.resume and _is_of(record, settings)
    return False


def finished_steps(settings: Settings) -> int | None:
    """Return after how many steps the run has finished that --resume was to go on with; None where it has not."""
    if not settings.resume or settings.change or not settings.out.is_dir():
        return None
    file = settings.metrics if settings.metrics is not None else settings.out / METRICS_NAME
    with suppress(OSError, ValueError, TypeError, KeyError):
        opening: dict[str, Any] = {}
        end: dict[str, Any] = {}
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                end = json.loads(line)
                opening = end if end["record"] in ("start", "resume") else opening
        if end["record"] == "end" and end["signal_number"] is None and _is_of(opening["settings"], settings):
            return int(end["steps"])
    return None


def ended_run(out: Path) -> dict[str, Any] | None:
    """Return the last record of the run that wrote the model directory `out`, with its `settings` and last `loss`.

    None where `out` is no such directory, or the run has not ended.
    """
    end: dict[str, Any] | None = None
    settings, loss = None, None
    with suppress(OSError, ValueError, TypeError, KeyError), open(out / METRICS_NAME, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["record"] in ("start", "resume"):
                settings, end = record["settings"], None
            elif record["record"] == "step":
                loss = record["loss"]
            elif record["record"] == "end":
                end = record | {"settings": settings, "loss": loss}
    with suppress(ValueError):
        check(end, _TOLD, METRICS_NAME)
        return end
    return None


def ended_text(out: Path, run: dict[str, Any]) -> str:
    """Return the result of `ended_run` as text: the model that was written, and the fate of the store."""
    settings, steps = run["settings"], f"{run['steps']} of {run['steps_planned']} steps"
    how = "finished" if run["signal_number"] is None else f"was ended by signal {run['signal_number']}"
    lines = [f"{out}: the model of a run that {how} after {steps}"]
    if run["loss"] is not None:
        lines[0] += f", the last of loss {run['loss']:.3f}"
    best = run["evaluations"][1:]
    if best and run["signal_number"] is None:
        lines.append(f"the best after step {best[0]['step']} was written: loss {best[0]['loss']:.4f} on held-out data")
    stores = settings["store"]
    if stores:
        stays = (settings["keep_store"] or settings["save_every"] is not None) and not settings["lora_rank"]
        kept = stays or run["signal_number"] is not None
        what = "was left there: `memascend inspect` shows it" if kept else "was removed, as the run was complete"
        lines.append(f"its store in {', '.join(stores)} {what}")
    return "\n".join(lines)


def _is_of(record: dict[str, Any], settings: Settings) -> bool:
    """Return whether a record names the places of this run."""
    named, here = [record["out"], *record["store"]], [settings.out, *settings.store]
    return list(map(os.path.abspath, named)) == list(map(os.path.abspath, here))
