"""The parts of a forecast as dictionaries, ready for JSON.

The keys of a forecast (bytes unless they say otherwise; a mapping by kind has the keys
`weights_bytes`, `master_bytes`, `master_low_bytes`, `exp_avg_bytes`, `exp_avg_sq_bytes`, `momentum_buffer_bytes`,
`moments_bytes`, `gradients_bytes`, `projections_bytes`, `activations_bytes`, `second_slot_bytes`, `kept_bytes`,
`buffers_bytes`):

- `model`: `path`, `model_type`, `architecture`, `dtype`, `dtype_reason` (why it was chosen, or null where it was
  given), `base_bits` (of quantised weights that adapters are trained over, or null), `source` (null unless the
  checkpoint is quantised: its `form`, and `bytes` of its files, null where they are not there; with `--dequantize`
  weights are read from them once), `published` (whether layers are read from them at each use, under adapters),
  `parameters` (tied ones once), `largest_parameter` (elements), `units`: a list of
  `name`, `count`, `repeated`, `nbytes`, `total_bytes`, one for each size.
- `host_memory`: `lines`, a list of `consumer`, `count`, `nbytes`, `total_bytes`, `note`; `total_bytes`, their sum;
  `budget_bytes`; `freed_blocks_bytes`, which the budget leaves to blocks that malloc keeps; `kept_layers`, the calls of
  layers in a pass, of `kept_layers_of`, whose activations the rest of the budget holds, so that they are not computed
  again, and `kept_layers_bytes`, their bytes with malloc's holes, as estimated; `overlap_bytes`, the least
  budget with which the next layer is read while one computes;
  `smallest_bytes`, the least that works; `automatic`, whether the budget is the first of one that follows the machine.
- `ssd_space`: by kind, and `total_bytes`.
- `ssd_traffic`: of an optimizer step. `seq_len`, `batch_size`, `grad_accum`, `micro_batch_size` (null for the whole
  batch), `tile_tokens` (null for none); `planned` with all that the spare budget keeps in memory and `smallest` with
  the least budget, each with `read` and `written` (by kind, and `total_bytes`), `read_bytes_per_parameter`,
  `written_bytes_per_parameter`; `saved_bytes`, the difference.
- `network`, over ranks: the bytes that one rank sends to all others together, and receives, in an optimizer step.
  `ranks`; `weights_bytes`, of weights in each direction; `sent_bytes` and `received_bytes`, lists by rank, gradients
  included; `busiest_bytes`, the most of a rank in a direction. With several ranks, `host_memory`, `ssd_space`,
  `ssd_traffic` and `endurance` are of rank 0; the others have and move no more.
- `step`, over ranks with the rate of the network and without a GPU: as `step_time.step_time` returns it, of the network
  and, where its rate is known, the SSD. Its tokens are of all ranks.
- `endurance`: the writes of a run, as `forecast.endurance` describes.
- `gpu`, with one: `memory_bytes`, its free memory; `activations`; `device_memory`, as `host_memory`; `step`, as
  `step_time.step_time` returns it.
- `pytorch`, without a GPU: an estimate of PyTorch's memory beside the plan. `forward_bytes`, the most in the forward
  pass and the loss; `backward_bytes`, in the backward pass; `projections_bytes`, of APOLLO's projection of a gradient
  there; `calls_bytes`, of autograd's objects for each call of a layer beyond the first, with slices; `libraries_bytes`,
  of the libraries below PyTorch; `estimated_bytes`, the most at once. null where the model's code cannot be run without
  values.
- `whole`: the host memory of the process. `planned_bytes`, `pytorch_bytes` (0 with a GPU, null where not known),
  `interpreter_bytes` (of this command with its libraries), `total_bytes`, their sum; `available_bytes` (that this
  process can have now, and holds) and `bound`, the name of the limit; `fits`.
- `experts`, on the CPU in one process, without tiles and `--base-bits`: null for a model without experts that can be
  read one by one. `whole` and
  `pieces`: `smallest_bytes`, the least host memory; `step_bytes`, read and written by a step within the budget (null
  where it is too small), without one within that least; `is_read_so`, false where pieces would take no less memory,
  so that a run reads experts with their layers. `budget_bytes`, null without one. `better`, the way that moves fewer
  bytes within the budget, or without one has the smaller least.
- `zero_infinity`, with `--compare zero-infinity`: by DeepSpeed's formulas. `slots`, `slot_bytes`,
  `parameter_pool_bytes`, `parameter_pool_waste` (a share of 1), `default_parameter_pool_bytes`,
  `gradient_buffer_bytes`, `optimizer_swap_bytes`, `write_back_bytes`, `peak_bytes` (their sum, without the default
  pool), `peak_pinned_bytes` (with the gradient buffer pinned through PyTorch), `overflow_check_float16_bytes` (not in
  the sum), `ssd_read_bytes`, `ssd_written_bytes`, `ssd_bytes_per_parameter`; `ratio`, `peak_bytes` over
  `host_memory.total_bytes`, and `ratio_to_smallest`, over `host_memory.smallest_bytes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.forecast.kinds import KINDS
from memascend.formats.quantised.forms import form_of
from memascend.formats.weight_files import files_bytes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from memascend.forecast.traffic import Traffic
    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan


def model_part(path: Path, config: Any, model: nn.Module, units: Sequence[Unit], dtype: str) -> dict[str, Any]:
    """Describe the model and its units, grouped by size."""
    sizes: dict[tuple[bool, int], list[Unit]] = {}
    for unit in units:
        sizes.setdefault((unit.repeated, unit.nbytes), []).append(unit)
    return {
        "path": str(path),
        "model_type": config.model_type,
        "architecture": type(model).__name__,
        "dtype": dtype,
        "source": _source_part(path),
        "parameters": _parameters(units),
        "largest_parameter": max(place.numel for unit in units for place in unit.places),
        "units": [
            {
                "name": alike[0].name if len(alike) == 1 else f"{alike[0].name} and {len(alike) - 1} like it",
                "count": len(alike),
                "repeated": repeated,
                "nbytes": nbytes,
                "total_bytes": nbytes * len(alike),
            }
            for (repeated, nbytes), alike in sizes.items()
        ],
    }


def _source_part(path: Path) -> dict[str, Any] | None:
    form = form_of(path)
    if form is None:
        return None
    return {"form": str(form), "bytes": files_bytes(path) if path.is_dir() else None}


def _parameters(units: Sequence[Unit]) -> int:
    """Return the elements of all parameters; tied ones count once."""
    return sum(place.numel for unit in units for place in unit.places)


def memory_part(plan: Plan | DevicePlan) -> dict[str, Any]:
    """Describe a plan of host or device memory, with a line for each consumer."""
    return {
        "lines": [
            {
                "consumer": line.consumer,
                "count": line.count,
                "nbytes": line.nbytes,
                "total_bytes": line.total,
                "note": line.note,
            }
            for line in plan.lines
            if line.total
        ],
        "total_bytes": plan.total,
        "budget_bytes": plan.budget,
        "overlap_bytes": plan.overlap_bytes,
        "smallest_bytes": plan.smallest_bytes,
    }


def by_kind(counts: Counter[str]) -> dict[str, int]:
    """Name the bytes of each of `KINDS`, and their sum."""
    return {f"{kind}_bytes": counts[kind] for kind in KINDS} | {"total_bytes": counts.total()}


def traffic_part(planned: Traffic, smallest: Traffic, units: Sequence[Unit], work: Workload) -> dict[str, Any]:
    """Describe the SSD traffic of an optimizer step, with the planned budget and with the smallest."""
    return {
        "seq_len": work.seq_len,
        "batch_size": work.batch_size,
        "grad_accum": work.grad_accum,
        "micro_batch_size": work.micro_batch_size,
        "tile_tokens": work.tile_tokens,
        "planned": _directions(planned, _parameters(units)),
        "smallest": _directions(smallest, _parameters(units)),
        "saved_bytes": smallest.total - planned.total,
    }


def _directions(moved: Traffic, parameters: int) -> dict[str, Any]:
    return {
        "read": by_kind(moved.read),
        "written": by_kind(moved.written),
        "read_bytes_per_parameter": round(moved.read.total() / parameters, 3),
        "written_bytes_per_parameter": round(moved.written.total() / parameters, 3),
    }
