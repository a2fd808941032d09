"""Sampled runs: which cases of a parametrized test are picked, and that each name in the list is a test."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import rotate
import sampling

TESTS = Path(__file__).resolve().parents[1]


@dataclass(eq=False)
class Item:
    nodeid: str


def test_every_value_is_picked_before_one_is_picked_again() -> None:
    cases = list(product(("llama", "gpt2", "t5"), ("host", "ssd"), ("one", "two")))
    chosen = [cases[index] for index in sampling.picked(cases, 3)]
    assert {name for name, _, _ in chosen} == {"llama", "gpt2", "t5"}
    assert {policy for _, policy, _ in chosen} == {"host", "ssd"}
    assert {count for _, _, count in chosen} == {"one", "two"}


@pytest.mark.parametrize("count", [0, 1, 5, 12, 99])
def test_as_many_are_picked_as_are_asked_for(count: int) -> None:
    cases = list(product("abc", "de", "fg"))
    chosen = sampling.picked(cases, count)
    assert len(set(chosen)) == min(count, len(cases)) and chosen == sorted(chosen)


def test_a_sampled_run_leaves_out_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sampled.json").write_text('{"a/test_x.py::test_long": 1, "a/test_x.py::test_longest": 0}')
    (tmp_path / "rotated.json").write_text('{"shares": 2, "tests": []}')
    monkeypatch.setattr(sampling, "FILE", tmp_path / "sampled.json")
    monkeypatch.setattr(sampling, "ROTATED", tmp_path / "rotated.json")
    names = ["test_long[a-b]", "test_long[c-d]", "test_longest", "test_longer[a]"]
    items = [Item(f"tests/a/test_x.py::{name}") for name in names]
    gone: list = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    for asked, left in ((None, names), ("1", ["test_long[a-b]", "test_longer[a]"])):
        monkeypatch.delenv(sampling.VARIABLE, raising=False)
        if asked:
            monkeypatch.setenv(sampling.VARIABLE, asked)
        there = list(items)
        sampling.sample(SimpleNamespace(hook=hook), there)
        assert [item.nodeid.partition("::")[2] for item in there] == left
    assert len(gone) == 2


def test_each_case_is_in_one_share_and_neighbours_are_in_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = {"shares": 3, "tests": ["a/test_x.py::test_many", "a/test_x.py::test_one", "a/test_y.py"]}
    (tmp_path / "rotated.json").write_text(json.dumps(listed))
    monkeypatch.setattr(sampling, "ROTATED", tmp_path / "rotated.json")
    names = [*(f"x.py::test_many[{case}]" for case in "abcd"), "x.py::test_one", "x.py::test_quick"]
    items = [Item(f"tests/a/test_{name}") for name in [*names, "y.py::test_y", "y.py::test_z"]]
    runs: dict[int, set[str]] = {}
    for text in map(str, range(30)):
        share, shares = sampling.share_of(text)
        out = sampling.of_other_shares(items, text)
        left = {item.nodeid.partition("test_")[2] for item in items if item not in out}
        assert shares == 3 and runs.setdefault(share, left) == left
    assert runs == {
        1: {"x.py::test_quick", "x.py::test_many[a]", "x.py::test_many[d]"},
        2: {"x.py::test_quick", "x.py::test_many[b]", "x.py::test_one"},
        3: {"x.py::test_quick", "x.py::test_many[c]", "y.py::test_y", "y.py::test_z"},
    }


def test_a_run_says_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sampling.VARIABLE, "1234")
    share, shares = sampling.share_of("1234")
    told = sampling.report()
    assert told is not None and f"share {share} of {shares} " in told and "=1234" in told
    monkeypatch.delenv(sampling.VARIABLE)
    assert sampling.report() is None


def test_every_name_in_the_lists_is_a_test() -> None:
    rotated = json.loads((TESTS / "rotated.json").read_text())["tests"]
    counts = json.loads((TESTS / "sampled.json").read_text())
    assert len(set(rotated)) == len(rotated) > 100
    for name in (*counts, *rotated):
        file, _, test = name.partition("::")
        text = (TESTS / file).read_text()
        assert not test or re.search(rf"^ *def {test.split('::')[-1]}\(", text, re.M), name
    assert all(count >= 0 for count in counts.values())
    # No run would have these.
    assert [name for name in rotated if counts.get(name) == 0] == []


def test_what_takes_long_is_rotated() -> None:
    lines = [
        ("a/test_x.py::test_long[1]", 1.2, False),
        ("a/test_x.py::test_long[2]", 0.4, False),
        ("a/test_x.py::test_quick", 0.5, False),
        ("a/test_x.py::test_that_finds_most", 9.0, True),
        ("a/test_y.py::test_of_a_whole_file", 9.0, False),
    ]
    listed = ["a/test_x.py::test_quick", "a/test_x.py::test_left_out", "a/test_y.py"]
    assert rotate.rotated(listed, lines) == ["a/test_x.py::test_left_out", "a/test_x.py::test_long", "a/test_y.py"]
