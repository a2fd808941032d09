"""A forecast as tables of text, one for each part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_decimal, format_figure, format_rating, format_share, format_size
from memascend.forecast.kinds import KINDS
from memascend.forecast.total_memory import MemoryTotal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def as_text(prediction: Mapping[str, Any]) -> str:
    """Return a result of `forecast` as tables."""
    space = prediction["ssd_space"]
    # A state that the optimizer does not keep is not worth a row. Activations are, though there may
    # be none.
    kinds = {kind: label for kind, label in KINDS.items() if space[f"{kind}_bytes"] or kind == "activations"}
    tables = [
        _model_table(prediction["model"], space["weights_bytes"]),
        _memory_table("Host memory", prediction["host_memory"], "least that reads ahead", ", in full chunks"),
        _space_table(space, kinds),
        _traffic_table(prediction["ssd_traffic"], kinds),
        _endurance_table(prediction["endurance"]),
    ]
    if prediction["endurance"]["savings"]:
        tables.append(_savings_table(prediction["endurance"]))
    if "network" in prediction:
        tables.append(_network_table(prediction["network"]))
    if "step" in prediction:
        title = "Time of an optimizer step" + (", without that of computing" if "network" in prediction else ", here")
        tables.append(_step_table(prediction["step"], title))
    if "gpu" in prediction:
        gpu = prediction["gpu"]
        title = f"Device memory, of {format_size(gpu['memory_bytes'])}: the rest is for CUDA's own context and holes"
        tables.append(_memory_table(title, gpu["device_memory"], "least that copies ahead"))
        tables.append(_step_table(gpu["step"]))
    else:
        tables.append(_pytorch_table(prediction["pytorch"]))
    if "curve" in prediction:
        tables.append(curve_text(prediction["curve"]))
    if "zero_infinity" in prediction:
        tables.append(zero_infinity_text(prediction))
    tables.append(_whole_line(prediction["whole"]))
    return "\n\n".join(tables)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align the first column and those called "for" and "from" to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [title]
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column == 0 or header[column] in ("for", "from") else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _model_table(model: Mapping[str, Any], weights_bytes: int) -> str:
    table = _table(
        f"{model['architecture']}, {model['parameters']:,} parameters in {model['dtype']}",
        ["unit", "count", "size", "total"],
        [[unit["name"], *_count_and_sizes(unit)] for unit in model["units"]],
    )
    reason = (model["dtype_reason"] or "").replace("; ", ";\n  ")
    table = f"{table}\n  {reason}" if reason else table
    if model["base_bits"]:
        size = format_size(weights_bytes)
        table += f"\n  linear weights of layers in {model['base_bits']} bits: the SSD has {size} of weights"
    source = model["source"]
    if source is None:
        return table
    size = "" if source["bytes"] is None else f", {format_size(source['bytes'])} of files"
    if model["published"]:
        return (
            f"{table}\n  the checkpoint is in {source['form']}{size}:\n"
            f"  a run needs --dequantize, and reads the layers as they are published: the SSD has "
            f"{format_size(weights_bytes)} of weights"
        )
    return (
        f"{table}\n  the checkpoint is in {source['form']}{size}:\n"
        f"  a run needs --dequantize, which reads it once, into {format_size(weights_bytes)} of weights in the store"
    )


def _memory_table(title: str, plan: Mapping[str, Any], overlap: str, how: str = "") -> str:
    return _table(
        title,
        ["consumer", "count", "size", "total", "for"],
        [
            *([line["consumer"], *_count_and_sizes(line), line["note"]] for line in plan["lines"]),
            ["sum", "", "", format_size(plan["total_bytes"]), ""],
            ["budget", "", "", format_size(plan["budget_bytes"]), _beside_lines(plan)],
            [overlap, "", "", format_size(plan["overlap_bytes"]), f"the next layer while one computes{how}"],
            ["least that works", "", "", format_size(plan["smallest_bytes"]), ""],
        ],
    )


def _beside_lines(plan: Mapping[str, Any]) -> str:
    """Say what the budget is left to beside all consumers."""
    parts = []
    if freed := plan.get("freed_blocks_bytes", 0):
        parts.append(f"{format_size(freed)} of it for blocks that PyTorch frees: malloc keeps them")
    if kept := plan.get("kept_layers", 0):
        count, size = plan["kept_layers_of"], format_size(plan["kept_layers_bytes"])
        parts.append(f"{size} for activations: {kept} of {count} calls of layers are not computed again")
    return "; ".join(parts)


def _count_and_sizes(line: Mapping[str, Any]) -> list[str]:
    return [str(line["count"]), format_size(line["nbytes"]), format_size(line["total_bytes"])]


def _space_table(space: Mapping[str, int], kinds: Mapping[str, str]) -> str:
    rows = [[label, format_size(space[f"{kind}_bytes"])] for kind, label in kinds.items()]
    return _table("SSD space", ["kind", "bytes"], [*rows, ["total", format_size(space["total_bytes"])]])


def _traffic_table(moved: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    columns = [(plan, direction) for plan in ("planned", "smallest") for direction in ("read", "written")]
    rows = [
        [label, *(format_size(moved[plan][direction][f"{kind}_bytes"]) for plan, direction in columns)]
        for kind, label in [*kinds.items(), ("total", "total")]
    ]
    per_parameter = [f"{moved[plan][f'{direction}_bytes_per_parameter']:.2f}" for plan, direction in columns]
    sliced = f", {moved['micro_batch_size']} at a time in each layer" if moved["micro_batch_size"] else ""
    sliced += f", MLPs and norms on tiles ({moved['tile_tokens']})" if moved["tile_tokens"] else ""
    table = _table(
        f"SSD traffic of an optimizer step: {moved['grad_accum']} x {moved['batch_size']} sequences of "
        f"{moved['seq_len']} tokens{sliced}",
        ["kind", "read", "written", "least: read", "written"],
        [*rows, ["bytes per parameter", *per_parameter]],
    )
    return f"{table}\n  beside the least budget, this one saves {format_size(moved['saved_bytes'])} a step"


def _endurance_table(endurance: Mapping[str, Any]) -> str:
    steps, step = endurance["steps"], endurance["step"]
    rows = [["weights, once at the beginning", "", format_decimal(endurance["begin_bytes"])]]
    rows += [
        [label, format_decimal(step[f"{kind}_bytes"]), format_decimal(steps * step[f"{kind}_bytes"])]
        for kind, label in KINDS.items()
        if step[f"{kind}_bytes"]
    ]
    rows.append(["total", format_decimal(step["total_bytes"]), format_decimal(endurance["total_bytes"])])
    given = "" if endurance["steps_given"] else "; --steps N counts the steps of the run"
    table = _table(f"Written by a run of {steps:,} steps{given}", ["kind", "a step", "the run"], rows)
    return f"{table}\n  {_rating(endurance)}"


def _rating(endurance: Mapping[str, Any]) -> str:
    rated, busiest = endurance["rated_bytes"], endurance["busiest_share"]
    if rated is None:
        return "--tbw TB: the share of a drive's rated endurance"
    text = f"{format_share(endurance['rating_used'])} the {format_rating(rated)} that a drive is rated for"
    return text if busiest == 1 else f"{text}; the busiest takes {busiest:.0%} of all that is written"


def _savings_table(endurance: Mapping[str, Any]) -> str:
    steps, begin = endurance["steps"], endurance["begin_bytes"]
    return _table(
        "Options that write less, each by itself; other steps, optimizers and states change results too",
        ["option", "a step", f"{steps:,} steps' tokens", "saved"],
        [
            [
                saving["change"],
                format_decimal(saving["step_bytes"]),
                format_decimal(begin + steps * saving["steps_share"] * saving["step_bytes"]),
                f"{saving['saved']:.0%}",
            ]
            for saving in endurance["savings"]
        ],
    )


def curve_text(points: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of other budgets and their savings."""
    timed = "seconds_at_least" in points[0]
    rows = [
        [
            format_size(point["budget_bytes"]),
            format_size(point["read_bytes"]),
            format_size(point["written_bytes"]),
            f"{point['bytes_per_parameter']:.2f}",
            *([f"{point['seconds_at_least']:.2f}"] if timed else []),
        ]
        for point in points
    ]
    header = ["host memory", "read", "written", "bytes per parameter", *(["seconds at least"] if timed else [])]
    how = (
        ""
        if timed
        else "\n  `memascend bench DIR` measures the drives: --store DIR then adds the seconds that they take"
    )
    return _table("More host memory: SSD traffic of an optimizer step, by the budget", header, rows) + how


