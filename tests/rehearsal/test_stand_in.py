"""The stand-in device builds and a few of its scenarios pass; `make rehearse` runs all, and the tests marked gpu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requirements

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Copies both ways with activations on the drive, integers counted, scaled losses, and a fault that has to show.
SCENARIOS = (
    "test_rehearsed_architectures.py::test_training[mixtral-ssd]",
    "test_rehearsed_training.py::test_fp16_with_scaled_losses",
    "test_rehearsed_training.py::test_it_shows_waits_and_copies_that_are_left_out",
)


def test_scenarios_run_on_the_stand_in() -> None:
    out = ROOT / "build" / "rehearsal" / "tests"
    built = subprocess.run([HERE / "build.sh", sys.executable, out], capture_output=True, text=True)
    if built.returncode == 3:
        if "is not installed" in built.stderr:
            requirements.unmet("compiler", built.stderr.strip())
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    command = [out / "run.sh", sys.executable, "-P", "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command += ["-q", "-p", "rehearse_plugin", "-p", "no:cacheprovider", "-m", "rehearsal"]
    # Neither this run's workers nor its options.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command += [HERE / name for name in SCENARIOS]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^4 passed in ", done.stdout, flags=re.MULTILINE), done.stdout
