"""The texts and tables of a report: how the run ended, the plan beside the measurements, wear, the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from memascend.common.sizes import format_decimal, format_size
from memascend.forecast.kinds import KINDS
from memascend.report.html import Markup, escape, table
from memascend.report.run import RunRecords, Values, number, section
from memascend.report.scales import shown

DAY_SECONDS = 86_400
#: Settings whose values are told elsewhere, or that only say where things lie.
_SETTINGS_LEFT_OUT = frozenset({"data", "data_paths", "metrics", "temporary", "model_dir", "out", "store"})
_NOTHING = "–"
#: Figures of a rank: those to sum, and those to take the maximum of.
_MOVED, _PEAKS = ("ssd_bytes_read", "ssd_bytes_written", "network_bytes_sent"), ("host_bytes_peak", "peak_rss_bytes")


def _total(values: Values) -> float:
    return sum(value for value in values if value is not None)


def _median(values: Values) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _size(value: Any) -> str:
    nbytes = number(value)
    return _NOTHING if nbytes is None else format_size(nbytes)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _moment(value: Any) -> str | None:
    seconds = number(value)
    try:
        return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return None


def _scrolled(made: Markup) -> Markup:
    """Return a table that scrolls by itself where it is wider than the screen; the keyboard reaches it."""
    return Markup(f'<div class="scroll" tabindex="0">{made}</div>')


# ---- the beginning of the page ----------------------------------------------------------------------------------


def title(run: RunRecords) -> str:
    """Name the run by the model that it trains."""
    model = section(run.opening, "settings").get("model_dir")
    return f"Fine-tuning of {PurePath(model).name}" if isinstance(model, str) else "A run of memascend"


def course(run: RunRecords) -> str:
    """Say in a line when the run began and how far it came."""
    last, planned = max(run.records), number(run.opening.get("steps"))
    told = [f"step {last:,}" if planned is None else f"step {last:,} of {planned:,.0f}"]
    if began := _moment(run.openings[0].get("time")) if run.openings else None:
        told.append(f"begun {began}")
    if len(run.openings) > 1:
        told.append(f"resumed {len(run.openings) - 1} times" if len(run.openings) > 2 else "resumed once")
    if not run.end:
        told.append("not ended, or ended without a word")
    elif ended := _moment(run.end.get("time")):
        told.append(f"ended {ended}")
    return "; ".join(told)


def notes(run: RunRecords, missing: list[str]) -> Iterator[str]:
    """Return notices about the figures for the reader."""
    if missing:
        yield f"Not recorded in this file, and left out: {', '.join(missing)}."
    skipped = sum(record.get("skipped") is True for record in run.records.values())
    if skipped:
        steps = "One step was" if skipped == 1 else f"{skipped:,} steps were"
        yield f"{steps} skipped, because loss or gradient was not finite."
    if run.unreadable:
        lines = "One line of the file holds" if run.unreadable == 1 else f"{run.unreadable:,} lines of the file hold"
        yield f"{lines} no record, and {'was' if run.unreadable == 1 else 'were'} left out."
    told = [section(record, "store").get("notices") for record in (*run.openings, run.end)]
    notices = [notice for part in told if isinstance(part, list) for notice in part if isinstance(notice, str)]
    yield from list(dict.fromkeys(notices))[:20]


def tiles(run: RunRecords) -> Markup:
    """Return the figures that come first."""
    losses, peaks, resident = (
        [value for value in run.column(name) if value is not None]
        for name in ("loss", "host_bytes_peak", "peak_rss_bytes")
    )
    evaluations = list(run.evaluations.values())
    seconds = run.column("seconds")
    read, written, tokens = (_total(run.column(name)) for name in ("ssd_bytes_read", "ssd_bytes_written", "tokens"))
    entries = {
        "parameters": _shown_by(lambda count: f"{count / 1e6:,.1f} M", number(run.opening.get("parameters"))),
        "loss, first to last": f"{shown(losses[0])} → {shown(losses[-1])}" if losses else None,
        "evaluated loss, last": shown(evaluations[-1]) if evaluations else None,
        "time of all steps": _duration(_total(seconds)),
        "tokens": _shown_by("{:,.0f}".format, tokens or None),
        "tokens/s, median": _shown_by(shown, _median(run.column("tokens_per_s"))),
        "seconds a step, median": _shown_by(shown, _median(seconds)),
        "SSD read": _shown_by(format_size, read or None),
        "SSD written": _shown_by(format_size, written or None),
        "host memory of memascend, peak": _shown_by(format_size, max(peaks, default=None)),
        "process, peak": _shown_by(format_size, max(resident, default=None)),
    }
    there = ((name, value) for name, value in entries.items() if value is not None)
    each = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in there)
    return Markup(f'<dl class="tiles">{"".join(each)}</dl>')


def _shown_by(text_of: Callable[[Any], str], value: Any) -> str | None:
    """Return the text of a figure; None where there is none."""
    return None if value is None else text_of(value)


# ---- the plan beside the measurements ---------------------------------------------------------------------------


def plan_tables(run: RunRecords) -> Iterator[Markup]:
    """Return tables of planned or expected values beside measured ones."""
    rows = list(_expected(run))
    if rows:
        yield _scrolled(table("The whole run", ("", "planned", "measured", "measured of planned"), rows))
    for name, heading in (("host", "Host memory, by consumer"), ("device", "Device memory, by consumer")):
        lines = section(run.opening, "plan", name).get("lines")
        if isinstance(lines, list) and lines:
            measured = _measured_by_size(run) if name == "host" else {}
            header = ("consumer", "buffers", "planned", "in use at the peak", "purpose")
            yield _scrolled(table(heading, header, _consumers(lines, measured)))


def _expected(run: RunRecords) -> Iterator[tuple[str, ...]]:
    forecast, plan = section(run.opening, "forecast"), section(run.opening, "plan", "host")
    planned = plan.get("total_bytes", section(run.opening, "store").get("host_bytes_planned"))
    pairs = {
        "memory of memascend": (planned, _most(run.column("host_bytes_peak"))),
        "memory of the process": (
            section(forecast, "host_memory").get("total_bytes"),
            _most(run.column("peak_rss_bytes")),
        ),
        "SSD read in a step": (forecast.get("ssd_bytes_read"), _median(run.column("ssd_bytes_read"))),
        "SSD written in a step": (forecast.get("ssd_bytes_written"), _median(run.column("ssd_bytes_written"))),
    }
    for name, (expected, measured) in pairs.items():
        expected = number(expected)
        if expected is not None:
            share = _NOTHING if not expected or measured is None else f"{measured / expected:.0%}"
            yield name, _size(expected), _size(measured), share


def _most(values: Values) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _measured_by_size(run: RunRecords) -> dict[float, float]:
    """Return the bytes in use at the peak, by the size of a buffer."""
    classes = section(run.end, "store").get("host_classes_at_peak")
    found: dict[float, float] = {}
    for entry in classes if isinstance(classes, list) else ():
        nbytes, _, live = (
            [number(value) for value in entry] if isinstance(entry, list) and len(entry) == 3 else [None] * 3
        )
        if nbytes is not None and live is not None:
            found[nbytes] = found.get(nbytes, 0.0) + live
    return found


def _consumers(lines: list[Any], measured: Mapping[float, float]) -> Iterator[tuple[str, ...]]:
    """Return a row for each consumer. Consumers whose buffers have one size share them: the first row has their sum."""
    told: set[float] = set()
    for line in lines:
        count, total = number(section(line).get("count")), number(section(line).get("total_bytes"))
        if count is None or total is None or count <= 0:
            continue
        size = total / count
        live = "with those above" if size in told and size in measured else _size(measured.get(size))
        told.add(size)
        yield (
            str(line.get("consumer")),
            f"{count:,.0f} × {_size(line.get('nbytes'))}",
            _size(total),
            live,
            str(line.get("note", "")),
        )


# ---- drives -----------------------------------------------------------------------------------------------------


def ranks_table(run: RunRecords) -> Markup | None:
    """Return the figures of each rank in the recorded steps, or None for a run of one process."""
    rows = []
    for rank, of in enumerate(run.of_ranks()):
        seconds = _total(of["seconds"])
        speed = _total(of["tokens"]) / seconds if seconds else None
        median = _median(of["seconds"])
        peaks = (max((value for value in of[name] if value is not None), default=None) for name in _PEAKS)
        rows.append(
            (
                str(rank),
                *(_NOTHING if value is None else shown(value) for value in (median, speed)),
                *(format_decimal(_total(of[name])) for name in _MOVED),
                *map(_size, peaks),
            )
        )
    header = ("rank", "seconds a step, median", "tokens/s", "SSD read", "SSD written", "sent", "host memory, peak")
    return _scrolled(table("Each rank", (*header, "process, peak"), rows)) if rows else None


def wear_table(run: RunRecords, tbw: float | None) -> Markup | None:
    """Return the bytes written to each drive, and their share of its rated endurance, or None.

    `tbw` is the terabytes that each drive is rated to be written in its life.
    """
    written = {path: _total(values) for path, values in run.moved("bytes_written").items()}
    if not any(written.values()):
        total = _total(run.column("ssd_bytes_written"))
        written = {"all volumes": total} if total else {}
    seconds = _total(run.column("seconds"))
    if not written or not seconds:
        return None
    header = ["volume", "written", "a step", "a day of training"]
    if tbw:
        header += ["of the rated endurance", "days of training to the rated endurance"]
    rows = []
    for path, nbytes in written.items():
        daily = nbytes / seconds * DAY_SECONDS
        row = [path, *map(format_decimal, (nbytes, nbytes / len(run.records), daily))]
        if tbw:
            days = f"{tbw * 1e12 / daily:,.0f}" if daily else _NOTHING
            row += [f"{shown(nbytes / (tbw * 1e10))}% of {tbw:,g} TB", days]
        rows.append(row)
    return _scrolled(table("Written by this run", header, rows))


def kinds_table(run: RunRecords) -> Markup | None:
    """Return the writes of the recorded steps by kind, as forecast, beside their measured sum, or None.

    Drives count bytes, not kinds: only the sum is measured.
    """
    step, steps = section(run.opening, "forecast", "endurance", "step"), len(run.records)
    rows = []
    for kind, label in KINDS.items():
        nbytes = number(step.get(f"{kind}_bytes"))
        if nbytes:
            rows.append((label, format_decimal(nbytes), format_decimal(nbytes * steps), _NOTHING))
    total, measured = number(step.get("total_bytes")), run.column("ssd_bytes_written")
    if total is None or not rows:
        return None
    median = _median(measured)
    told = _NOTHING if median is None else f"{format_decimal(_total(measured))}, {format_decimal(median)} a step"
    rows.append(("all of them", format_decimal(total), format_decimal(total * steps), told))
    header = ("kind", "forecast, a step", f"forecast, {steps:,} steps", "measured")
    return _scrolled(table("Written by kind", header, rows))


def savings_table(run: RunRecords) -> Markup | None:
    """Return the options that would write less, as forecast when the run began, or None."""
    savings = section(run.opening, "forecast", "endurance").get("savings")
    rows = []
    for saving in savings if isinstance(savings, list) else ():
        step_bytes, saved = (number(section(saving).get(name)) for name in ("step_bytes", "saved"))
        if step_bytes is not None and saved is not None:
            rows.append((str(saving.get("change"))[:200], format_decimal(step_bytes), f"{saved:.0%}"))
    caption = "Options that would write less, each by itself; other optimizers and states change results too"
    return _scrolled(table(caption, ("option", "forecast, a step", "saved"), rows)) if rows else None


# ---- the machine ------------------------------------------------------------------------------------------------


def machine_tables(run: RunRecords) -> Iterator[Markup]:
    """Return tables of the machine, the store and the settings."""
    machine, store = section(run.opening, "machine"), section(run.opening, "store")
    rows = [(name, _size(value) if name == "memory_bytes" else str(value)) for name, value in machine.items()]
    names = {"engine": "I/O engine", "direct_io": "direct I/O", "host_allocator": "host memory"}
    rows += [(names[name], str(store[name])) for name in names if name in store]
    rows += [("volume", path) for path in run.volumes]
    if rows:
        yield _scrolled(table("Machine", (), [(name.replace("_bytes", ""), value) for name, value in rows]))
    settings = section(run.opening, "settings")
    chosen = [(name, _setting(name, value)) for name, value in settings.items() if name not in _SETTINGS_LEFT_OUT]
    if chosen:
        data = ("tokens", "blocks")
        chosen += [(f"{name} of data", f"{run.opening[name]}") for name in data if name in run.opening]
        yield _scrolled(table("Settings", (), chosen))


def _setting(name: str, value: Any) -> str:
    if name.endswith("_memory") and number(value) is not None and not isinstance(value, bool):
        return format_size(value)
    return _NOTHING if value is None else str(value)[:200]