def _step_table(step: Mapping[str, Any], title: str = "Time of an optimizer step") -> str:
    rows = []
    for resource in step["resources"]:
        if resource["resource"] == "flops":
            amount = f"{resource['amount'] / 1e12:.1f} TFLOP"
            rate = f"{format_figure(resource['per_second'] / 1e12)} TFLOP/s"
        else:
            amount, rate = format_size(resource["amount"]), f"{resource['per_second'] / 1e9:.2f} GB/s"
        rows.append([resource["name"], amount, rate, f"{resource['seconds']:.2f}", resource["source"]])
    rows.append(["the slowest: all else overlaps", "", "", f"{step['floor_seconds']:.2f}", ""])
    rows.append(["the sum: nothing overlaps", "", "", f"{step['sum_seconds']:.2f}", ""])
    times = "" if step["next"] is None else f": {step['times_the_next']:.1f} times the seconds of {step['next']}"
    return (
        _table(title, ["resource", "amount", "rate", "seconds", "from"], rows)
        + f"\n  bound by {step['bound_by']}{times}; at most {format_figure(step['tokens_per_second_at_most'])} tokens/s"
    )


def _network_table(moved: Mapping[str, Any]) -> str:
    weights, sent, received = (moved[f"{name}_bytes"] for name in ("weights", "sent", "received"))
    rows = [
        ["weights, for forward and backward passes", weights, weights],
        ["gradients, on rank 0", sent[0] - weights, received[0] - weights],
        ["gradients, the most on a rank", max(sent) - weights, max(received) - weights],
        ["total, the most on a rank", max(sent), max(received)],
    ]
    return _table(
        f"Network traffic of an optimizer step, of each of {moved['ranks']} ranks",
        ["bytes", "sent", "received"],
        [[name, format_size(of_sent), format_size(of_received)] for name, of_sent, of_received in rows],
    )


