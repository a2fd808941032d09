"""Verdicts and tables of the measurements of gpu.py."""

from __future__ import annotations

from collections import Counter

from _common import GB, markdown

# Limits that --check holds the results against
COPY_LIMIT, FLOOR_LIMIT = 0.95, 1.15
#: Peaks beside their plans, least and most. What PyTorch's allocator keeps of freed memory is planned at its most; the
#: driver counts the code of kernels, too.
PLAN_LIMITS = {"device": (-0.3, 0.0), "driver": (-0.3, 0.03), "host": (-0.03, 0.03)}
PEAK_LIMIT, SSD_TIME_LIMIT = 0.53, 1.03


def measured(rows: dict, section: str) -> list[dict]:
    return [row for row in rows.get(section, []) if "failed" not in row]


def checks(rows: dict) -> list[tuple[bool, str]]:
    """Return the limits that --check applies, as far as there are numbers for them."""
    found = []
    for row in measured(rows, "exact"):
        if "losses_equal" in row:
            equal = row["losses_equal"] and row["weights_equal"]
            found.append((equal, f"exact, {row['name']}: losses and weights equal the resident run's bit for bit"))
    for row in measured(rows, "copy"):
        what = f"copy, {row['name']}: {row['ratio']:.3f} of a plain pinned copy, at least {COPY_LIMIT}"
        found.append((row["ratio"] >= COPY_LIMIT, what))
    for row in measured(rows, "plan"):
        for kind, (least, most) in PLAN_LIMITS.items():
            off = row[f"{kind}_off_by"]
            if off is not None:
                what = f"plan, {row['name']}: {kind} peak {off:+.1%} of the plan, {least:+.0%} to {most:+.0%}"
                found.append((least <= off <= most, what))
    for row in measured(rows, "step"):
        if row["of_floor"] is not None:
            what = f"step, {row['name']}: {row['of_floor']:.2f}x the floor ({row['bound_by']}), at most {FLOOR_LIMIT}x"
            found.append((row["of_floor"] <= FLOOR_LIMIT, what))
        found += synchronisations(row)
    return found + activation_checks(measured(rows, "activations"))


def synchronisations(row: dict) -> list[tuple[bool, str]]:
    """Return the waits of a step, except at its end for the loss and the norm, which every loop reads."""
    found = []
    if row.get("synchronising"):
        calls = Counter[str]()
        for phase in ("forward", "backward", "update"):
            calls.update(row["synchronising"][phase])
        where = f" ({', '.join(f'{count} at {place}' for place, count in calls.most_common(3))})" if calls else ""
        what = f"step, {row['name']}: {calls.total()} synchronising calls of PyTorch before the loss is read{where}"
        found.append((not calls, what))
    waits = row["waits_per_step"]
    if waits is not None:
        count = sum(waits[phase] for phase in ("forward", "backward", "update"))
        what = f"step, {row['name']}: memascend's caller waited {count:g} times for the device before the loss is read"
        found.append((count == 0, what))
    return found


def activation_checks(rows: list[dict]) -> list[tuple[bool, str]]:
    found = []
    for tokens in {row["tokens"] for row in rows}:
        by = {row["policy"]: row for row in rows if row["tokens"] == tokens}
        if not {"keep", "ssd", "host"} <= by.keys():
            continue
        name = f"activations, {tokens} tokens"
        if by["keep"]["allocated_bytes"]:
            share = by["ssd"]["allocated_bytes"] / by["keep"]["allocated_bytes"]
            what = f"{name}: peak with ssd {1 - share:.0%} lower than keeping them, at least {1 - PEAK_LIMIT:.0%}"
            found.append((share <= PEAK_LIMIT, what))
        slower = by["ssd"]["step_s"] / by["host"]["step_s"]
        found.append((slower <= SSD_TIME_LIMIT, f"{name}: ssd {slower:.3f}x host's time, at most {SSD_TIME_LIMIT}x"))
    return found


def gib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def yes(value: bool | None) -> str:
    return "" if value is None else ("yes" if value else "NO")


def tables(rows: dict) -> str:
    """Return a table for each section, and the missing measurements."""
    makers = {
        "exact": (["run", "losses", "losses equal", "weights equal"], exact_cells),
        "copy": (["copy", "GB/s", "plain pinned GB/s", "ratio"], copy_cells),
        "plan": (
            ["run", "device plan GiB", "reserved", "off by", "driver off by", "host plan GiB", "held", "off by"],
            plan_cells,
        ),
        "step": (
            [
                "run",
                "step s",
                "floor s",
                "of floor",
                "bound by",
                "idle by compute",
                "by profile",
                "waits",
                "tokens/s",
            ],
            step_cells,
        ),
        "activations": (["run", "peak GiB", "step s"], activation_cells),
        "peers": (["run", "step s", "device GiB", "host GiB", "of memascend's time"], None),
    }
    parts = []
    for section, (header, cells) in makers.items():
        there = measured(rows, section)
        if there:
            by_system = {row["model"]: row["step_s"] for row in there if row.get("system") == "memascend"}
            lines = [[row["name"], *(cells(row) if cells else peer_cells(row, by_system))] for row in there]
            parts.append(f"{section}\n\n{markdown(header, lines)}")
        failed = [f"- {row['name']}: {row['failed']}" for row in rows.get(section, []) if "failed" in row]
        cut = [f"- {row['name']}: cut short: {row['cut_short']}" for row in there if row.get("cut_short")]
        for row in there:
            why = row.get("floor_errors", {})
            cut += [f"- {row['name']}: no floor of {what}" for what in row.get("floors_missing", [])]
            cut += [f"- {row['name']}: {what}: {error}" for what, error in why.items()]
        if failed or cut:
            parts.append("\n".join([f"{section}, not measured or not to the end:", *failed, *cut]))
    return "\n\n".join(parts)


def exact_cells(row: dict) -> list[str]:
    return [str(len(row["losses"])), yes(row.get("losses_equal")), yes(row.get("weights_equal"))]


def copy_cells(row: dict) -> list[str]:
    return [f"{row['memascend'] / GB:.2f}", f"{row['plain'] / GB:.2f}", f"{row['ratio']:.3f}"]


def plan_cells(row: dict) -> list[str]:
    device = [gib(row["device_planned_bytes"]), gib(row["device_reserved_bytes"]), number(row["device_off_by"], "+.1%")]
    host = [gib(row["host_planned_bytes"]), gib(row["host_held_bytes"]), number(row["host_off_by"], "+.1%")]
    return [*device, number(row["driver_off_by"], "+.1%"), *host]


def step_cells(row: dict) -> list[str]:
    waits = row["waits_per_step"]
    return [
        f"{row['step_s']:.3f}",
        number(row["floor_s"], ".3f"),
        number(row["of_floor"], ".2f"),
        row["bound_by"] or "",
        number(row["idle_by_compute"], ".1%"),
        number(row.get("idle_by_profile"), ".1%"),
        "" if waits is None else f"{sum(waits.values()):g}",
        f"{row['tokens_per_s']:,.0f}",
    ]


def activation_cells(row: dict) -> list[str]:
    return [gib(row["allocated_bytes"]), f"{row['step_s']:.3f}"]


def peer_cells(row: dict, ours: dict[str, float]) -> list[str]:
    ratio = f"{row['step_s'] / ours[row['model']]:.2f}x" if row["model"] in ours else ""
    device, host = gib(row["device_reserved_bytes"]), gib(row["host_unavailable_bytes"])
    return [f"{row['step_s']:.3f}", device, host, ratio]
