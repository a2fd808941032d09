"""The command line in processes of its own: its input, its output, and the files that it leaves."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def words_of(model_dir: Path, out: Path, store: Path, **changed: Any) -> list[str]:
    """Return the arguments of a small run; `changed` replaces a flag's value."""
    flags = {
        "data": model_dir.parent / "text.txt",
        "store": store,
        "out": out,
        "host_memory": "64MiB",
        "steps": 2,
        "seq_len": 32,
        "dtype": "bfloat16",
    } | changed
    words = ["finetune", str(model_dir)]
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


def in_memory(words: list[str]) -> list[str]:
    """Return the same run without a store."""
    words = words.copy()
    for flag in ("--store", "--host-memory"):
        del words[words.index(flag) : words.index(flag) + 2]
    return [*words, "--in-memory"]


def command(_pipe: Any, words: list[str], before: Callable[[], None] | None = None) -> None:
    """Start the command line in its own process; `before` changes the process first."""
    # All is imported first: a process that has become another user may not read where Python's own modules lie.
    from memascend.cli import finetune, main  # noqa: F401

    if before is not None:
        before()
    sys.argv = ["memascend", *words]
    # As the installed command does; run() looks at the arguments of the process.
    main.run()


def listing(room: Path) -> dict[str, bytes | None]:
    """Return every path under `room` with its contents, without the lab's own."""
    return {
        str(path.relative_to(room)): path.read_bytes() if path.is_file() else None
        for path in sorted(room.rglob("*"))
        if not path.name.startswith((".stdout-", ".stderr-")) and path.name != "lost+found"
    }


def the_error(ended: faults.Ended, *codes: int) -> str:
    """Return the one line of a command's error."""
    assert ended.code in codes, f"{ended.code}: {ended.err}"
    assert "Traceback" not in ended.err + ended.out, ended.err
    assert "panicked" not in ended.err, ended.err
    told = [line for line in ended.err.splitlines() if line.startswith("memascend: error: ")]
    assert len(told) == 1, ended.err
    assert ended.err.splitlines()[-1] == told[0], f"the error must come last: {ended.err}"
    return told[0]


def refused(tmp_path: Path, words: list[str], before: Callable[[], None] | None = None) -> str:
    """Return the error of a run that must not begin; it has to leave nothing."""
    seen = listing(tmp_path)
    with faults.Child(tmp_path, command, words, before) as child:
        told = the_error(child.wait(), 2)
    assert listing(tmp_path) == seen
    return told


@contextlib.contextmanager
def training(tmp_path: Path, words: list[str]) -> Iterator[faults.Child]:
    """Yield a run of the command in the middle of its training."""
    metrics = tmp_path / "metrics.jsonl"
    with faults.Child(tmp_path, command, [*words, "--metrics", str(metrics), "--steps", "1000000"]) as child:
        end = time.monotonic() + 60
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
            assert child.alive(), child.told()
            assert time.monotonic() < end, f"the run did not begin: {child.told()}"
            time.sleep(0.01)
        yield child
