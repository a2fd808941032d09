"""Processes with slow modules already imported: each is forked from one that has imported them."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked_program
import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import ForkServerContext, SpawnContext


#: The number of the process that the test run began with, of which others may be forked.
_run = os.getpid()


def begin(told: Path) -> None:
    """Start both servers for this process and its forks; they import while this process goes on.

    Processes that are started by `context()` write to the file `told` what they write to no other stream.
    """
    python()
    streams = [os.dup(stream) for stream in (1, 2)]
    with told.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            context()
        finally:
            for stream, before in zip((1, 2), streams, strict=True):
                os.dup2(before, stream)
                os.close(before)
    # Processes that are forked from this one could not ask whether the server still runs.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def variables() -> dict[str, str]:
    """Return the environment in which a program finds the same modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def fresh() -> bool:
    """Return whether nothing is forked: by MEMASCEND_FRESH, and where there is a CUDA device.

    A process whose parent has asked for devices cannot use one.
    """
    return bool(os.environ.get("MEMASCEND_FRESH")) or _has_device()


@cache
def _has_device() -> bool:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A driver too old for PyTorch.
        return torch.cuda.is_available()


@cache
def context() -> ForkServerContext | SpawnContext:
    """Return how this process starts others that run a function of a module."""
    if _has_device():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["forked_imports"])
    # The server looks for modules where any program does, and silently leaves out modules that it does not find.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", variables()["PYTHONPATH"])
        forkserver.ensure_running()
    return found


def python() -> str:
    """Return a program that takes the place of `python`: see forked_program.py, which also lists the differences.

    Beside it is `memascend`. All processes of a test run share one server. Where nothing is forked it is Python itself.
    """
    return sys.executable if fresh() else _served()


@cache
def _served() -> str:
    name = f"memascend-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or _run}"
    room = Path(tempfile.gettempdir()) / name
    room.mkdir(mode=0o700, exist_ok=True)
    address, program = room / "socket", room / "python"
    with (room / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stay = socket.socket(socket.AF_UNIX)
        try:
            stay.connect(str(address))
        except OSError:
            _start(room, address, program)
            stay.connect(str(address))
    stay.send(forked_program.STAY)
    atexit.register(stay.close)
    return str(program)


class Program(subprocess.Popen[str]):
    """A program in a process of its own, whose streams are text."""

    def __init__(self, words: Sequence[object], **options: Any) -> None:
        super().__init__([python(), *map(str, words)], text=True, **options)

    def kill(self) -> None:
        """Kill the program: it has ended when this returns."""
        kill(self)


def kill(process: Any) -> None:
    """Kill a program that `python` runs, given its subprocess.Popen or psutil.Process, and wait for its end."""
    process.send_signal(signal.SIGKILL if fresh() else forked_program.KILL)
    process.wait()


def run(words: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, as subprocess.run does with text."""
    return subprocess.run([python(), *map(str, words)], capture_output=True, text=True, **options)


def _start(room: Path, address: Path, program: Path) -> None:
    address.unlink(missing_ok=True)
    words = [sys.executable, "-IS", forked_program.__file__, str(address)]
    for file, more in ((program, []), (room / "memascend", ["-P", "-m", "memascend"])):
        file.write_text(f'#!/bin/sh\nexec {shlex.join(words + more)} "$@"\n')
        file.chmod(0o700)
    environment = variables() | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(room / "home"),
        "OMP_NUM_THREADS": "1",  # no thread must run where others are forked
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # and no CUDA context
    }
    with (room / "told").open("w") as told:
        subprocess.run(
            [sys.executable, "-P", forked_program.__file__, str(address)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            check=True,
        )
