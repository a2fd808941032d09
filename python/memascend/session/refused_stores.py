"""The errors of a store that cannot be begun: an earlier run's is there, or another program has it."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING

import torch.distributed as dist

from memascend._memascend import ClosedStore
from memascend.durability.record import parse_record
from memascend.errors import MemascendError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How many checkpoints are named.
_NAMED_MAX = 4


def kept_error(error: StoreError, paths: Sequence[str | os.PathLike[str]]) -> StoreError:
    """Return the error, with a remedy, of a store that is refused since an earlier run's is there."""
    path = error.filename
    return StoreError(
        error.errno,
        f"{path} holds {_described(paths)}: to go on with it, use memascend.resume (of a Trainer: "
        "train(resume_from_checkpoint=True); of the command line: --resume); to delete it and begin anew, give "
        "keep_store='replace' (--replace-store). A run that ends with memascend.close(model), or is opened with "
        "keep_store=False, leaves no store",
        path,
    )


def _described(paths: Sequence[str | os.PathLike[str]]) -> str:
    """Describe the contents of a store, as far as it can be read."""
    try:
        with closing(ClosedStore(list(paths))) as store:
            state, tags = store.state, [tag for tag, *_ in store.snapshots()]
            written = store.report()["written"]
        record = None if state is None else parse_record(state, paths)
    except (MemascendError, KeyError, TypeError):
        return "the store of an earlier run"  # of a part of whose volumes a new one is to be made, or a damaged one
    named = ", ".join(tags[-_NAMED_MAX:]) + (f" and {len(tags) - _NAMED_MAX} more" if len(tags) > _NAMED_MAX else "")
    checkpoints = f"with checkpoint{'s' if len(tags) > 1 else ''} {named}" if tags else ""
    if record is None:
        return " ".join(("the store of an earlier run", checkpoints)).strip()
    model, steps = record["model"]["class"].rpartition(".")[2], record["steps"]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written)) if written else ""
    parts = (f"a run of {model} after step {steps}", f"written {when}" if when else "", checkpoints)
    return ", ".join(part for part in parts if part)


def in_use_error(error: StoreError, ours: bool) -> StoreError:
    """Return the error of a store that is in use: by this very process (`ours`), or by another one."""
    if ours:
        return StoreError(
            error.errno,
            f"{error.filename} is in use by this very process: a model that was offloaded there before, or its "
            "optimizer, still has it. Let go of it with memascend.close(model) before the cell or function "
            "that offloads runs again, or choose another place",
            error.filename,
        )
    processes, rank, path = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "0"), str(error.filename)
    if not processes.isdecimal() or int(processes) < 2 or (dist.is_initialized() and path.endswith(rank)):
        return error
    return StoreError(
        error.errno,
        f"{error}. {processes} processes were launched: to divide one model over them, call "
        "torch.distributed.init_process_group first, and write {rank} for the number of each in the path of its store, "
        f"as in store='{path}{{rank}}'",
        error.filename,
    )
