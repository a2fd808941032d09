"""Which cases of the longest tests `make test` runs; `make soak`, and pytest by itself, run all.

`sampled.json` names parametrized tests with the number of their cases. They are picked so that as many values of all
parameters as possible occur, the same ones in every run.

`rotated.json` names tests that take long (rotate.py), and files whose tests share a long fixture. Their picked cases
are divided into shares, neighbours into different ones, and a run has one share, by the number in MEMASCEND_SAMPLED.
For `make test` it is the number of commits: the same command finds a failure again at the same commit, and as many
commits as there are shares have all cases.
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
ROTATED = Path(__file__).with_name("rotated.json")


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
    """Return the collected cases that no sampled run has."""
    counts: dict[str, int] = json.loads(FILE.read_text())
    families = _families(items)
    out: list[pytest.Item] = []
    for name, count in counts.items():
        cases = families.get(name, [])
        kept = set(picked([values_of(case) for case in cases], count))
        out += [case for index, case in enumerate(cases) if index not in kept]
    return out


def share_of(text: str) -> tuple[int, int]:
    """Return the share that a run with this number has, from 1 on, and how many there are; 1 without a number."""
    shares: int = json.loads(ROTATED.read_text())["shares"]
    return (int(text) - 1) % shares + 1 if text.isdecimal() else 1, shares


def of_other_shares(items: Sequence[pytest.Item], text: str) -> list[pytest.Item]:
    """Return the collected cases that a run with this number leaves to other shares."""
    names: list[str] = json.loads(ROTATED.read_text())["tests"]
    share, shares = share_of(text)
    families = _families(items)
    files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for name, cases in families.items():
        files[name.partition("::")[0]] += cases
    out: list[pytest.Item] = []
    for position, name in enumerate(names):
        whole = "::" not in name
        for index, case in enumerate(files[name] if whole else families.get(name, [])):
            if (position + (0 if whole else index)) % shares != share - 1:
                out.append(case)
    return out


def _families(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each test, by its file and name."""
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    return families


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases out of a collection, if this is a sampled run."""
    if text := os.environ.get(VARIABLE):
        for choose in (left_out, lambda there: of_other_shares(there, text)):
            out = choose(items)
            config.hook.pytest_deselected(items=out)
            gone = set(out)
            items[:] = [item for item in items if item not in gone]


def report() -> str | None:
    """Return a line that says which share a sampled run has."""
    if not (text := os.environ.get(VARIABLE)):
        return None
    share, shares = share_of(text)
    return f"sampled: share {share} of {shares} of the tests in {ROTATED.name} ({VARIABLE}={text})"
