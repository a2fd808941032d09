"""The parts that a session is made of: which class each has, on the CPU or a device, in one process or over ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from memascend.autograd.recompute import forget_recomputed
from memascend.common.notices import warn_of
from memascend.common.sizes import format_size
from memascend.errors import MemascendError, PinnedMemoryError
from memascend.memory_plan.host import make_plan
from memascend.memory_plan.lines import Plan
from memascend.streaming.streamer import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.durability.commits import CommitLog
    from memascend.gradients.capture import GradientCapture
    from memascend.layout.units import Unit
    from memascend.options import Tuning
    from memascend.ranks.group import Ranks
    from memascend.session.sites import Site
    from memascend.streaming.streamer import Commits

_log = logging.getLogger("memascend")


def open_within_limits(
    plan: Plan, units: Sequence[Unit], open_plan: Callable[[Plan], Runtime], notices: list[str]
) -> tuple[Plan, Runtime]:
    """Return the plan that fits, and its runtime: a smaller plan than `plan` where the system pins less memory.

    Adds a notice if the plan is smaller. Raises PinnedMemoryError if the system pins less than the least plan.
    """
    wanted = plan
    while True:
        try:
            runtime = open_plan(plan)
            break
        except PinnedMemoryError as error:
            if plan.total <= plan.smallest_bytes:
                raise
            half = max(plan.smallest_bytes, plan.total // 2)
            made_for = (plan.update, plan.on_device, plan.update_threads, plan.inputs)
            smaller = make_plan(units, half, plan.budget_max, *made_for, lends=plan.lends)
            _log.info("%s: trying %s", error, format_size(smaller.total))
            plan = smaller
    if plan is not wanted:
        notices.append(
            f"the system pins less host memory than the {format_size(wanted.total)} that were planned: the windows "
            f"are smaller, {format_size(plan.total)} in all (WSL2 pins a part of its memory only; see `memory` in "
            ".wslconfig, or `ulimit -l`)"
        )
        warn_of(notices[-1])
    return plan, runtime


def find_tensors(runtime: Runtime, units: Iterable[Unit], resume: bool) -> None:
    """Number units and tensors in the store: create the tensors, or find them in a store to `resume`."""
    for unit in units:
        unit.index = runtime.units.add_unit()
        if not unit.in_store:
            runtime.units.read_from_files(unit.index, unit.outside)
            continue
        for tensor in unit.tensors:
            if not resume:
                tensor.id = runtime.store.create_tensor(tensor.name, tensor.nbytes)
                continue
            tensor.id = runtime.store.find_tensor(tensor.name)
            if tensor.id is None:
                raise MemascendError(
                    f"the store has no weights of {tensor.name}: it holds another model; give the one that the run was "
                    "begun with"
                )


def make_streamer(
    runtime: Runtime,
    units: Sequence[Unit],
    plan: Plan,
    timeline: Timeline,
    site: Site,
    ranks: Ranks | None,
    commits: Commits,
) -> Streamer:
    """Return the streamer that brings `units` to the memory where the model computes."""
    return Streamer(
        runtime,
        units,
        plan,
        timeline,
        commits=commits,
        forget_recomputed=forget_recomputed,
        compute_in=site.memory(runtime, plan, copies_ahead=ranks is None),
        ranks=ranks,
    )


def make_gradients(
    streamer: Streamer, commit_log: CommitLog, units: Sequence[Unit], plan: Plan, site: Site, ranks: Ranks | None
) -> GradientCapture:
    """Return the capture of the gradients of `units`, which updates weights at once if the plan says so."""
    if ranks is None:
        return site.gradients(streamer, commit_log, plan)
    return site.reduced_gradients(ranks, units, streamer)


def slow_reads(tuning: Tuning, files: Iterable[Any]) -> list[str]:
    """Return a notice where the filesystem of one of the model's `files` costs time."""
    if any(not file.direct for file in files) and tuning.get("direct", True):
        return ["the model's files are read through the page cache: their filesystem refuses O_DIRECT"]
    return []
