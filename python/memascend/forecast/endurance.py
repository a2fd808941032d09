"""Writes of a run to its drives, their share of the rated endurance, and options that would write less.

Drives count bytes and not kinds, so kinds are forecast by the replay and the report puts their sum beside the counted
one. A saving is the same replay with one option changed.

The keys of the result of `endurance` (bytes unless they say otherwise):

- `steps`, the steps counted, and `steps_given`: false where the number is `STEPS`, for want of another.
- `begin_bytes`: the weights, written once when the store is made.
- `step`: written in a step, by kind, and `total_bytes`; see `forecast.report`.
- `total_bytes`: of the beginning and all steps, without the writes to `--out`.
- `rated_bytes`: the writes that one drive is rated for, or null; `busiest_share`, the part (of 1) of the
  store's writes that the drive with the most takes; `rating_used`, the part of the rating that the run writes to that
  drive, or null.
- `savings`: a list of `change`, the options that would write less, each beside the others as they are;
  `budget_bytes`, the host memory that they take, or null where it stays; `step_bytes`, written in a step with them;
  `steps_share`, the part of the steps that as many tokens then take; `saved`, the part of the bytes that is not
  written for as many tokens. The largest comes first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.forecast.report import by_kind
from memascend.forecast.traffic import traffic
from memascend.memory_plan.host import make_plan, smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from memascend.forecast.traffic import Traffic
    from memascend.forecast.workload import Workload
    from memascend.layout.units import Unit
    from memascend.memory_plan.device import DevicePlan
    from memascend.memory_plan.lines import Plan

#: The writes that many drives of 1 TB are rated for, in bytes, for a run whose drives have no known rating.
USUAL_RATING_BYTES = 600 * 10**12
#: Steps that are counted where a run's number of steps is not known.
STEPS = 1000
#: A change that saves less than this part of a step's writes is not worth a line.
_LEAST_SAVED = 0.01
#: A step of so many times the tokens is proposed, up to so many in all: larger ones change more of the training.
MORE_TOKENS, TOKENS_MAX = 8, 1 << 16
#: The durability that is proposed where states stay in memory.
_PERIOD = 16
#: More than any model takes.
_NO_LIMIT = 1 << 62
_MIB = 1 << 20


def endurance(
    moved: Traffic,
    units: Sequence[Unit],
    *,
    steps: int | None = None,
    tbw: float | None = None,
    busiest_share: float = 1.0,
    savings: Iterable[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the writes of a run, as the module's text describes.

    Args:
        moved: the traffic of a step.
        units: of the model.
        steps: of the run; None counts `STEPS`.
        tbw: terabytes (10^12 bytes) of writes that each drive is rated for.
        busiest_share: of the store's bytes, the part on the drive that has the most.
        savings: the result of `savings`.
    """
    begin = sum(unit.stored_nbytes for unit in units)
    counted = STEPS if steps is None else steps
    rated = None if tbw is None else int(tbw * 10**12)
    return {
        "steps": counted,
        "steps_given": steps is not None,
        "begin_bytes": begin,
        "step": by_kind(moved.written),
        **written(begin + counted * moved.written.total(), rated, busiest_share),
        "rated_bytes": rated,
        "busiest_share": round(busiest_share, 4),
        "savings": sorted(savings, key=lambda saving: -saving["saved"]),
    }


def written(total: int, rated: int | None, busiest_share: float) -> dict[str, Any]:
    """Return the writes of a run, and their share of a drive's rating, under the keys of `endurance`."""
    return {"total_bytes": total, "rating_used": None if not rated else total * busiest_share / rated}


