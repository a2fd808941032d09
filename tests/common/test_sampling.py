"""Sampled runs: which cases of a parametrized test are picked, and that each name in the list is a test."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
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
    monkeypatch.setattr(sampling, "FILE", tmp_path / "sampled.json")
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


def test_every_name_in_the_list_is_a_test() -> None:
    for name, count in json.loads((TESTS / "sampled.json").read_text()).items():
        file, _, test = name.partition("::")
        assert count >= 0 and re.search(rf"^ *def {test.split('::')[-1]}\(", (TESTS / file).read_text(), re.M), name
