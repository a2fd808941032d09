"""Test memascend behind several versions of DeepSpeed, and compare the training with each.

    python tests/deepspeed_versions.py [VERSION ...] [--folder FOLDER] [-k EXPRESSION]

Without versions: the first of each part of memascend, and the one that is installed. Each gets a virtual environment in
FOLDER (build/deepspeed-versions) over the packages of the interpreter that runs this, with DeepSpeed from PyPI and
nothing else; one that is there is used again.

In each, the tests of `FILES` are run. Its training is compared with the installed version:
losses, norms and weights have to be the same bits, unless they are different without memascend as well. The exit status
is 1 if a test fails, if bits are different, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

#: The first version of each part: of the operators, of the parameter pools, and of the rest.
FIRST = ("0.18.0", "0.19.4", "0.19.5")
#: Files of tests/integrations that run with each version.
FILES = tuple(f"integrations/test_deepspeed_{name}.py" for name in ("training", "installing", "files", "adam"))
#: Results of ranks that are the same with every version.
BITS = ("losses", "norms", "weights", "skipped")


@dataclass
class Result:
    """The results of one version."""

    version: str
    #: Numbers of tests, by their outcome.
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("passed", "failed", "skipped"), 0))
    failed: list[str] = field(default_factory=list)
    #: The bits of each training run, by its name.
    trained: dict[str, Any] = field(default_factory=dict)

    def same(self, newest: Result) -> tuple[list[str], list[str]]:
        """Return the runs with the bits of another version, and those that differ though they need not."""
        names = self.common(newest)
        same = [name for name in names if self.trained[name] == newest.trained[name]]
        # A case is named before the parts of memascend: "bfloat16 ABC"; without memascend it is "bfloat16 none".
        changed = [name for name in names if name.endswith(" none") and name not in same]
        excused = {name.removesuffix(" none") for name in changed}
        return same, [name for name in names if name not in same and name.rpartition(" ")[0] not in excused]

    def common(self, newest: Result) -> list[str]:
        """Return the runs of both versions."""
        return [name for name in self.trained if name in newest.trained]


def environment(folder: Path, version: str) -> Path:
    """Return the interpreter of an environment with that version of DeepSpeed, over this one's packages."""
    python = folder / version / "bin" / "python"
    if not python.exists():
        venv.create(folder / version, with_pip=True)
        ours = sysconfig.get_path("purelib", vars={"base": str(folder / version), "platbase": str(folder / version)})
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        # Its name puts it behind the environment's own packages.
        (Path(ours) / "packages.pth").write_text("".join(f"{path}\n" for path in paths))
    told = subprocess.run(
        [python, "-P", "-c", "from importlib.metadata import version; print(version('deepspeed'))"],
        capture_output=True,
        text=True,
    )
    if told.stdout.strip() != version:
        pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        subprocess.run([*pip, "setuptools", "wheel"], check=True)
        # Nothing is compiled; its setup imports PyTorch.
        variables = os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        deepspeed = ["--no-deps", "--no-build-isolation", f"deepspeed=={version}"]
        subprocess.run([*pip, *deepspeed], check=True, env=variables)
    return python


def test(python: Path, version: str, folder: Path, expression: str) -> Result:
    """Run the tests with one version; return the results."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary, report = folder / f"tests-{version}", folder / f"tests-{version}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-P", "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    command += ["-q", "--basetemp", temporary, f"--junitxml={report}", "-k", expression]
    command += FILES
    variables = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(list(map(str, command)), cwd=TESTS, env=variables)
    return result_of(version, folder)


def result_of(version: str, folder: Path) -> Result:
    """Read the files that the tests of a version have left."""
    temporary, report = folder / f"tests-{version}", folder / f"tests-{version}.xml"
    result = Result(version)
    if not report.exists():
        result.failed.append(f"{version}: the tests did not come to an end")
        return result
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        result.outcomes[outcome] += 1
        if outcome == "failed":
            result.failed.append(f"{version}: {case.get('name')}")
    runs, found = (temporary / "trained" / f"runs.{suffix}" for suffix in ("json", "found"))
    if found.exists():
        names = [Path(run["folder"]).name.removeprefix("run ") for run in json.loads(runs.read_text())]
        for name, ranks in zip(names, json.loads(found.read_text()), strict=True):
            # DeepSpeed's own loading leaves moments out that are swapped, which they are not with every version.
            loads = name.startswith("loaded ") and "loading of checkpoints" not in ranks[0]["parts"]
            if not (loads or any(rank["error"] for rank in ranks)):
                result.trained[name] = [bits(rank) for rank in ranks]
    return result


def bits(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a rank that are the same with every version."""
    # Of a step that is left out versions before 0.19.8 tell the norm of the step before, which is 0 at first.
    norms = [norm if 0 < norm < math.inf else None for norm in found["norms"]]
    return {name: found[name] for name in BITS} | {"norms": norms}


def main() -> int:
    """Run as the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "deepspeed-versions")
    parser.add_argument("-k", default="", metavar="EXPRESSION", dest="expression", help="tests, as for pytest")
    args = parser.parse_args()
    installed = importlib.metadata.version("deepspeed")
    others = [version for version in args.versions or FIRST if version != installed]
    newest = test(Path(sys.executable), installed, args.folder.resolve(), args.expression)
    results = [newest]
    for version in others:
        folder = args.folder.resolve()
        results.append(test(environment(folder, version), version, folder, args.expression))

    print(f"{'DeepSpeed':<12}{'passed':>8}{'failed':>8}{'skipped':>9}  runs with the bits of {installed}")
    failures = [failed for result in results for failed in result.failed]
    compared = 0
    for result in results:
        same, differ = result.same(newest)
        common = result.common(newest)
        passed, failed, skipped = (result.outcomes[name] for name in ("passed", "failed", "skipped"))
        counts = f"{passed:8}{failed:8}{skipped:9}"
        print(f"{result.version:<12}{counts}  {len(same)} of {len(common)}")
        for name in sorted(set(common) - set(same) - set(differ)):
            print(f"  other bits, without memascend too: {name}")
        failures += [f"{result.version}: other bits than {installed}: {name}" for name in differ]
        compared += len(common) if result is not newest else 0
    for failure in failures:
        print("failed:", failure)
    return 1 if failures or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
