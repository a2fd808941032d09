"""Which cases of the longest parametrized tests `make test` runs; `make soak`, and pytest by itself, run all.

`sampled.json` names each such test with the number of its cases. They are picked so that as many values of all
parameters as possible occur, the same ones in every run: a failure is found again by the same command.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

#: Set by `make test`.
VARIABLE = "MEMASCEND_SAMPLED"
FILE = Path(__file__).with_name("sampled.json")


def picked(cases: Sequence[Sequence[str]], count: int) -> list[int]:
    """Return the indices of `count` cases, each given by the values of its parameters, that show the most values."""
    left = list(range(len(cases)))
    chosen: list[int] = []
    seen: set[tuple[int, str]] = set()
    while left and len(chosen) < count:
        # The first of those that show the most; in the middle of the list where none shows anything new.
        new = [len(set(enumerate(cases[index])) - seen) for index in left]
        most = max(new)
        index = left[new.index(most)] if most else left[len(left) // 2]
        left.remove(index)
        chosen.append(index)
        seen |= set(enumerate(cases[index]))
    return sorted(chosen)


def values_of(item: pytest.Item) -> list[str]:
    """Return the identity of a case among its siblings: the ids of its parameters' values."""
    identity = item.nodeid.partition("[")[2].removesuffix("]")
    return identity.split("-")


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the collected cases that a sampled run does without."""
    counts: dict[str, int] = json.loads(FILE.read_text())
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    out: list[pytest.Item] = []
    for name, count in counts.items():
        cases = families.get(name, [])
        kept = set(picked([values_of(case) for case in cases], count))
        out += [case for index, case in enumerate(cases) if index not in kept]
    return out


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases out of a collection, if this is a sampled run."""
    if os.environ.get(VARIABLE) == "1":
        out = left_out(items)
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]
