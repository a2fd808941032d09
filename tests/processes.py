"""Open descriptors of this process, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import forked


def open_files(store: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(str(store)) or "io_uring" in target:
            found.append(target)
    return found


def native_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("memascend")]


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
