"""The tests marked gpu, and how many passed: `python -m device.gpu_tests --out FILE`, with `benches` on PYTHONPATH.

Tests of the kernels go first, then the others, several at once; last the tests marked alone, which read the driver's
count. Files without such tests are not collected: they may import what the machine lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Share of the time that is left for each part.
SHARES = {"kernels": 0.4, "device": 0.9, "alone": 1.0}
KERNELS, WORKERS = "kernels", 8
TEST_SECONDS = 60


def files() -> dict[str, list[Path]]:
    """Return the test files that have tests marked gpu: the kernels', the others, and those with tests marked alone."""
    tests = ROOT / "tests"
    marked = [path for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    kernels = [path for path in marked if path.parent.name == KERNELS]
    alone = [path for path in marked if "mark.alone" in path.read_text()]
    return {"kernels": kernels, "device": [path for path in marked if path not in kernels], "alone": alone}


def run(paths: list[Path], counts: Path, seconds: float, *more: str) -> dict[str, Any]:
    """Run the tests marked gpu of some files within so many seconds, and return the counts."""
    # pytest-benchmark warns beside pytest-xdist, and warnings are errors here.
    plugins = ["-p", "device.counting", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if "REHEARSAL" in os.environ:
        plugins += ["-p", "rehearse_plugin"]  # the kernels, compiled for the host
    options = ["-q", "-rf", "--tb=short", "--continue-on-collection-errors", f"--timeout={TEST_SECONDS}"]
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    counts.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*words, *options, *plugins, *more, *map(str, paths)],
        cwd=ROOT / "tests",
        env={**os.environ, "MEMASCEND_COUNTS": str(counts)},
    )
    try:
        process.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    try:
        return json.loads(counts.read_text())
    except (OSError, ValueError):
        return {"failed_to_start": f"pytest ended with status {process.returncode} and counted nothing"}


def joined(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of the counts, with the parts beside them."""
    names = ("collected", "passed", "failed", "skipped", "not_run")
    sums = {name: sum(part.get(name, 0) for part in parts.values()) for name in names}
    return sums | {"parts": parts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="end within so many (default: 100)")
    args = parser.parse_args()
    began = time.monotonic()
    by_part = files()
    if not any(by_part.values()):
        parser.error(f"no test under {ROOT / 'tests'} is marked gpu")
    parts: dict[str, dict[str, Any]] = {}
    counts = args.out.with_suffix(".counts")
    workers = min(WORKERS, len(os.sched_getaffinity(0)))
    parallel = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    for name, paths in by_part.items():
        seconds = SHARES[name] * (args.seconds - (time.monotonic() - began))
        chosen = ["-m", "gpu and alone"] if name == "alone" else ["-m", "gpu and not alone", *parallel]
        parts[name] = run(paths, counts, seconds, *chosen)
        args.out.write_text(json.dumps(joined(parts), indent=1) + "\n")
    counts.unlink(missing_ok=True)
    whole = joined(parts)
    print({name: whole[name] for name in ("collected", "passed", "failed", "skipped", "not_run")})
    good = whole["passed"] == whole["collected"] > 0 and not any(
        part.get("collection_errors") for part in parts.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