def _whole_line(whole: Mapping[str, Any]) -> str:
    parts = (
        whole[name] for name in ("planned_bytes", "pytorch_bytes", "interpreter_bytes", "available_bytes", "bound")
    )
    return MemoryTotal(*parts).text() + ("" if whole["fits"] else ": it does not fit here")


def _pytorch_table(pytorch: Mapping[str, int] | None) -> str:
    if pytorch is None:
        return "On top: PyTorch's memory, which is not known: the model's code cannot be run without values"
    projections, calls = pytorch["projections_bytes"], pytorch["calls_bytes"]
    return _table(
        "On top: PyTorch's memory (an estimate, from a run of the model's code without values)",
        ["part", "bytes"],
        [
            ["forward pass and loss", format_size(pytorch["forward_bytes"])],
            ["backward pass", format_size(pytorch["backward_bytes"])],
            *([["projections of APOLLO", format_size(projections)]] if projections else []),
            *([["calls of layers with slices", format_size(calls)]] if calls else []),
            ["libraries below PyTorch", format_size(pytorch["libraries_bytes"])],
            ["the most at once", format_size(pytorch["estimated_bytes"])],
        ],
    )


def zero_infinity_text(prediction: Mapping[str, Any]) -> str:
    """Return a table of ZeRO-Infinity's host memory beside the plan's."""
    zero, size = prediction["zero_infinity"], format_size
    planned = prediction["ssd_traffic"]["planned"]
    ours_per_parameter = planned["read_bytes_per_parameter"] + planned["written_bytes_per_parameter"]
    return (
        _table(
            "Beside it: ZeRO-Infinity's host memory, by DeepSpeed's formulas",
            ["part", "bytes"],
            [
                [f"parameter pool: {zero['slots']} x {size(zero['slot_bytes'])}", size(zero["parameter_pool_bytes"])],
                ["flat gradient buffer", size(zero["gradient_buffer_bytes"])],
                ["optimizer swap buffers", size(zero["optimizer_swap_bytes"])],
                ["weights on their way back", size(zero["write_back_bytes"])],
                ["sum", size(zero["peak_bytes"])],
                ["sum, the gradients pinned by PyTorch", size(zero["peak_pinned_bytes"])],
                ["memascend's, as above", size(prediction["host_memory"]["total_bytes"])],
                ["ratio of the sum to it", f"{zero['ratio']:.1f}"],
                ["ratio to the least that works", f"{zero['ratio_to_smallest']:.1f}"],
                ["SSD bytes per parameter and step", f"{zero['ssd_bytes_per_parameter']:.1f}"],
                ["memascend's", f"{ours_per_parameter:.1f}"],
            ],
        )
        + f"\n  {zero['parameter_pool_waste']:.0%} of the parameter pool is empty with its parameters in flight"
    )
