"""Making a `Runtime`, the native side of a session, and closing it when nothing uses it, or the interpreter ends."""

from __future__ import annotations

import _thread
import atexit
import errno
import gc
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from memascend._memascend import Runtime, keep_large_blocks, return_large_blocks_to_system
from memascend.common.notices import warn_of
from memascend.errors import BudgetError, HostMemoryError, MemascendError, StoreError
from memascend.hardware import waits
from memascend.hardware.drives import notices_of, store_options
from memascend.hardware.gpu import preferred_pinned
from memascend.memory_plan.arena import Arena
from memascend.memory_plan.host import check_available
from memascend.session.refused_stores import in_use_error, kept_error

if TYPE_CHECKING:
    from memascend.memory_plan.lines import Plan
    from memascend.options import StorePaths, Tuning

_log = logging.getLogger("memascend")

_Opened = TypeVar("_Opened")


class StoreHolder(Protocol):
    """An object that holds a store open."""

    runtime: Runtime

    def close(self, failed: bool = False, ended: bool = False) -> None:
        """Close the store.

        `failed` says that the run ended with an error, `ended` that the program ends and did not close it.
        """


#: Closed when the interpreter ends, so that no files are left behind.
_open_holders: weakref.WeakSet[StoreHolder] = weakref.WeakSet()
#: Those that are closed once nothing uses them. The references are strong, so that a holder is whole when it is closed.
_used_holders: set[StoreHolder] = set()
#: Those that nothing uses any more, until `close_unused` closes them, one thread at a time.
_unused_holders: deque[StoreHolder] = deque()
_closing = threading.Lock()


def store_paths(store: StorePaths) -> list[str | os.PathLike[str]]:
    """Return the locations of a store as a list."""
    return [store] if isinstance(store, str | os.PathLike) else list(store)


def open_runtime(
    plan: Plan,
    store: StorePaths,
    tuning: Tuning,
    *,
    resume: bool = False,
    in_place: bool = True,
    replace: bool = False,
    device: int | None = None,
) -> Runtime:
    """Create the native side of `plan` on the locations of `store`, or open a store to `resume`.

    The store of an earlier run is refused, or deleted to `replace` it. Host memory is pinned for the CUDA device with
    the number `device`.
    """
    _log.info("host memory:\n%s", plan.table())
    close_unused()  # Its memory is available, too.
    configure_malloc(plan)
    paths = store_paths(store)
    for notice in notices_of(paths):
        warn_of(notice)
    measured, note = store_options(paths)
    if note:
        _log.info("%s", note)
    if resume:
        # The store keeps the shares with which it was laid out.
        measured = {name: value for name, value in measured.items() if name != "rates"}
    if device is not None and plan.most is None and (preferred := preferred_pinned()) is not None:
        measured["allocator"] = preferred

    def open_now() -> Runtime:
        check_available(plan)
        return Runtime(
            paths,
            Arena.of(plan),
            resume=resume,
            in_place=in_place,
            replace=replace,
            device=device,
            **{"compute_threads": plan.update_threads, **measured, **tuning},
        )

    try:
        return when_free(open_now)
    except StoreError as error:
        if error.errno != errno.EEXIST or resume:
            raise
        raise kept_error(error, paths) from None


def configure_malloc(plan: Plan) -> None:
    """Have malloc give memory back as soon as it can, or keep it, where the budget has room for that."""
    if plan.retain_heap:
        keep_large_blocks()
    else:
        return_large_blocks_to_system()


def when_free(open_store: Callable[[], _Opened]) -> _Opened:
    """Return the result of `open_store`. Unreferenced models of this process are closed before.

    Raises StoreError, with the way to release it, where a model or an optimizer of this process, or another process of
    the same launch, still has the store.
    """
    collected = False
    while True:
        close_unused()
        try:
            return open_store()
        except (StoreError, HostMemoryError, BudgetError) as error:
            if collected or not _any_open() or not _is_lacking(error):
                if isinstance(error, StoreError) and error.errno == errno.EBUSY:
                    raise in_use_error(error, _is_ours(error)) from error
                raise
        # A notebook's cell that runs again, or a function that is tried again with a smaller batch, has left its model
        # to the collector, which may not have run since: with its store, its memory and its space.
        gc.collect()
        collected = True


