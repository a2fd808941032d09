"""memascend behind versions of DeepSpeed other than the one that is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import deepspeed_versions
import pytest
import requirements

if importlib.util.find_spec("deepspeed") is None:
    requirements.unmet("deepspeed", "deepspeed is not installed")


def test_the_versions_are_those_that_are_promised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from memascend.integrations.deepspeed import uninstall, versions

        uninstall()
    first, *_, complete = deepspeed_versions.FIRST
    assert first == versions.FIRST_VERSION
    assert complete == versions.KNOWN_VERSIONS.split()[0]
    packages = tomllib.loads((deepspeed_versions.ROOT / "pyproject.toml").read_text())
    (required,) = (
        name for name in packages["project"]["optional-dependencies"]["test"] if name.startswith("deepspeed")
    )
    assert required == f"deepspeed>={first.removesuffix('.0')},<{versions.END_VERSION}"


def test_other_bits_are_told_unless_deepspeed_has_them_too() -> None:
    trained = {"a ABC": 1, "a none": 1, "b ABC": 2, "b none": 2, "ranks ABC": 3}
    newest = deepspeed_versions.Result("2", trained=trained)
    older = deepspeed_versions.Result("1", trained=dict.fromkeys(trained, 0) | {"a none": 1, "c ABC": 0})
    # Case b has changed in DeepSpeed itself.
    assert older.same(newest) == (["a none"], ["a ABC", "ranks ABC"])
    assert newest.same(newest) == (list(trained), [])


@pytest.mark.soak
def test_the_first_versions(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", deepspeed_versions.__file__, "--folder", str(tmp_path)])
    assert done.returncode == 0
