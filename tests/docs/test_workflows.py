"""The workflows: pinned actions, targets that the Makefile has, and the matrix of noxfile.py."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def steps_of(path: Path) -> list[dict[str, Any]]:
    return list(chain(*(job["steps"] for job in yaml.safe_load(path.read_text())["jobs"].values())))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_targets_exist(path: Path) -> None:
    steps = steps_of(path)
    assert steps
    uses = [step["uses"] for step in steps if "uses" in step]
    assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in uses)
    # The version is a comment beside each digest.
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+", path.read_text())) == len(uses)
    targets = [step["run"].split()[1] for step in steps if step.get("run", "").startswith("make ")]
    assert set(targets) <= TARGETS
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        assert set([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", ())) <= set(
            yaml.safe_load(path.read_text())["jobs"]
        )


def test_the_matrix_of_a_release_is_that_of_nox() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    matrix, source = release["test"]["strategy"]["matrix"], (ROOT / "noxfile.py").read_text()
    (pythons,) = re.findall(r"^PYTHONS = \((.*)\)$", source, flags=re.MULTILINE)
    assert [f'"{version}"' for version in matrix["python"]] == pythons.split(", ")
    assert f'"torch", {matrix["torch"]}'.replace("'", '"') in source
    assert set(release["publish"]["needs"]) == {"wheels", "test"}, "nothing is published that was not tested"
    (targets,) = re.findall(r'"target", \[(.*)\]', source)
    assert set(re.findall(r'"([a-z]+)"', targets)) <= TARGETS
