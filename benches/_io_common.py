"""Parts of io.py: measuring by turns, the bytes of tensors, and programs in processes of their own.

Standard library only: the interpreter with DeepSpeed imports it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MIB, GIB, PAGE = 2**20, 2**30, 4096


class Missing(Exception):
    """Something that this machine lacks."""


@contextlib.contextmanager
def cpu_time(who: int = resource.RUSAGE_SELF) -> Iterator[list[float]]:
    """Fill a list with the user and system seconds of this process (every thread) or of its ended children."""
    taken: list[float] = []
    before = resource.getrusage(who)
    yield taken
    after = resource.getrusage(who)
    taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def alternate(names: Sequence[str], rounds: int, run: Callable[[str], dict]) -> dict[str, list[dict]]:
    """Run each name once per round. Every round begins with another one."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            results[name].append(run(name))
    return results


def ratio(ours: list[dict], theirs: list[dict], key: str) -> float:
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def median(runs: list[dict], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def scramble(view) -> None:
    """Fill memory with noise: a drive may be faster with zeros, and fio writes noise."""
    noise = os.urandom(MIB)
    for start in range(0, len(view), MIB):
        view[start : start + MIB] = noise[: len(view) - start]


def stamp(view, number: int) -> None:
    """Mark both ends of a tensor, so that reading back the wrong bytes is noticed."""
    struct.pack_into("<Q", view, 0, number)
    struct.pack_into("<Q", view, len(view) - 8, ~number & (2**64 - 1))


def check_stamp(view, number: int) -> None:
    found = struct.unpack_from("<Q", view, 0)[0], struct.unpack_from("<Q", view, len(view) - 8)[0]
    if found != (number, ~number & (2**64 - 1)):
        raise SystemExit(f"tensor {number} came back as another: {found}")


def child(function: str, job: dict, python: Path, cgroup: Path | None = None) -> dict:
    """Run a function of io.py's `CHILDREN` in a process of its own, in `cgroup` from the beginning."""

    def enter() -> None:
        if cgroup:
            (cgroup / "cgroup.procs").write_text("0")

    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("io.py")), "child", function],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        preexec_fn=enter,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    if done.returncode != 0:
        raise SystemExit(f"{function} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])
