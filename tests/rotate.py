"""Writes tests/rotated.json anew from what tests have taken: `python tests/rotate.py FILE`.

FILE comes from `MEMASCEND_TIMES=FILE make test-python ARGS="-p processor_times --workers 3 ."`, which runs all cases.
Of a run that was sampled, those tests of the list that it has left out stay there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("rotated.json")
#: The seconds of a case, on average, from which on a test is run by one share alone.
SECONDS = 0.6


def rotated(listed: list[str], lines: list[tuple[str, float, bool]]) -> list[str]:
    """Return the tests to rotate: of those measured the long ones that are not `core`, and files listed as a whole."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    core = set()
    for case, taken, is_core in lines:
        name = case.partition("[")[0]
        seconds[name].append(taken)
        if is_core:
            core.add(name)
    files = {name for name in listed if "::" not in name}
    found = {name for name, taken in seconds.items() if sum(taken) >= SECONDS * len(taken)} - core
    unmeasured = {name for name in listed if name not in seconds}
    return sorted(files | {name for name in found | unmeasured if name.partition("::")[0] not in files})


def main(file: str) -> None:
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    there = json.loads(LIST.read_text())
    there["tests"] = rotated(there["tests"], lines)
    LIST.write_text(json.dumps(there, indent=1) + "\n")
    print(f"{LIST}: {len(there['tests'])} tests in {there['shares']} shares")


if __name__ == "__main__":
    main(*sys.argv[1:])
