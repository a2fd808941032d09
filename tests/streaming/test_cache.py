"""The cache of host memory, deferred updates and reads of tables, on a runtime that counts buffers and moves none."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from memascend.common.turns import Turns
from memascend.errors import MemascendError
from memascend.layout.units import Unit
from memascend.streaming.cache import NoBufferError, WeightCache
from memascend.streaming.compute import InHostMemory
from memascend.streaming.deferred_updates import DeferredUpdates
from memascend.streaming.in_backward import BackwardUpdates
from memascend.streaming.order import UseOrder
from memascend.streaming.table_reads import TableReads

SIZE = 4096


class Lease(bytearray):
    """A buffer of host memory."""

    __hash__ = object.__hash__

    @property
    def address(self) -> int:
        return id(self)


class Ticket:
    """A fetch that has ended, with the error of its end."""

    groups = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Runtime:
    """A runtime with so many buffers."""

    def __init__(self, buffers: int) -> None:
        self.buffers = buffers
        self.leased: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.log: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.memory = self.units = self

    def lease_unit(self, nbytes: int) -> Lease | None:
        if len(self.leased) == self.buffers:
            return None
        lease = Lease(nbytes)
        self.leased.add(lease)
        return lease

    def lease_outside(self, nbytes: int) -> Lease:
        self.log.append(("outside", nbytes))
        return Lease(nbytes)

    def fetch(self, index: int, weights: Any, lease: Any, updates: Any, *_: Any) -> Ticket:
        self.log.append(("fetch", index, len(updates)))
        return Ticket(self.error)

    def write_unit(self, index: int, *_: Any) -> None:
        self.log.append(("write", index))

    def wait_unit(self, index: int) -> None:
        pass

    def release(self, index: int, _: Any) -> None:
        self.log.append(("release", index))


class Update:
    """The update of a tensor, which names its segments by their first elements."""

    def __init__(self, tensor: str, *starts: int) -> None:
        self.tensor = tensor
        self.segments = [SimpleNamespace(start=start) for start in starts]
        self.write_through = False
        self.begun = 0

    def started(self) -> None:
        self.begun += 1


class Setting:
    """Four layers and a table, and the parts of a streamer over them."""

    def __init__(self, buffers: int, **options: Any) -> None:
        self.units = [Unit(f"layers.{at}", repeated=True, nbytes=SIZE, index=at) for at in range(4)]
        self.table = Unit("embed", repeated=False, nbytes=2 * SIZE, index=4, is_table=True)
        self.runtime = Runtime(buffers)
        self.order: UseOrder[Unit] = UseOrder({True: [*self.units, *reversed(self.units)]})
        self.order.begin(True)
        plan: Any = SimpleNamespace(
            units=[SimpleNamespace(nbytes=SIZE)],
            most=None,
            whole_tables=(),
            resident_units=(),
            update="forward",
            by_turns=False,
        )
        vars(plan).update(options)
        native: Any = self.runtime
        timeline: Any = SimpleNamespace(waiting=lambda _: nullcontext())

        def make_cache(demand: Any) -> WeightCache:
            return WeightCache(
                native,
                [*self.units, self.table],
                plan,
                timeline,
                demand,
                writes_through=lambda: True,
                forget_recomputed=lambda: None,
            )

        def make_tables(cache: WeightCache, prefetch: Any) -> TableReads:
            return TableReads(cache, prefetch, order=self.order, turns=Turns(), block_bytes=SIZE)

        self.memory = InHostMemory(self.order, make_cache, make_tables)
        self.cache = self.memory.cache

    def use(self, unit: Unit) -> None:
        """Use a unit for a moment."""
        self.order.record(unit)
        self.memory.bring(unit)

    @property
    def hosted(self) -> set[str]:
        """The units in buffers, by name."""
        return {r.unit.name for r in self.cache.cached_units.values() if r.lease is not None}


def test_the_unit_that_is_used_last_gives_up_its_buffer() -> None:
    setting = Setting(buffers=3)
    for unit in setting.units[:3]:
        setting.use(unit)
    # Next are 3, 3, 2, 1, 0.
    setting.use(setting.units[3])
    assert setting.hosted == {"layers.1", "layers.2", "layers.3"}


def test_nothing_is_fetched_ahead_at_the_cost_of_an_earlier_use() -> None:
    setting = Setting(buffers=2)
    for unit in setting.units[:2]:
        setting.use(unit)
    one, two = setting.units[1:3]
    assert not setting.cache.fetch_ahead(two, 7), "both units in memory are used before use 7"
    assert setting.cache.fetch_ahead(two, 2)
    assert setting.hosted == {one.name, two.name}


def test_a_unit_in_use_or_whole_keeps_its_buffer() -> None:
    setting = Setting(buffers=2)
    zero, one, two, three = setting.units
    setting.use(zero)
    setting.cache.cached_units[zero].users = 1
    setting.use(one)
    setting.memory.whole.add(one)
    with pytest.raises(NoBufferError, match=r"layers\.2.*in use: layers\.0\)"):
        setting.use(two)
    setting.memory.forget(one)
    setting.use(three)
    assert setting.hosted == {zero.name, three.name}


def test_a_fetch_that_fails_leaves_the_unit_to_be_fetched_again() -> None:
    setting = Setting(buffers=1)
    setting.runtime.error = MemascendError("no drive")
    with pytest.raises(MemascendError, match="no drive"):
        setting.use(setting.units[0])
    assert not setting.hosted
    setting.runtime.error = None
    setting.use(setting.units[0])
    assert setting.runtime.log == [("fetch", 0, 0), ("fetch", 0, 0)]


def test_bytes_that_the_program_has_written_to_are_stored_before_the_buffer_goes() -> None:
    setting = Setting(buffers=1)
    setting.use(setting.units[0])
    setting.cache.cached_units[setting.units[0]].dirty = True
    setting.use(setting.units[1])
    assert setting.runtime.log == [("fetch", 0, 0), ("write", 0), ("fetch", 1, 0)]


def test_updates_wait_for_the_next_fetch() -> None:
    setting = Setting(buffers=2)
    updates, unit = DeferredUpdates(setting.cache), setting.units[0]
    setting.use(unit)
    updates.release(unit)
    first, second, other = Update("pack", 64), Update("pack", 0), Update("weight", 0)
    deferred: list[Any] = [first, other]
    updates.defer(unit, deferred)
    updates.defer(unit, [second])  # type: ignore[list-item]
    assert updates.any() and not setting.hosted
    assert [segment.start for segment in first.segments] == [0, 64]
    setting.use(unit)
    assert not updates.any()
    assert setting.runtime.log == [("fetch", 0, 0), ("fetch", 0, 2)]
    assert (first.begun, second.begun, other.begun) == (1, 0, 1) and first.write_through


def test_a_unit_with_a_buffer_of_its_own_is_updated_there() -> None:
    setting = Setting(buffers=2)
    unit = setting.units[0]
    setting.cache.resident_units = {unit}
    updates = DeferredUpdates(setting.cache)
    setting.use(unit)
    updates.release(unit)
    cached = setting.cache.cached_units[unit]
    assert cached.lease is not None and cached.storage is None
    setting.cache.drop(cached)
    assert setting.runtime.log[-1] == ("release", 0)


def test_a_unit_in_use_cannot_change() -> None:
    setting = Setting(buffers=2)
    setting.cache.cached_units[setting.units[0]].users = 1
    with pytest.raises(MemascendError, match=r"step\(\) was called while layers.0 is in use"):
        DeferredUpdates(setting.cache).release(setting.units[0])


@pytest.mark.parametrize("without_buffer", [False, True])
def test_where_the_backward_pass_can_update(without_buffer: bool) -> None:
    setting = Setting(buffers=2, update="backward")
    updates = BackwardUpdates(setting.cache, without_buffer=without_buffer)
    tensor: Any = SimpleNamespace(unit=setting.units[0])
    assert updates.can_update(tensor) == without_buffer
    setting.use(setting.units[0])
    cached = setting.cache.cached_units[setting.units[0]]
    assert updates.can_update(tensor)
    cached.users = 1
    assert not updates.can_update(tensor)
    cached.users, cached.dirty = 0, True
    assert not updates.can_update(tensor)


def test_a_table_without_a_buffer_is_whole_beyond_the_budget_only() -> None:
    setting = Setting(buffers=1)
    reads = setting.memory.tables
    assert reads.is_streamed(setting.table)
    setting.use(setting.table)
    assert setting.runtime.log == [("outside", 2 * SIZE), ("fetch", 4, 0)]
    block = reads.lease_block()
    with pytest.raises(NoBufferError, match="blocks of other tables"):
        reads.lease_block()
    del block
    assert len(reads.spare_blocks()) == 1


def test_a_copy_about_to_free_a_buffer_spares_an_eviction() -> None:
    setting = Setting(buffers=2)
    zero, one = setting.units[:2]
    setting.use(zero)
    copied = [setting.runtime.memory.lease_unit(SIZE)]
    end: Any = SimpleNamespace(wait=copied.clear, is_done=lambda: not copied)
    setting.cache.uploads.note_returning(SIZE, [], end)
    assert not setting.cache.fetch_ahead(one, 1), "the buffer is not free yet"
    setting.use(one)
    assert not copied and setting.hosted == {zero.name, one.name}
    # Without a copy under way, the unit that is used last gives up its buffer.
    assert setting.cache.fetch_ahead(setting.units[2], 2) and setting.hosted == {one.name, setting.units[2].name}
