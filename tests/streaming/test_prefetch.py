"""The rules of prefetch and eviction on a device, over sets of names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from memascend.streaming.demand import DeviceDemand, HostDemand
from memascend.streaming.order import NEVER, UseOrder
from memascend.streaming.prefetch import DevicePrefetcher, HostPrefetcher

UNITS: list[Any] = ["a", "b", "c", "d", "e", "f"]


@dataclass
class Memories:
    """Host memory and a device with room for so many units."""

    host_room: int = 9
    device_room: int = 9
    tables: set[Any] = field(default_factory=set)
    streamed: set[Any] = field(default_factory=set)
    by_blocks: set[Any] = field(default_factory=set)
    on_device: set[Any] = field(default_factory=set)
    there: set[Any] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def is_hosted(self, unit: Any) -> bool:
        return unit in self.there

    def fetch_ahead(self, unit: Any, number: int) -> bool:
        if len(self.there) == self.host_room:
            return False
        self.there.add(unit)
        self.log.append(f"fetch {unit} for {number}")
        return True

    def upload_ahead(self, unit: Any, number: int) -> bool:
        if unit not in self.there or len(self.on_device) == self.device_room:
            return False
        self.on_device.add(unit)
        self.log.append(f"copy {unit} for {number}")
        return True


def order(*used: Any) -> UseOrder[Any]:
    expected: UseOrder[Any] = UseOrder({True: UNITS})
    expected.begin(True)
    for unit in used:
        expected.record(unit)
    return expected


def test_host_memory_takes_the_next_two() -> None:
    memories = Memories()
    HostPrefetcher(order("a"), memories).prefetch()
    assert memories.log == ["fetch b for 1", "fetch c for 2"]
    memories = Memories(host_room=1)
    HostPrefetcher(order("a"), memories).prefetch()
    assert memories.log == ["fetch b for 1"]


def test_a_device_takes_what_is_in_host_memory_in_order() -> None:
    memories = Memories(there={"b", "d"})
    DevicePrefetcher(order("a"), memories, memories).prefetch()
    # The second is not there yet, so the third is not copied before it.
    assert memories.log == ["copy b for 1", "fetch c for 2"]
    memories = Memories(there={"b", "c"})
    DevicePrefetcher(order("a"), memories, memories).prefetch()
    assert memories.log == ["copy b for 1", "copy c for 2", "fetch d for 3", "fetch e for 4"]


def test_a_device_without_room_has_the_next_in_host_memory() -> None:
    memories = Memories(device_room=0, there={"b"})
    DevicePrefetcher(order("a"), memories, memories).prefetch()
    assert memories.log == ["fetch c for 2"]


@pytest.mark.parametrize("kept", ["streamed", "by_blocks"])
def test_a_table_without_a_buffer_is_updated_and_not_copied(kept: str) -> None:
    memories = Memories(tables={"b"}, **{kept: {"b"}})
    DevicePrefetcher(order("a"), memories, memories).prefetch()
    assert memories.log[0] == "fetch b for 1"
    assert "b" not in memories.on_device


def test_the_embedding_that_begins_a_pass_is_not_copied() -> None:
    memories = Memories(tables={"a"}, there={"a", "b"})
    DevicePrefetcher(order(), memories, memories).prefetch()
    assert memories.log[0] == "copy b for 1" and "a" not in memories.on_device


@dataclass
class Used:
    """A unit in use by so many modules."""

    unit: Any
    users: int = 0


def test_demand_of_host_memory() -> None:
    demand = HostDemand(order("a"))
    demand.whole.add("b")
    assert [demand.is_busy(Used("a")), demand.is_busy(Used("a", 1)), demand.is_busy(Used("b"))] == [False, True, True]
    demand.note_dropped(UNITS[1])
    assert not demand.is_busy(Used("b"))
    assert (demand.next_fetch(UNITS[1]), demand.next_fetch(UNITS[0])) == (1, NEVER)


def test_a_copy_on_the_device_frees_the_buffer_in_host_memory() -> None:
    on_device: set[Any] = {"b"}
    demand = DeviceDemand(order("a"), on_device, set())
    assert not demand.is_busy(Used("b", 1)) and demand.is_busy(Used("c", 1))
    # Whatever is on the device is needed here after everything that is not.
    assert demand.next_fetch(UNITS[1]) == NEVER + 1 and demand.next_fetch(UNITS[5]) == 5
    demand.to_host = True
    assert demand.is_busy(Used("b", 1))


def test_a_unit_that_the_backward_pass_is_about_to_update_stays() -> None:
    on_device: set[Any] = {"a", "b"}
    demand = DeviceDemand(order("a"), on_device, {*UNITS})
    assert demand.next_fetch(UNITS[0]) == 0, "it was used last: its gradients come next"
    assert demand.next_fetch(UNITS[1]) == 1
