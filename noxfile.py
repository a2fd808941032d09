"""Tests of a built wheel with every supported Python, and with the oldest and the newest PyTorch for it.

    nox --list
    nox --session "tests-3.12(torch='oldest')" -- -k stores    # pytest's arguments; without them: -m core

The wheel is this machine's newest in dist/release (`make wheels`), else in dist (`make wheel`). `make` covers the rest.
"""

from __future__ import annotations

import platform
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: The first PyTorch with a wheel for a Python, where that is newer than pyproject.toml's lower bound.
OLDEST_TORCH = {"3.14": "2.9.0"}
#: As in the Makefile, which says why.
NOT_OLDEST = (
    "--deselect=tests/cli/test_whole_memory.py",
    "--deselect=tests/memory_plan/test_device_plan.py::test_estimates_are_what_transformers_allocates",
)
nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "venv"


def wheel() -> Path:
    """Return the wheel to test. Raises SystemExit where there is none."""
    for folder in (ROOT / "dist" / "release", ROOT / "dist"):
        wheels = folder.glob(f"memascend-*_{platform.machine()}.whl")
        if found := sorted(wheels, key=lambda path: path.stat().st_mtime):
            return found[-1]
    raise SystemExit(
        "dist holds no wheel for this machine: build it with `make wheels`, or `make wheel` for this machine alone"
    )


@nox.session(python=PYTHONS)
@nox.parametrize("torch", ["oldest", "newest"])
def tests(session: nox.Session, torch: str) -> None:
    """Test the wheel."""
    pinned = []
    if torch == "oldest":
        (bound,) = (
            line.removeprefix("torch>=").split(",")[0]
            for line in nox.project.load_toml(ROOT / "pyproject.toml")["project"]["dependencies"]
            if line.startswith("torch>=")
        )
        pinned.append(f"torch=={OLDEST_TORCH.get(str(session.python), bound)}")
    session.install(f"{wheel()}[cli,test]", *pinned)
    session.chdir(ROOT / "tests")
    options = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT))
    if torch == "oldest":
        options += NOT_OLDEST
    session.run("python", "-P", "-m", "pytest", *options, *(session.posargs or ("-m", "core", ".")))


@nox.session(venv_backend="none")
@nox.parametrize("target", ["lint", "test", "oldest", "docs", "wheels"])
def make(session: nox.Session, target: str) -> None:
    """Run a target of the Makefile, which sets up what it needs."""
    session.run("make", target, *session.posargs, external=True)
