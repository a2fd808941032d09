"""Each call of the system by which a store is kept fails, once or for ever: an error, and the last step is whole.

MEMASCEND_FAULTS says how many tries there are (default: one for each of the calls that write), MEMASCEND_SEED which.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import requirements

HERE = Path(__file__).resolve().parent
FAULTS = int(os.environ.get("MEMASCEND_FAULTS", "6"))
#: Seconds that a try takes at most, and the program before the first.
SECONDS, BEGINNING = 20, 120


def built(room: Path) -> Path:
    """Build the library that has calls fail."""
    library = room / "faulty_calls.so"
    words = ["cc", "-shared", "-fPIC", "-O1", str(HERE / "faulty_calls.c"), "-o", str(library), "-ldl"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        requirements.unmet("compiler", "there is no cc")
    if done.returncode:
        requirements.unmet("compiler", done.stderr)
    return library


@pytest.mark.timeout(BEGINNING + FAULTS * SECONDS)
def test_calls_that_fail_leave_a_step(tmp_path: Path) -> None:
    seed = os.environ.get("MEMASCEND_SEED", "0")
    words = [sys.executable, "-P", str(HERE.parent / "support" / "faulty_runs.py"), str(tmp_path), str(FAULTS), seed]
    # A process of Python's own: the library is loaded when it begins, and each try is forked from it.
    environment = forked.variables() | {"LD_PRELOAD": str(built(tmp_path))}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=BEGINNING + FAULTS * SECONDS)
    assert done.returncode == 0, done.stderr
    tries = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(tries) == FAULTS
    wrong = [one for one in tries if one["problems"]]
    assert not wrong, f"seed {seed}:\n" + "\n".join(json.dumps(one) for one in wrong)
    counts = collections.Counter(one["kind"] for one in tries if one["failed"])
    told = sum(1 for one in tries if one["failed"] and one["told"])
    faults = sum(counts.values())
    print(f"seed {seed}: {faults} faults of {len(counts)} kinds in {len(tries)} tries, {told} of them told")
    assert faults * 2 > len(tries) and told
