"""The parts that a session is made of: which class each has, on the CPU or a device, in one process or over ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from memascend.autograd.recompute import forget_recomputed
from memascend.common.notices import warn_of
from memascend.common.sizes import format_size
from memascend.errors import MemascendError, PinnedMemoryError
from memascend.gradients.capture import GradientCapture
from memascend.gradients.device_reduce import DeviceReducedGradients
from memascend.gradients.in_backward import UpdatesInBackward
from memascend.gradients.in_backward_device import DeviceUpdatesInBackward
from memascend.gradients.reduce import ReducedGradients
from memascend.memory_plan.host import make_plan
from memascend.memory_plan.lines import Plan
from memascend.streaming.streamer import Streamer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend._memascend import Runtime
    from memascend.common.timeline import Timeline
    from memascend.durability.commits import CommitLog
    from memascend.hardware.cuda import ComputeDevice
    from memascend.layout.units import Unit
    from memascend.options import Tuning
    from memascend.ranks.membership import Membership
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
    commit_log: CommitLog,
    units: Sequence[Unit],
    plan: Plan,
    device: ComputeDevice | None,
    site: Site,
    membership: Membership | None,
    tuning: Tuning,
) -> GradientCapture:
    """Return the capture of the gradients of `units`, which updates weights at once if the plan says so."""
    in_backward = None
    if plan.update == "backward":
        in_backward = _make_updates_in_backward(streamer, commit_log, plan.applied.total, device)
    runtime, timeline = streamer.runtime, streamer.timeline
    capturing = (runtime, streamer, timeline, device, site.in_flight_bytes, in_backward)
    gradients: GradientCapture
    if membership is None:
        gradients = GradientCapture(*capturing)
        gradients.sums.room = site.sums_bytes
    elif device is None:
        gradients = ReducedGradients(membership.ranks, units, *capturing)
    else:
        allocator = tuning.get("allocator", "auto")
        gradients = DeviceReducedGradients(membership.ranks, units, *capturing, allocator=allocator)
    if isinstance(in_backward, DeviceUpdatesInBackward):
        in_backward.hold = gradients.hold
    gradients.made_bytes = site.made_bytes
    return gradients


def _make_updates_in_backward(
    streamer: Streamer, commit_log: CommitLog, in_flight_bytes: int, device: ComputeDevice | None
) -> UpdatesInBackward:
    if device is None:
        return UpdatesInBackward(streamer, commit_log, streamer.timeline, in_flight_bytes)
    return DeviceUpdatesInBackward(streamer, commit_log, streamer.timeline, device)


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