def _is_lacking(error: MemascendError) -> bool:
    """Return whether a store could not be opened for lack of resources that another model may hold."""
    return not isinstance(error, StoreError) or error.errno == errno.ENOSPC or _is_ours(error)


def _is_ours(error: StoreError) -> bool:
    """Return whether a store could not be opened because this process has it open."""
    if error.errno != errno.EBUSY or error.filename is None:
        return False
    wanted = os.path.realpath(error.filename)
    return any(
        os.path.realpath(volume["path"]) == wanted
        for holder in list(_open_holders)
        if not holder.runtime.closed
        for volume in holder.runtime.stats()["volumes"]
    )


def close_at_exit(holder: StoreHolder) -> None:
    """Have `holder.close(failed, ended=True)` called when the interpreter ends, if it still lives then."""
    _open_holders.add(holder)
    waits.watch(_any_open)


def open_holders() -> list[StoreHolder]:
    """Return the holders of open stores in this process."""
    return [holder for holder in list(_open_holders) if not holder.runtime.closed]


def _any_open() -> bool:
    """Return whether a store is open, for a thread that looks while others open and close them."""
    try:
        return any(not holder.runtime.closed for holder in list(_open_holders))
    except RuntimeError:  # One was opened just now.
        return True


def close_when_unused(holder: StoreHolder) -> None:
    """Keep `holder` whole until it is closed: by `unused`, by `forget`, or when the interpreter ends."""
    _used_holders.add(holder)


def forget(holder: StoreHolder) -> None:
    """Note that `holder` was closed."""
    _used_holders.discard(holder)


def unused(holder: StoreHolder) -> None:
    """Have `holder.close(ended=True)` called soon, if `close_when_unused` was called and it is open still.

    The garbage collector calls this, wherever the program is: in the middle of another model's pass, or of a trace of
    Dynamo's. So the holder is closed in another thread, which has none of this one's modes and contexts.
    """
    if holder not in _used_holders:
        return
    _unused_holders.append(holder)
    with suppress(RuntimeError):  # No thread can start: the next store that opens, or the interpreter's end, closes it.
        # Not threading.Thread: its start takes locks that this very thread may hold.
        _thread.start_new_thread(close_unused, ())


def close_unused(failed: bool = False) -> None:
    """Close the holders that nothing uses any more, and wait for another thread that does so."""
    with _closing:
        while _unused_holders:
            holder = _unused_holders.popleft()
            try:
                holder.close(failed=failed, ended=True)
            except Exception as error:
                _log.warning("the store of a model that nothing refers to any more could not be closed: %s", error)


# PyTorch goes through waiting nodes in the reverse order of their creation: this one comes after all of a program's.
with torch.inference_mode(False), torch.enable_grad():
    _oldest = torch.zeros(1, requires_grad=True).view(1)


@atexit.register
def _drop_waiting_nodes() -> None:
    """Drop the nodes that a failed backward pass has left waiting.

    PyTorch would free them, and the Python hooks that they hold, after the interpreter's end, and crash.
    """
    with suppress(RuntimeError):  # A forked child has no threads of autograd.
        _oldest.backward()


@atexit.register
def _close_all() -> None:
    crashed = getattr(sys, "last_exc", getattr(sys, "last_value", None)) is not None
    close_unused(failed=crashed)
    # Every holder is closed, even if one of them cannot commit its last step.
    with _closing, ExitStack() as holders:
        for holder in list(_open_holders):
            holders.callback(holder.close, failed=crashed, ended=True)


def _forget_all() -> None:
    """Forget every holder: a forked child has none of the threads that closing waits for."""
    global _closing
    _closing = threading.Lock()
    for holders in (_open_holders, _used_holders, _unused_holders):
        holders.clear()


os.register_at_fork(after_in_child=_forget_all)