def savings(
    model: nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    config: Any,
    work: Workload,
    device_plan: DevicePlan | None = None,
    *,
    with_update: bool = True,
    plans_for: Callable[[Workload], tuple[Plan, DevicePlan] | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the changes that would write less in a step; changes of optimizer and states change results too.

    Arguments as of `traffic`; `with_update` proposes updates in the backward pass too, where a run can have them.
    `plans_for` returns the plans of another step on a device, or None where it does not fit there: without it larger
    batches are proposed on the CPU alone.
    """
    now = traffic(model, units, plan, config, work, device_plan).written.total()
    told: dict[str, int] = {"": now}
    with_update = with_update and work.ranks == 1
    may_slice = not plan.on_device or plans_for is not None
    for change, changed_plan, changed_work in _changes(units, plan, work, with_update, may_slice):
        changed_device = device_plan
        if plans_for is not None and changed_work.tokens != work.tokens:
            plans = plans_for(changed_work)
            if plans is None:
                continue
            changed_plan, changed_device = plans
        share = work.step_tokens / changed_work.step_tokens  # of the steps, for as many tokens
        step_bytes = traffic(model, units, changed_plan, config, changed_work, changed_device).written.total()
        written = int(step_bytes * share)
        # A part of a change that saves as much by itself makes the whole of it superfluous.
        if all(written < told[part] - now * _LEAST_SAVED for part in told if change.startswith(part)):
            told[change] = written
            yield {
                "change": change,
                "budget_bytes": None if changed_plan.budget == plan.budget else changed_plan.budget,
                "step_bytes": step_bytes,
                "steps_share": share,
                "saved": round(1 - written / now, 4),
            }


def _changes(
    units: Sequence[Unit], plan: Plan, work: Workload, with_update: bool, may_slice: bool
) -> Iterator[tuple[str, Plan, Workload]]:
    if work.grad_accum > 1 and may_slice:
        rows, micro = work.batch_size * work.grad_accum, work.micro_batch_size or work.batch_size
        sliced = replace(work, batch_size=rows, grad_accum=1, micro_batch_size=micro)
        yield f"--batch-size {rows} --micro-batch-size {micro} --grad-accum 1", plan, sliced
    if may_slice and work.ranks == 1 and work.step_tokens * MORE_TOKENS <= TOKENS_MAX:
        # Layers take the batch in slices of the present one, so that a step writes little more for more tokens.
        rows, micro = work.batch_size * work.grad_accum * MORE_TOKENS, work.micro_batch_size or work.batch_size
        more = replace(work, batch_size=rows, grad_accum=1, micro_batch_size=micro)
        accum = " --grad-accum 1" if work.grad_accum > 1 else ""
        change = f"--batch-size {rows} --micro-batch-size {micro}{accum} ({MORE_TOKENS} times the tokens a step)"
        yield change, plan, more
    if work.states != "8bit":
        yield "--states 8bit", plan, replace(work, states="8bit")
    if work.states == "float32":
        yield "--states bfloat16", plan, replace(work, states="bfloat16")
    if work.optimizer == "adamw":
        yield "--optimizer apollo", plan, replace(work, optimizer="apollo")
    if with_update and plan.update == "forward" and work.grad_accum == 1:
        options: dict[str, Any] = {"update": "backward", "on_device": plan.on_device, "inputs": plan.inputs}
        least = smallest_plan(units, **options).total
        mib = math.ceil(least / _MIB)
        larger = f" --host-memory {mib}MiB" if plan.budget < least else ""
        early = make_plan(units, mib * _MIB if larger else plan.budget, **options, threads=plan.update_threads)
        yield f"--update backward --max-grad-norm 0{larger} (without clipping)", early, work
    seldom = replace(work, period=_PERIOD)
    may_be_seldom = 0 < work.period < _PERIOD
    if may_be_seldom:
        yield f"--durability every:{_PERIOD}", plan, seldom
    options = {"update": plan.update, "on_device": plan.on_device, "threads": plan.update_threads}
    options["inputs"] = plan.inputs
    most = make_plan(units, _NO_LIMIT, **options).total
    for budget in (2 * plan.total, most):
        if plan.total < budget <= most:
            # Whole MiB, so that the text is a size that --host-memory takes.
            mib = math.ceil(budget / _MIB)
            larger_plan = make_plan(units, mib * _MIB, **options)
            yield f"--host-memory {mib}MiB", larger_plan, work
            if may_be_seldom:
                yield f"--host-memory {mib}MiB --durability every:{_PERIOD}", larger_plan, seldom
