"""A forecast in three lines: whether the run fits, how long a step takes here, and the needs of the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_decimal, format_figure, format_rating, format_share, format_size
from memascend.forecast.endurance import USUAL_RATING_BYTES
from memascend.forecast.experts import as_line

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Changes that are named.
LEVERS = 3
#: Units of a run's time with their seconds, and how many seconds the least time that is told in them has.
UNITS = (("days", 86400, 360000), ("h", 3600, 3600), ("min", 60, 60), ("s", 1, 0))


def headline(prediction: Mapping[str, Any], free_bytes: int | None = None) -> list[str]:
    """Return the lines on a result of `forecast`; `free_bytes` is the free space on the store's drives."""
    lines = [_fit(prediction, free_bytes), _step(prediction), _run(prediction)]
    if (memory := prediction["host_memory"])["automatic"]:
        lines.append(
            f"--host-memory auto would begin with {format_size(memory['budget_bytes'])} on this machine now, and then "
            "follow its free memory"
        )
    if (compared := prediction.get("experts")) is not None:
        lines.append(as_line(compared))
    room = prediction["whole"]["available_bytes"]
    possible = [lever for lever in prediction["endurance"]["savings"] if (lever["budget_bytes"] or 0) <= room]
    if possible:
        lines.append("largest levers, by the share of the bytes written per token that they save:")
        lines += [f"  {lever['saved']:.0%}  {lever['change']}" for lever in possible[:LEVERS]]
    return lines


def _fit(prediction: Mapping[str, Any], free_bytes: int | None) -> str:
    whole, space = prediction["whole"], prediction["ssd_space"]
    taken = f"{format_size(whole['total_bytes'])} of {format_size(whole['available_bytes'])} host memory"
    if whole["pytorch_bytes"] is None:
        taken += " (without PyTorch's, which is not known)"
    if "gpu" in prediction:
        gpu = prediction["gpu"]
        held = gpu["device_memory"]["total_bytes"]
        taken += f", {format_size(held)} of {format_size(gpu['memory_bytes'])} device memory"
    total = space["total_bytes"]
    taken += f", {format_size(total)} of SSD" + ("" if free_bytes is None else f" ({format_size(free_bytes)} free)")
    if not whole["fits"]:
        change = prediction.get("fits_with") or "a machine with more memory, or a smaller model"
        return f"does not fit: {taken}. It would with {change}"
    if free_bytes is None or total <= free_bytes:
        return f"fits: {taken}"
    in_place = total - space["second_slot_bytes"] - space["kept_bytes"]
    if in_place <= free_bytes and not space["kept_bytes"]:
        return f"fits without durable steps (--durability none): {taken}"
    saving = {lever["change"] for lever in prediction["endurance"]["savings"]}
    options = [  # Without those in use.
        *(["--states 8bit"] if "--states 8bit" in saving else []),
        *(["--durability none"] if space["second_slot_bytes"] else []),
        *(["--lora-rank 16"] if space["moments_bytes"] else []),
    ]
    less = f"Options that take less: {', '.join(options)}" if options else "Another --store or a smaller model would"
    return f"does not fit: {taken}. {less}"


def _seconds(step: Mapping[str, Any]) -> str:
    return f"{_range(step['floor_seconds'], step['sum_seconds'])} s"


def _range(best: float, worst: float) -> str:
    """Write both figures, the lower one first; the best alone where they differ by less than a twentieth."""
    low, high = sorted((best, worst))
    return format_figure(best) if high < 1.05 * low else f"{format_figure(low)} to {format_figure(high)}"


def _step(prediction: Mapping[str, Any]) -> str:
    moved = prediction["ssd_traffic"]
    tokens = moved["seq_len"] * moved["batch_size"] * moved["grad_accum"]
    if "gpu" in prediction:
        step, where = prediction["gpu"]["step"], "with this GPU"
    elif "step" in prediction:
        step = prediction["step"]
        where = "without computing" if "network" in prediction else "on this machine's processor"
    else:
        why = "give --network for its time" if "network" in prediction else "its time is not known for this model"
        return f"a step of {tokens:,} tokens: {why}"
    rate = f"{_range(tokens / step['floor_seconds'], tokens / step['sum_seconds'])} tokens/s"
    text = f"a step of {tokens:,} tokens: {_seconds(step)} {where}, {rate}; bound by {step['bound_by']}"
    if not any(resource["resource"] == "ssd" for resource in step["resources"]):
        text += "; drives not counted (`memascend bench DIR` measures them, --store DIR names them)"
    return text


def _run(prediction: Mapping[str, Any]) -> str:
    endurance, data = prediction["endurance"], prediction.get("data")
    steps = endurance["steps"]
    what = f"{steps:,} steps"
    if data is not None:
        what = f"your data, {data['about']}{data['tokens']:,} tokens: {what}"
    step = prediction["gpu"]["step"] if "gpu" in prediction else prediction.get("step")
    time = "" if step is None else f"{_time(steps * step['floor_seconds'], steps * step['sum_seconds'])}, "
    text = f"{what}: {time}{format_decimal(endurance['total_bytes'])} written"
    if endurance["rating_used"] is not None:
        return f"{text}, {format_share(endurance['rating_used'])} its rated {format_rating(endurance['rated_bytes'])}"
    usual = format_share(endurance["total_bytes"] / USUAL_RATING_BYTES)
    text += f", {usual} a drive rated for {format_rating(USUAL_RATING_BYTES)} (--tbw TB for yours)"
    return text if data is not None or endurance["steps_given"] else f"{text}; --data PATH counts your data"


def _time(least: float, most: float) -> str:
    unit, size = next((unit, size) for unit, size, begin in UNITS if least >= begin)
    return f"{_range(least / size, most / size)} {unit}"
