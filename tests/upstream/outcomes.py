"""One run of a library's tests, as a list of outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from upstream import plugin

if TYPE_CHECKING:
    from upstream.suites import Suite


@dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "skipped" or "failed", and why."""

    result: str
    message: str = ""


def run(
    library: str, suite: Suite, checkout: Path, hub: Path, workers: int, only: list[str] | None = None
) -> dict[str, Outcome]:
    """Run the tests with our classes in the place of theirs; or the tests in `only`, as they are."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        paths = [str(Path(__file__).resolve().parents[1]), str(checkout), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": folder,
            "HF_HOME": str(hub / "home"),
            "HF_HUB_CACHE": str(hub / "hub"),
            "HF_HUB_OFFLINE": "1",
            plugin.LIBRARY: library,
            plugin.OURS: "yes" if only is None else "no",
            plugin.DATASETS: str(hub / "datasets"),
        }
        if only is not None:
            listed = Path(folder, "only.json")
            listed.write_text(json.dumps(only))
            environment[plugin.ONLY] = str(listed)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream.plugin", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", "-W", "ignore", f"--junitxml={report}", *suite.options, *suite.files]
        if workers > 1:
            command += ["-n", str(workers)]
        done = subprocess.run(command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL)
        if not report.is_file():
            sys.exit(f"pytest ended with {done.returncode} and wrote no report")
        return _outcomes(report)


def _outcomes(report: Path) -> dict[str, Outcome]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = Outcome("passed")
        if ends:
            result = "skipped" if ends[0].tag == "skipped" else "failed"
            outcome = Outcome(result, f"{ends[0].get('message') or ''}\n{ends[0].text or ''}")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found
