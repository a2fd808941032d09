"""The parts that a session is made of: which class each has, on the CPU or a device, in one process or over ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import format_size
from memascend.errors import MemascendError, PinnedMemoryError
from memascend.offloading.activations import forget_recomputed
from memascend.offloading.downloads import DownloadedGradients
from memascend.offloading.early import EarlyUpdates
from memascend.offloading.early_device import EarlyUpdatesOnDevice
from memascend.offloading.gradients import GradientCapture
from memascend.offloading.joining import JoinedGradients
from memascend.offloading.native import warn_of
from memascend.plan.host import make_plan
from memascend.plan.lines import Plan
from memascend.residency.host import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.durable.generations import Generations
    from memascend.layout.units import Unit
    from memascend.machine.cuda import ComputeDevice
    from memascend.offloading.sites import Site
    from memascend.options import Tuning
    from memascend.ranks.membership import Membership
    from memascend.residency.host import Commits

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
            most = None if plan.most is None else plan.most.budget
            half = max(plan.smallest_bytes, plan.total // 2)
            made_for = (plan.update, plan.on_device, plan.update_threads, plan.inputs)
            smaller = make_plan(units, half, most, *made_for)
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
                raise MemascendError(f"the store has no weights of {tensor.name}")


def make_streamer(
    runtime: Runtime,
    units: Sequence[Unit],
    plan: Plan,
    timeline: Timeline,
    site: Site,
    membership: Membership | None,
    commits: Commits,
) -> Streamer:
    """Return the streamer that brings `units` to the memory where the model computes."""
    ranks = None if membership is None else membership.ranks
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
    streamer: Streamer,
    generations: Generations,
    units: Sequence[Unit],
    plan: Plan,
    device: ComputeDevice | None,
    site: Site,
    membership: Membership | None,
    tuning: Tuning,
) -> GradientCapture:
    """Return the capture of the gradients of `units`, which updates weights at once if the plan says so."""
    early = None
    if plan.update == "backward":
        early = _make_early(streamer, generations, plan.applied.total, device)
    runtime, timeline = streamer.runtime, streamer.timeline
    capturing = (runtime, streamer, timeline, device, site.in_flight_bytes, early)
    gradients: GradientCapture
    if membership is None:
        gradients = GradientCapture(*capturing)
        gradients.sums.room = site.sums_bytes
    elif device is None:
        gradients = JoinedGradients(membership.ranks, units, *capturing)
    else:
        allocator = tuning.get("allocator", "auto")
        gradients = DownloadedGradients(membership.ranks, units, *capturing, allocator=allocator)
    if isinstance(early, EarlyUpdatesOnDevice):
        early.hold = gradients.hold
    gradients.made_bytes = site.made_bytes
    return gradients


def _make_early(
    streamer: Streamer, generations: Generations, in_flight_bytes: int, device: ComputeDevice | None
) -> EarlyUpdates:
    if device is None:
        return EarlyUpdates(streamer, generations, streamer.timeline, in_flight_bytes)
    return EarlyUpdatesOnDevice(streamer, generations, streamer.timeline, device)


def slow_tuning(tuning: Tuning, device: ComputeDevice | None, files: Iterable[Any]) -> list[str]:
    """Return a notice for each entry of `tuning`, and each filesystem of the model's `files`, that costs time."""
    notices = []
    if device is not None and tuning.get("allocator") in ("locked", "pageable"):
        notices.append(
            f"allocator={tuning['allocator']!r}: every copy to the device and back stops the program until it is "
            "done, which pinned memory ('auto', 'cuda', 'registered') spares"
        )
    if any(not file.direct for file in files) and tuning.get("direct", True):
        notices.append("the model's files are read through the page cache: their filesystem refuses O_DIRECT")
    return notices
