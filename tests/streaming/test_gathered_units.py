"""Whose shares make a unit whole, and writes to weights, on a memory that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.errors import MemascendError
from memascend.layout.units import Unit
from memascend.streaming.cache import CachedUnit
from memascend.streaming.gather import OwnStore, ShardGatherer
from memascend.streaming.program_writes import ProgramWrites


class Memory:
    """Where a model computes, and its cache of host memory."""

    uses_copies = to_host = False

    def __init__(self) -> None:
        self.one, self.other = (Unit(name, repeated=True) for name in ("one", "other"))
        self.cached_units = {unit: CachedUnit(unit) for unit in (self.one, self.other)}
        self.whole: set[Unit] = set()
        self.log: list[str] = []
        self.cache: Any = self
        self.uploads: Any = self
        self.tables: Any = None
        self.changed = True

    def hosted(self, unit: Unit) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    bring = use = hosted

    def complete(self, unit: Unit, ranks: Any, gather: Any) -> None:
        gather()

    def differs(self, unit: Unit) -> bool:
        return self.changed

    def gather(self, action: str, _: Any) -> None:
        """Stand for the other ranks."""
        self.log.append(action)

    def wait(self, unit: Unit) -> None:
        self.log.append(f"wait for copies of {unit.name}")

    def wait_written(self, unit: Unit) -> None:
        self.log.append(f"wait for writes of {unit.name}")

    def forget(self, unit: Unit) -> None:
        self.whole.discard(unit)

    def discard(self, unit: Unit) -> None:
        self.log.append(f"discard {unit.name}")

    def take_back(self, unit: Unit) -> None:
        self.log.append(f"take back {unit.name}")

    def clean(self) -> None:
        self.log.append("clean")


@pytest.fixture
def memory() -> Any:
    return Memory()


def gathered(memory: Any) -> list[str]:
    """Return the units that were gathered, and forget them."""
    log, memory.log = memory.log, []
    return [line.removeprefix("gather ") for line in log if line.startswith("gather ")]


def test_shares_are_gathered_when_a_use_begins(memory: Any) -> None:
    values = ShardGatherer(memory, memory)
    for unit in (memory.one, memory.one, memory.other, memory.one):
        values.bring(unit)
    # A use right after another of the same unit has its shares still.
    assert gathered(memory) == ["one", "other", "one"]


def test_a_unit_in_use_stays_whole(memory: Any) -> None:
    values = ShardGatherer(memory, memory)
    values.bring(memory.one)
    memory.cached_units[memory.one].users = 1
    values.bring(memory.other)
    values.bring(memory.one)
    assert gathered(memory) == ["one", "other"]
    memory.cached_units[memory.one].users = 0
    values.forget_last_use()
    assert not memory.whole


def test_copies_end_before_shares_are_written_over(memory: Any) -> None:
    ShardGatherer(memory, memory).bring(memory.one)
    assert memory.log == ["wait for copies of one", "gather one"]


def test_own_shares_need_no_other_rank(memory: Any) -> None:
    values = ShardGatherer(memory, memory)
    values.bring(memory.one)
    gathered(memory)
    with values.own_shares():
        assert not memory.whole
        values.bring(memory.one)
    assert not gathered(memory)
    memory.to_host = True
    for _ in range(2):
        values.bring(memory.one)
    # What is read into host memory beside a device is gathered each time.
    assert gathered(memory) == ["one", "one"]


def test_backward_passes_tell_of_their_uses(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ShardGatherer(memory, memory)
    used: list[str] = []
    values.tell_uses_to(SimpleNamespace(before_use=lambda unit: used.append(unit.name)))
    values.bring(memory.one)
    assert not used
    monkeypatch.setattr("memascend.streaming.gather.in_backward", lambda: True)
    for unit in (memory.one, memory.one, memory.other):
        values.bring(unit)
    # Also of a unit that is whole already, and not of what is read into host memory beside a device.
    assert used == ["one", "one", "other"]
    memory.to_host = True
    values.bring(memory.one)
    assert len(used) == 3


@pytest.mark.parametrize("divided", [False, True])
def test_weights_that_must_not_be_written_to_are_read_anew(memory: Any, divided: bool) -> None:
    memory.size = 2
    values = ShardGatherer(memory, memory) if divided else OwnStore(memory)
    memory.one.bits = 4  # Its weights lie beside the store.
    place: Any = SimpleNamespace(name="weight", tensor=SimpleNamespace(unit=memory.one))
    memory.whole.add(memory.one)
    with pytest.raises(MemascendError, match="divided over 2 ranks" if divided else "frozen_bits=4"):
        values.check_writable([place])
    assert memory.log == ["discard one"] and not memory.whole


def test_a_module_that_writes_is_known_from_then_on(memory: Any) -> None:
    surprises: list[Unit] = []
    written: list[Unit] = []
    writes = ProgramWrites(
        memory,
        OwnStore(memory),
        before_write=lambda: memory.log.append("commit"),
        on_surprise=surprises.append,
        on_write=written.append,
    )
    writes.expect(memory.one)
    assert not memory.log
    for _ in range(2):
        writes.by_module(memory.one, [])
    assert surprises == [memory.one] and written == 2 * [memory.one]
    assert memory.cached_units[memory.one].module_writes == 2
    assert memory.log[:4] == ["wait for writes of one", "commit", "take back one", "clean"]
    memory.log.clear()
    writes.expect(memory.one)
    assert memory.log == ["commit", "wait for writes of one"]


def test_a_module_that_writes_the_same_values_changes_nothing(memory: Any) -> None:
    memory.changed = False
    written: list[Unit] = []
    writes = ProgramWrites(
        memory,
        OwnStore(memory),
        before_write=lambda: None,
        on_surprise=lambda _: None,
        on_write=written.append,
    )
    writes.by_module(memory.one, [])
    assert not memory.log and not written and not memory.cached_units[memory.one].dirty
