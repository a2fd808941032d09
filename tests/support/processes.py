"""Open descriptors of this process, and programs in processes of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import forked

#: Descriptors of rings and native threads that were there before the test: an engine may be the process's.
_earlier: set[Path] = set()


def forget_earlier() -> None:
    """Have `open_files` and `native_threads` return only files and threads from now on."""
    gc.collect()
    _earlier.clear()
    _earlier.update(_rings(), _threads())


def _rings() -> dict[Path, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry] = os.readlink(entry)
    return {entry: target for entry, target in found.items() if "io_uring" in target}


def _threads() -> dict[Path, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[task] = (task / "comm").read_text().strip()
    return {task: name for task, name in found.items() if name.startswith("memascend")}


def open_files(store: Path) -> list[str]:
    found = [target for entry, target in _rings().items() if entry not in _earlier]
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith(str(store)):
                found.append(target)
    return found


def native_threads() -> list[str]:
    return [name for task, name in _threads().items() if task not in _earlier]


def native_threads_end() -> bool:
    """Return whether no native thread is left. The kernel lists one that was joined for a moment more."""
    deadline = time.monotonic() + 10
    while native_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not native_threads()


def run_file(file: str | Path, *arguments: object, **variables: str) -> str:
    """Run a file of the tests as a program that finds the same modules, and return its output."""
    command = [sys.executable, str(file), *map(str, arguments)]
    done = subprocess.run(command, env=forked.variables() | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90, env=environment
    )
