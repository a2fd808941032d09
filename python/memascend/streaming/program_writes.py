"""Writes of the program, or of a module in its forward, to weights in memory: they become the store's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.layout.units import ParameterEntry, Unit
    from memascend.streaming.compute import ComputeMemory
    from memascend.streaming.gather import Values


class ProgramWrites:
    """Finds units whose bytes in memory have changed, and has them written to the store."""

    def __init__(
        self,
        memory: ComputeMemory,
        values: Values,
        *,
        before_write: Callable[[], None],
        on_surprise: Callable[[Unit], None],
        on_write: Callable[[Unit], None],
    ) -> None:
        """Watch the units in `memory`.

        `before_write` is called before the writes become part of the store's next generation, and `on_surprise` with a
        unit that a module has written to, though nothing had told of it before. `on_write` is called with each unit
        that was written to.
        """
        self._memory = memory
        self._values = values
        self._before_write = before_write
        self._on_surprise = on_surprise
        self._on_write = on_write

    def expect(self, unit: Unit) -> None:
        """Prepare for a use by modules, which may be known to write to the unit."""
        if self._memory.cache.cached_units[unit].writes_itself:
            # The durable step must be whole before a module changes the unit's bytes.
            self._before_write()
            self._memory.cache.wait_written(unit)

    def by_module(self, unit: Unit, written: list[ParameterEntry]) -> None:
        """Write a unit back whose module has changed its weights in its forward.

        The version counter says that a function has written to them, and not that it has changed a value.
        """
        if not self._values.differs(unit) and not any(place.binding.version for place in unit.places):
            return
        self._values.check_writable(written)
        cache = self._memory.cache
        cached = cache.cached_units[unit]
        cached.module_writes += 1
        if not cached.writes_itself:
            cached.writes_itself = True
            cache.wait_written(unit)
            self._on_surprise(unit)
        self.mark(unit)
        cache.clean()

    def mark(self, unit: Unit) -> None:
        """Record that the program has written to the unit's bytes, which `storage` or `lend` gave."""
        cached = self._memory.cache.cached_units[unit]
        if not cached.dirty:
            self._before_write()
            cached.dirty = True
        self._on_write(unit)
        self._memory.take_back(unit)
