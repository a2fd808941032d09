"""`memascend plan --deepspeed`: DeepSpeed's host memory and SSD traffic beside those with memascend behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.forecast.deepspeed.configuration import read_configuration
from memascend.forecast.deepspeed.plan import ComparedLine, decide, table, traffic
from memascend.formats.config import load_bare_config
from memascend.formats.transformers_models import empty_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def forecast(
    model: Path, configuration: Path, *, ranks: int = 1, dtype: str | None = None, passes: int = 1
) -> dict[str, Any]:
    """Return a plan for a model directory (or config.json) and DeepSpeed's JSON file, as a dictionary for JSON.

    `dtype` and `passes`, the backward passes of a step, replace "auto" in that file. Bytes are of one of
    `ranks` processes. The model's parameters count as one parameter group of the optimizer.

    Keys: `model`, `architecture`, `parameters` (of all ranks), `dtype`, `ranks`, `passes`, `sub_groups` (their number);
    `host_memory` and `ssd_traffic` (of a step, read and written), each a list of `consumer`, `deepspeed_bytes`,
    `memascend_bytes`; `host_memory_deepspeed_bytes` and `host_memory_memascend_bytes`, the sums;
    `ssd_deepspeed_bytes_per_parameter` and `ssd_memascend_bytes_per_parameter`; `keeps_gradients`; `notes`.

    Raises:
        DataError: the file cannot be used, or asks for a setup without memascend.
        CheckpointError: the model's configuration cannot be used.
        BudgetError: "host_memory" of "memascend" is too small; the message has the table.
    """
    settings = read_configuration(configuration, ranks=ranks, dtype=dtype, passes=passes)
    config = load_bare_config(model)
    empty = empty_model(config, model if model.is_dir() else model.parent, torch.float32)
    numels = [parameter.numel() for parameter in empty.parameters() if parameter.requires_grad]
    shapes = settings.shapes(numels, ranks)
    decision = decide(shapes, settings.options)
    plan = decision.lines
    moment_itemsize = 2 if settings.options.states == "bfloat16" else 4
    moved = traffic(shapes, decision, moment_itemsize, settings.passes)
    parts = sum(shapes.params)
    return {
        "model": str(model),
        "architecture": type(empty).__name__,
        "parameters": sum(numels),
        "dtype": settings.dtype,
        "ranks": ranks,
        "passes": settings.passes,
        "sub_groups": len(shapes.sub_groups),
        "host_memory": [_as_dict(line) for line in plan],
        "host_memory_deepspeed_bytes": sum(line.stock for line in plan),
        "host_memory_memascend_bytes": sum(line.ours for line in plan),
        "ssd_traffic": [_as_dict(line) for line in moved],
        "ssd_deepspeed_bytes_per_parameter": round(sum(line.stock for line in moved) / parts, 2),
        "ssd_memascend_bytes_per_parameter": round(sum(line.ours for line in moved) / parts, 2),
        "keeps_gradients": decision.keeps_gradients,
        "notes": settings.notes,
    }


def _as_dict(line: ComparedLine) -> dict[str, Any]:
    return {"consumer": line.name, "deepspeed_bytes": line.stock, "memascend_bytes": line.ours}


def as_text(prediction: Mapping[str, Any]) -> str:
    """Write the result of `forecast` as tables."""
    ranks, groups = prediction["ranks"], prediction["sub_groups"]
    return "\n".join(
        [
            f"{prediction['architecture']}, {prediction['parameters']:,} parameters in {prediction['dtype']}, "
            f"{ranks} rank{'s' * (ranks > 1)}, {groups} sub-group{'s' * (groups > 1)}, "
            f"{prediction['passes']} backward pass{'es' * (prediction['passes'] > 1)} a step",
            *(f"note: {note}" for note in prediction["notes"]),
            "",
            table(_lines(prediction["host_memory"])),
            "",
            table(_lines(prediction["ssd_traffic"]), "read from and written to the SSD in a step"),
            f"bytes per parameter: DeepSpeed {prediction['ssd_deepspeed_bytes_per_parameter']:.1f}, "
            f"memascend {prediction['ssd_memascend_bytes_per_parameter']:.1f}",
            *(["each rank holds and moves that much"] if ranks > 1 else []),
        ]
    )


def _lines(described: Sequence[Mapping[str, Any]]) -> list[ComparedLine]:
    return [ComparedLine(line["consumer"], line["deepspeed_bytes"], line["memascend_bytes"]) for line in described]
