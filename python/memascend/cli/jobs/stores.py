"""`memascend inspect`, `verify` and `checkpoints`: without PyTorch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memascend.cli.ended import ended_run, ended_text
from memascend.cli.errors import BAD_INPUT, FAILED, tell
from memascend.cli.tables import savings_text
from memascend.common.sizes import format_size
from memascend.errors import StoreError
from memascend.recovery import inspect as runs

if TYPE_CHECKING:
    import argparse


def inspect(chosen: argparse.Namespace) -> int:
    """Show the contents of a store, or how the run ended that wrote a directory."""
    run = ended_run(chosen.store[0]) if len(chosen.store) == 1 else None
    if run is not None:
        print(json.dumps(run, indent=2) if chosen.json else ended_text(chosen.store[0], run))
        return 0
    try:
        contents = runs.inspect(chosen.store, tbw=chosen.tbw)
    except StoreError as error:
        may_have_ended = ("it does not exist", "it is empty", "none was ever committed there")
        path = chosen.store[0]
        if not str(error).startswith(tuple(f"{path} holds no store that was kept: {why}" for why in may_have_ended)):
            raise
        raise StoreError(
            error.errno,
            f"{error}; a run that has finished removes its store unless --keep-store is given: `memascend inspect OUT` "
            "says what it wrote",
            error.filename,
        ) from None
    if chosen.savings:
        from memascend.cli.console import quiet_libraries
        from memascend.forecast.of_store import savings_of_store

        quiet_libraries()
        contents["savings"] = savings_of_store(contents["recipe"])
    if chosen.json:
        print(json.dumps(contents, indent=2))
    else:
        print(runs.as_text(contents, tensors=chosen.tensors))
        if chosen.savings:
            print(savings_text(contents["savings"]))
    return _said_missing(contents)


def _said_missing(contents: dict[str, Any]) -> int:
    """Say that a volume of the store is gone, if it is, and return the exit code."""
    if contents["missing"] is None:
        return 0
    tell(f"error: {contents['missing']}")
    return BAD_INPUT


def verify(chosen: argparse.Namespace) -> int:
    """Compare a store with its checksums."""
    read_bytes, damages = runs.verify(chosen.store)
    for damage in damages:
        print(damage)
    if damages:
        tell(f"error: {len(damages)} places are not as they were written")
        return FAILED
    print(f"verified {format_size(read_bytes)}: everything is as it was written")
    return 0


def checkpoints(chosen: argparse.Namespace) -> int:
    """List, delete or restore checkpoints."""
    runs.change_checkpoints(chosen.store, delete=chosen.delete, restore=chosen.restore)
    contents = runs.inspect(chosen.store)
    print(runs.checkpoints_text(contents))
    return _said_missing(contents)
