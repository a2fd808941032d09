"""Making a `Runtime`, the native side of a session, and closing it when the interpreter ends."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from memascend._memascend import Runtime, return_large_blocks_to_system
from memascend.machine.drives import notices_of, store_options
from memascend.plan.host import check_available

if TYPE_CHECKING:
    from memascend.plan.host import Plan

#: One directory or raw block device, or several.
StorePaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: Keyword arguments of `Runtime` that a user may set.
OPTIONS = frozenset(
    name
    for name, parameter in inspect.signature(Runtime).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("resume", "in_place", "device")
)

_log = logging.getLogger("memascend")


class StoreHolder(Protocol):
    """An object that holds a store open."""

    def close(self, failed: bool = False, ended: bool = False) -> None:
        """Close the store.

        `failed` says that the run ended with an error, `ended` that the program ends and did not close it.
        """


#: Closed when the interpreter ends, so that no files are left behind.
_open_holders: weakref.WeakSet[StoreHolder] = weakref.WeakSet()
_OWNER_PID = os.getpid()


def warn_of(notice: str) -> None:
    """Log a notice. The record says that it is one, for programs that show the notices of `memascend.stats`."""
    _log.warning("%s", notice, extra={"notice": True})


def store_paths(store: StorePaths) -> list[str | os.PathLike[str]]:
    """Return the locations of a store as a list."""
    return [store] if isinstance(store, str | os.PathLike) else list(store)


def open_runtime(
    plan: Plan,
    store: StorePaths,
    options: dict[str, Any],
    *,
    resume: bool = False,
    in_place: bool = True,
    device: int | None = None,
) -> Runtime:
    """Create the native side of `plan` on the locations of `store`, or open what is there to `resume`.

    Host memory is pinned for the CUDA device with the number `device`. `options` are those in `OPTIONS`.
    """
    _log.info("host memory:\n%s", plan.table())
    check_available(plan)
    return_large_blocks_to_system()
    paths = store_paths(store)
    for notice in notices_of(paths):
        warn_of(notice)
    measured, note = store_options(paths)
    if note:
        _log.info("%s", note)
    if resume:
        # The store keeps the shares with which it was laid out.
        measured = {name: value for name, value in measured.items() if name != "rates"}
    return Runtime(
        paths,
        [(line.consumer, line.nbytes, line.count) for line in plan.buffers],
        [(line.consumer, line.nbytes, line.count) for line in plan.packs],
        plan.staging.nbytes,
        plan.staging.count + plan.kept.count,
        plan.chunk_elements,
        plan.slots.nbytes,
        plan.slots.count,
        resume=resume,
        in_place=in_place,
        device=device,
        **{**measured, **options},
    )


def close_at_exit(holder: StoreHolder) -> None:
    """Have `holder.close(failed, ended=True)` called when the interpreter ends, if it still lives then."""
    _open_holders.add(holder)


@atexit.register
def _close_all() -> None:
    if os.getpid() != _OWNER_PID:
        return  # A forked child has none of the threads that closing waits for.
    crashed = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None
    # Every holder is closed, even if one of them cannot commit its last step.
    with ExitStack() as holders:
        for holder in list(_open_holders):
            holders.callback(holder.close, failed=crashed, ended=True)
