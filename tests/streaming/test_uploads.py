"""Copies out of host buffers: which buffers they free, and in which order they are waited for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from memascend.streaming.uploads import Uploads

SIZE = 4096


class Event:
    """An event that ends when it is waited for, or when `done` is set."""

    def __init__(self, waited: list[Event]) -> None:
        self.done, self.waited = False, waited

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.done = True
        self.waited.append(self)


@pytest.fixture
def uploads() -> Uploads:
    return Uploads(SimpleNamespace(waiting=lambda _: nullcontext()))  # type: ignore[arg-type]


def events(count: int) -> tuple[list[Any], list[Any]]:
    waited: list[Any] = []
    return [Event(waited) for _ in range(count)], waited


def test_without_copies_nothing_is_waited_for(uploads: Uploads) -> None:
    unit: Any = "unit"
    uploads.wait(unit)
    uploads.note_dropped(unit, SIZE)
    assert uploads.latest(unit) is None
    assert not uploads.are_returning(SIZE) and not uploads.wait_oldest(SIZE)


def test_a_wait_begins_with_the_events_before_the_copy(uploads: Uploads) -> None:
    (before, arrived, newer), waited = events(3)
    unit: Any = "unit"
    uploads.note(unit, [before], arrived)
    uploads.wait(unit)
    assert waited == [before, arrived]
    uploads.note(unit, [], newer)
    assert uploads.latest(unit) is newer


def test_buffers_return_in_the_order_of_their_copies(uploads: Uploads) -> None:
    (first, second, other), waited = events(3)
    units: list[Any] = ["first", "second"]
    for unit, arrived in zip(units, (first, second), strict=True):
        uploads.note(unit, [], arrived)
    for unit in units:
        uploads.note_dropped(unit, SIZE)
    uploads.note_returning(2 * SIZE, [], other)
    assert uploads.latest(units[0]) is None
    assert uploads.wait_oldest(SIZE) and waited == [first]
    assert uploads.are_returning(SIZE)
    second.done = True
    assert not uploads.are_returning(SIZE) and uploads.are_returning(2 * SIZE)
    assert not uploads.wait_oldest(SIZE)


@pytest.mark.parametrize("size", [None, SIZE])
def test_a_copy_that_has_ended_and_one_beyond_the_budget_free_no_buffer(uploads: Uploads, size: int | None) -> None:
    (arrived,), _ = events(1)
    unit: Any = "unit"
    arrived.done = size is not None
    uploads.note(unit, [], arrived)
    uploads.note_dropped(unit, size)
    assert not uploads.are_returning(SIZE) and not uploads._returning[SIZE]


def test_copies_that_have_ended_are_forgotten_though_no_unit_lacks_a_buffer(uploads: Uploads) -> None:
    (first, second), _ = events(2)
    unit: Any = "unit"
    for arrived in (first, second):
        uploads.note(unit, [], arrived)
        uploads.note_dropped(unit, SIZE)
        arrived.done = True
    assert len(uploads._returning[SIZE]) == 1
