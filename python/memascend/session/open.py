"""Opening a session: the steps that `memascend.offload`, `from_pretrained` and `resume` share, in their order."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.common.sizes import AUTO
from memascend.hardware.threads import update_threads
from memascend.memory_plan.auto_budget import plan_for
from memascend.options import OffloadOptions
from memascend.ranks.group import Ranks
from memascend.ranks.locations import paths_of
from memascend.ranks.membership import ONE_PROCESS, Membership, OneProcess
from memascend.session import rank_checks
from memascend.session.compute import ComputeOptions
from memascend.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from memascend.layout.units import Unit


@contextmanager
def opening(
    function: Callable[..., Any], keywords: dict[str, Any], frozen: str | None = None
) -> Iterator[tuple[OffloadOptions, Ranks | None]]:
    """Enclose a public function that opens a store, and give its options and the ranks that the store is divided over.

    The other ranks are told of an error, here and in the enclosed block.

    Args:
        function: the public function.
        keywords: its local variables, before it has others; see `OffloadOptions.of`.
        frozen: as in `memascend.from_pretrained`.

    Raises TypeError for an option that the function does not have, ValueError for a value that an option does not have,
    MemascendError for an option that cannot be had over ranks.
    """
    ranks = Ranks.of(keywords["process_group"])
    with rank_checks.synchronise_errors(ranks):
        options = OffloadOptions.of(function, keywords)
        options = replace(options, store=paths_of(options.store, options.process_group))
        yield (options if ranks is None else rank_checks.settle(options, frozen)), ranks


def open_session(
    model: nn.Module,
    options: OffloadOptions,
    ranks: Ranks | None,
    units_of: Callable[[ComputeOptions], list[Unit]],
    source: Callable[[], dict[str, Any]],
    *,
    tag: str | None = None,
    resumes: dict[str, Any] | None = None,
) -> Session:
    """Open the device, divide the model into units, plan the memory, and open the store of a session.

    Args:
        model: the model to offload, with parameters of the shapes and dtypes that the store has.
        options: the options, with the locations of this rank as `store`.
        ranks: over which the store is divided, if it is.
        units_of: called once the device is open; returns the model's units, or this rank's shares of them.
        source: called once the model has its units; returns the description that makes it again.
        tag: the checkpoint in a store to resume.
        resumes: the record of the run to go on with; None begins one.

    Raises BudgetError, DeviceError, StoreError and ValueError as `memascend.offload` does.
    """
    computing = ComputeOptions.of(options)
    if ranks is not None:
        rank_checks.compare_devices(ranks, computing)
    units = units_of(computing)
    threads = update_threads(computing.uploads, options.tuning.get("compute_threads"))
    plan, automatic = plan_for(
        units,
        options.host_memory,
        options.host_memory_max,
        options.update,
        computing.uploads,
        threads,
        computing.inputs(units, getattr(model, "config", None)),
        lends=computing.lends(options.host_memory == AUTO, ranks is not None),
    )
    if ranks is None:
        membership: Membership | OneProcess = ONE_PROCESS
    else:
        membership = rank_checks.begin_run(ranks) if resumes is None else Membership(ranks, resumes["ranks"]["run"])
    return Session(
        model,
        units,
        plan,
        computing,
        source(),
        automatic=automatic,
        resume=resumes is not None,
        tag=tag,
        membership=membership,
    )
