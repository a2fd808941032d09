"""The rule of the weight cache: the units expected next, fetched ahead, and evicted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from memascend.streaming.order import NEVER, UseOrder, farthest, smallest_holding


def order_of(uses: str) -> UseOrder[str]:
    order: UseOrder[str] = UseOrder({"pass": uses})
    order.begin("pass")
    return order


def upcoming(order: UseOrder[str], count: int = 100) -> str:
    return "".join(unit for _, unit in order.upcoming(count))


# ---- the prediction ------------------------------------------------------------------------------------------


def test_a_pass_that_goes_as_expected_uses_up_the_prediction() -> None:
    order = order_of("abcba")
    for used, rest in zip("abcba", ("bcba", "cba", "ba", "a", ""), strict=True):
        order.record(used)
        assert upcoming(order) == rest
    assert [order.next_use(unit) for unit in "abc"] == [NEVER] * 3


def test_uses_are_numbered_from_the_beginning_of_the_pass() -> None:
    order = order_of("abcba")
    assert [order.next_use(unit) for unit in "abcz"] == [0, 1, 2, NEVER]
    order.record("a")
    assert [order.next_use(unit) for unit in "abc"] == [4, 1, 2]
    assert list(order.upcoming(2)) == [(1, "b"), (2, "c")]


def test_a_unit_used_twice_in_a_row_is_used_once() -> None:
    order = order_of("abab")
    order.record("a")
    order.record("a")
    assert upcoming(order) == "bab"


def test_a_pass_that_skips_units_continues_behind_the_next_expected_use() -> None:
    order = order_of("abcdcba")
    order.record("a")
    order.record("d")
    assert upcoming(order) == "cba"


def test_a_unit_that_is_not_expected_changes_no_position() -> None:
    order = order_of("abc")
    order.record("a")
    order.record("z")
    assert upcoming(order) == "bc"


def test_a_pass_predicts_the_next_of_its_kind_only() -> None:
    order: UseOrder[str] = UseOrder({"training": "abba", "evaluation": "ab"})
    order.begin("training")
    for unit in "bab":
        order.record(unit)
    order.begin("evaluation")
    assert upcoming(order) == "ab"
    order.begin("training")
    assert upcoming(order) == "bab"


def test_a_pass_without_uses_changes_no_prediction() -> None:
    order = order_of("abc")
    order.begin("pass")
    order.begin("pass")
    assert upcoming(order) == "abc"


def test_a_known_pass_predicts_no_other() -> None:
    order = order_of("abc")
    order.record("c")
    order.begin_known("xy")
    order.record("x")
    assert upcoming(order) == "y"
    order.begin("pass")
    assert upcoming(order) == "c"


# ---- fetching ahead ------------------------------------------------------------------------------------------


def test_what_is_there_is_not_fetched_again() -> None:
    order, fetched = order_of("abcde"), []
    order.record("a")

    def fetch(unit: str, number: int) -> bool:
        fetched.append((unit, number))
        return True

    order.prefetch(3, lambda unit: unit == "b", fetch)
    assert fetched == [("c", 2), ("d", 3)]


def test_the_first_unit_without_a_buffer_ends_the_prefetch() -> None:
    order, asked = order_of("abcde"), []
    order.record("a")
    order.prefetch(4, lambda unit: False, lambda unit, number: asked.append(unit) or unit != "c")
    assert asked == ["b", "c"]


# ---- eviction ------------------------------------------------------------------------------------------------


def test_the_farthest_use_is_evicted_unless_it_is_too_soon() -> None:
    uses = {"a": 3, "b": 7, "c": 7, "d": 1}
    assert farthest(uses, uses.__getitem__, beyond=-1) == "b"
    assert farthest(reversed(uses), uses.__getitem__, beyond=-1) == "c"
    assert farthest(uses, uses.__getitem__, beyond=6) == "b"
    assert farthest(uses, uses.__getitem__, beyond=7) is None
    assert farthest([], uses.__getitem__, beyond=-1) is None


def faults(uses: str, buffers: int) -> int:
    """Count the fetches of a pass with so many buffers, without fetching ahead."""
    order, resident, count = order_of(uses), set[str](), 0
    for unit in uses:
        order.record(unit)
        if unit in resident:
            continue
        count += 1
        if len(resident) == buffers:
            resident.discard(farthest(sorted(resident), order.next_use, beyond=-1) or "")
        resident.add(unit)
    return count


def least_faults(uses: str, buffers: int) -> int:
    """Search every choice of evictions for the fewest fetches."""
    fewest = Counter({frozenset[str](): 0})
    for unit in uses:
        following: dict[frozenset[str], int] = {}
        for resident, count in fewest.items():
            choices = [resident]
            if unit not in resident:
                count += 1
                spare = [resident] if len(resident) < buffers else [resident - {victim} for victim in resident]
                choices = [kept | {unit} for kept in spare]
            for choice in choices:
                following[choice] = min(count, following.get(choice, count))
        fewest = Counter(following)
    return min(fewest.values())


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_victims_fetches_less(seed: int) -> None:
    chance = random.Random(seed)
    letters = "".join(chance.choice("abcdef") for _ in range(24))
    uses = "".join(unit for unit, before in zip(letters, " " + letters, strict=False) if unit != before)
    for buffers in (1, 2, 3, 4):
        assert faults(uses, buffers) == least_faults(uses, buffers), (uses, buffers)


def test_a_unit_is_served_by_the_smallest_buffers_that_hold_it() -> None:
    assert smallest_holding(5, [16, 4, 8]) == 8
    assert smallest_holding(4, [16, 4, 8]) == 4
    with pytest.raises(ValueError, match="empty"):
        smallest_holding(17, [16, 4, 8])
