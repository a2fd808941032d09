"""The metadata of the package: extras, bounds, one version."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import memascend
from memascend._memascend import instruction_set
from memascend.cli import main
from memascend.cli.arguments import parser
from memascend.doctor import features

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
    assert str(OLDEST["oldest"](["hf"])["torch"]) == "2.8"
    with pytest.raises(SystemExit, match="no extra 'nothing'"):
        OLDEST["requirements"](["nothing"])


def test_what_only_tests_call_is_in_one_place() -> None:
    package = Path(memascend.__file__).parent
    code = "\n".join(file.read_text() for file in package.rglob("*.py"))
    for described in ast.parse((package / "_memascend.pyi").read_text()).body:
        if isinstance(described, ast.ClassDef) and described.name != "ForTests":
            members = [member.name for member in described.body if isinstance(member, ast.FunctionDef)]
            uncalled = [name for name in members if not name.startswith("__") and f".{name}" not in code]
            assert not uncalled, f"only tests call {uncalled} of {described.name}: they belong in ForTests"
        elif isinstance(described, ast.FunctionDef):
            assert described.name in code
    assert "ForTests" not in code.replace("`ForTests.", "")


def test_the_version_has_one_source() -> None:
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    assert memascend.__version__ == cargo
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == cargo


def test_the_changelog_keeps_its_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings[:2] == ["# Changelog", "## [Unreleased]"]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for heading in headings[1:]:
        kind = heading.removeprefix("### ")
        release = re.fullmatch(r"## \[[\w.]+\]( - \d{4}-\d\d-\d\d)?", heading)
        assert kind in kinds if heading.startswith("### ") else release, heading
        if heading.startswith("## "):
            assert any(line.startswith(f"{heading.split(' - ')[0][3:]}: https://") for line in lines), heading


def test_the_command_shows_version_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"memascend {memascend.__version__}"
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert list(shown) == ["Python", "PyTorch", "kernels", "io_uring", "CUDA"]
    assert shown["kernels"] == instruction_set()
    assert not hasattr(parser().parse_args(["plan", "model"]), "version"), "arguments are those of the command"
    assert shown["io_uring"] == "yes" or shown["io_uring"].startswith("no (")


def test_what_the_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(features, "FileEngine", refuse)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = features.features()
    assert found["io_uring"].startswith("no (") and "not permitted" in found["io_uring"]
    assert "built without" in found["CUDA"]
