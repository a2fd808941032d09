"""Launching programs in several processes, as a user does."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

import forked
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: accelerate's own launcher starts several processes for GPUs only, or by mpirun. The scripts ask for the CPU.
LAUNCHERS = {
    "accelerate": ["accelerate.commands.launch", "--num_processes", "{ranks}", "--num_machines", "1", "--multi_gpu"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "{ranks}", "--standalone"],
}


def command_of(
    launcher: str, ranks: int, words: Sequence[str], folder: Path, python: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command with which `python` launches `words` on as many processes, and its environment."""
    environment = forked.variables() | {
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python,
        "HF_HOME": str(folder / "home"),
        "MASTER_PORT": str(29600 + os.getpid() % 2000),
    }
    launched = [word.format(ranks=ranks) for word in LAUNCHERS[launcher]]
    if launcher == "accelerate":
        launched += ["--main_process_port", environment["MASTER_PORT"], "--mixed_precision", "no"]
    return [python, "-P", "-m", *launched, *words], environment


def run_launched(
    launcher: str, ranks: int, words: Sequence[str], folder: Path, python: str = ""
) -> subprocess.CompletedProcess[str]:
    """Launch `words` with this `python`, without one with processes that are forked, and wait for the end."""
    command, environment = command_of(launcher, ranks, words, folder, python or forked.python())
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def launch(
    program: Path, launcher: str, ranks: int, name: str, folder: Path, *numbers: int, python: str = ""
) -> list[Any]:
    """Launch one of a file's programs, and return its result on each rank."""
    done = run_launched(launcher, ranks, [str(program), name, str(folder), *map(str, numbers)], folder, python)
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{name}.{rank}") for rank in range(ranks)]
