"""What the package says of itself: extras, bounds, one version."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OLDEST: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "oldest.py"))


def test_the_extras() -> None:
    assert EXTRAS.keys() >= {"cuda12", "cuda13", "cuda", "cli", "hf", "deepspeed", "lightning", "all", "test"}
    named = {requirement.name for requirement in OLDEST["requirements"](["hf"])}
    assert named >= {"torch", "transformers", "trl", "peft", "datasets"}
    # The wheels of CuPy exclude each other.
    everything = {requirement.name for requirement in OLDEST["requirements"](["all"])}
    assert everything >= named | {"deepspeed", "lightning"} and not any("cupy" in name for name in everything)


def test_every_bound_can_be_tested_and_is_one() -> None:
    bounds: dict[str, set[str]] = {}
    for extra in EXTRAS:
        assert OLDEST["oldest"]([extra])
        for requirement in OLDEST["requirements"]([extra]):
            bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}
    assert str(OLDEST["oldest"](["hf"])["torch"]) == "2.6"
    with pytest.raises(SystemExit, match="no extra 'nothing'"):
        OLDEST["requirements"](["nothing"])
