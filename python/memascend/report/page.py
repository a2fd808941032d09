"""The page of a report: one file of HTML that asks for nothing else, and runs no script but its own.

The page is drawn before it is opened: the script (`report.js`) only shows the values of a step, which are in the page
as text. So the page is complete on paper and without scripts, and thousands of steps stay below a megabyte. Every text
is escaped (`memascend.report.html`), values that are not finite numbers count as missing, and the page's own policy
lets no script run but its own, which is named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import memascend
from memascend.common.outputs import writing
from memascend.errors import OutputError
from memascend.report import sections
from memascend.report.html import escape
from memascend.report.plots import Plot, figure
from memascend.report.run import RunRecords, Values, number, section

#: How every report begins, by which one is known that may be written over.
HEAD = '<!doctype html>\n<html lang="en"><!-- a report of memascend -->\n'


def plots(run: RunRecords) -> Iterator[Plot]:
    """Yield every plot, those without values too."""
    steps, column = run.steps, run.column
    evaluated = [run.evaluations.get(step) for step in steps]
    losses = {"loss": column("loss"), "evaluated": evaluated}
    yield Plot("loss", "Loss", "mean over the tokens of a step", "", steps, losses, zero=False, sparse=("evaluated",))
    yield Plot("lr", "Learning rate", "of the first group of parameters", "", steps, {"learning rate": column("lr")})
    gradient = {"norm": column("grad_norm")}
    yield Plot("norm", "Gradient norm", "before clipping", "", steps, gradient, logarithmic=True)
    speed = {"tokens/s": column("tokens_per_s")}
    yield Plot("speed", "Speed", "tokens of a step over its seconds", "tokens per second", steps, speed)
    waits = "kinds of wait; compute is the remainder"
    yield Plot("time", "Where each step's seconds went", waits, "seconds", steps, run.waited(), stacked=True)
    yield Plot("bytes", "SSD bytes of a step", "by volume", "bytes", steps, _moved(run))
    yield _rates(run)
    memory = {
        "in use after the step": column("host_bytes_in_use"),
        "peak": column("host_bytes_peak"),
        "budget": column("host_bytes_budget"),
    }
    yield Plot(
        "memory",
        "Host memory of memascend",
        "in buffers, against the budget",
        "bytes",
        steps,
        memory,
        bounds=("budget",),
    )
    resident = {"peak": column("peak_rss_bytes")}
    yield Plot("process", "Memory of the process", "resident, with PyTorch and libraries", "bytes", steps, resident)


def _moved(run: RunRecords) -> dict[str, Values]:
    """Return the bytes read and written by volume; of older files, of all volumes together."""
    read, written = run.moved("bytes_read"), run.moved("bytes_written")
    series = {
        f"{path}: {name}": of[path] for path in run.volumes for name, of in (("read", read), ("written", written))
    }
    if any(value is not None for values in series.values() for value in values):
        return series
    together = {name: run.column(f"ssd_bytes_{name}") for name in ("read", "written")}
    return together if any(value for values in together.values() for value in values) else {}


def _rates(run: RunRecords) -> Plot:
    """Return the bytes per second of each busy volume; of older files, of all volumes over the whole step."""
    counters = [run.moved(name) for name in ("bytes_read", "bytes_written", "busy_seconds")]
    series = {path: _over(*(counter[path] for counter in counters)) for path in run.volumes}
    note = "read and written, while the volume had requests"
    if not any(value is not None for values in series.values() for value in values):
        together = [run.column(name) for name in ("ssd_bytes_read", "ssd_bytes_written", "seconds")]
        rates = _over(*together)
        series, note = {"all volumes": rates} if any(rates) else {}, "read and written, over the whole step"
    return Plot("rate", "SSD rate", note, "bytes per second", run.steps, series)


def _over(read: Values, written: Values, seconds: Values) -> Values:
    rows = zip(read, written, seconds, strict=True)
    return [None if r is None or w is None or not s else number((r + w) / s) for r, w, s in rows]


#: Text in place of a plot without values, by its name.
MISSING = {
    "lr": "learning rate",
    "norm": "gradient norm",
    "speed": "tokens/s",
    "time": "where each step's seconds went (a model in memory is not timed)",
    "bytes": "SSD bytes",
    "rate": "SSD rate",
    "memory": "host memory of memascend",
    "process": "memory of the process",
}


def page_of(run: RunRecords, tbw: float | None = None, refresh: int | None = None) -> str:
    """Return the page of a run.

    `tbw` is the rated endurance of each drive in terabytes written; without it, that which the run was given. A browser
    reads the page anew every `refresh` seconds.
    """
    if tbw is None and (given := number(section(run.opening, "settings").get("tbw"))) is not None and given > 0:
        tbw = given
    shown = list(plots(run))
    missing = [MISSING.get(plot.name, plot.title.lower()) for plot in shown if not plot.present]
    if not any(isinstance(record.get("volumes"), list) for record in run.records.values()):
        missing.append("figures of each volume")
    told = "".join(f"<li>{escape(note)}</li>" for note in sections.notes(run, missing))
    plan, machine = "".join(sections.plan_tables(run)), "".join(sections.machine_tables(run))
    wear = sections.wear_table(run, tbw)
    kinds = "".join(made for made in (sections.kinds_table(run), sections.savings_table(run)) if made)
    endurance = "" if tbw else '<p class="faint">With --tbw TB: the share of the drives\' rated endurance.</p>'
    parts = [
        f"<h1>{escape(sections.title(run))}</h1>",
        f'<p class="faint">{escape(sections.course(run))}</p>',
        f'<ul class="notes">{told}</ul>' if told else "",
        sections.tiles(run),
        f'<section class="plots">{"".join(figure(plot) for plot in shown if plot.present)}</section>',
        f"<section><h2>The plan beside the measurements</h2>{plan}</section>" if plan else "",
        f"<section><h2>Ranks</h2>{ranks}</section>" if (ranks := sections.ranks_table(run)) else "",
        f"<section><h2>Drive wear</h2>{wear}{endurance}{kinds}</section>" if wear else "",
        f"<section><h2>Machine and settings</h2>{machine}</section>" if machine else "",
    ]
    return _document(sections.title(run), "\n".join(parts), run, refresh)


def _document(title: str, body: str, run: RunRecords, refresh: int | None) -> str:
    style, script = (files("memascend.report").joinpath(f"report.{kind}").read_text() for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no other script runs, whatever the file of the metrics holds.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    footer = f"{escape(run.path.name)}, shown by memascend {escape(memascend.__version__)}"
    return (
        f'{HEAD}<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"{again}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n"
        f"<body><main>\n{body}\n</main><footer>{footer}</footer>\n<script>{script}</script></body></html>\n"
    )


def write_page(page: str, out: Path) -> None:
    """Write a page to `out`, whole or not at all. An earlier report is replaced.

    Raises OutputError where `out` is something else, or cannot be written.
    """
    with writing(out):
        if os.path.lexists(out) and not (out.is_file() and _is_report(out)):
            raise OutputError(f"--out {out} exists and is no report of memascend: choose another, or move it away")
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        try:
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(page)
                os.fchmod(file.fileno(), 0o644)
            os.replace(name, out)
        except BaseException:
            os.unlink(name)
            raise


def _is_report(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(HEAD)) == HEAD.encode()
