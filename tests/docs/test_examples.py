"""The programs of examples/ run as a reader would run them: without arguments, offline, on tiny models."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import pytest
from simulated_device import Accesses, SimulatedDevice

if TYPE_CHECKING:
    import fake_cuda

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(name: str) -> str:
    """Run an example as a program, and return what it printed."""
    command = [sys.executable, str(EXAMPLES / name)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)$", output, flags=re.MULTILINE)]


def assert_learned(output: str) -> None:
    assert len(losses(output)) == 8
    assert losses(output)[-1] < losses(output)[0]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an example find its neighbours, and no arguments, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["example"])


@pytest.mark.usefixtures("program")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["train_loop.py", "lora.py", "encoder_own_loss.py"])
def test_it_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "lora.py":
        needs.package("peft")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert_learned(capsys.readouterr().out)


def test_a_killed_run_goes_on_to_the_same_bits() -> None:
    output = run("resume_after_kill.py")
    # Commits run beside the next step: that of the third may not have ended when the fourth is killed.
    assert "exit code -9" in output
    assert re.search(r"resumed after step [23]$", output, flags=re.MULTILINE)
    assert "the same, bit for bit" in output


@pytest.mark.usefixtures("program")
def test_the_gpu_run_on_a_simulated_device(fake: fake_cuda.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_run = importlib.import_module("gpu_run")
    with Accesses(fake):
        gpu_run.main(SimulatedDevice())
    output = capsys.readouterr().out
    assert_learned(output)
    assert "MB to the device" in output


@pytest.mark.gpu
def test_the_gpu_run() -> None:
    assert_learned(run("gpu_run.py"))


def test_every_example_is_short_and_run() -> None:
    assert len(NAMES) == 5
    source = Path(__file__).read_text()
    for name in NAMES:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name
        assert f'"{name}"' in source
