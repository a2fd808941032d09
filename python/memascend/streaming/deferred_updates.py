"""Deferred updates: an optimizer's step is carried out by the next fetch of each unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.layout.units import Unit
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.order import UseOrder
    from memascend.streaming.updates import TensorUpdate


class DeferredUpdates:
    """Hands updates to the units whose next fetch applies them, and applies them at once where that is asked."""

    def __init__(self, cache: WeightCache) -> None:
        """Update the units of `cache`."""
        self._cache = cache

    def release(self, unit: Unit) -> None:
        """Drop a unit that is about to change, unless it is to change where it is.

        An error of its fetch under way is raised here.
        """
        cache, cached = self._cache, self._cache.cached_units[unit]
        if cached.users:
            raise MemascendError(
                f"optimizer.step() was called while {unit.name} is in use: call it after the forward and the backward "
                "pass, not within them"
            )
        if not cached.is_resident:
            # A copy under way out of the unit's buffer holds the buffer.
            cache.drop(cached)
            return
        # No copy may read a buffer that is about to change.
        cache.uploads.wait(unit)
        cache.write_back(cached)
        if cached.ticket is not None:
            cache.settle(cached)
        cached.storage = None

    def defer(self, unit: Unit, updates: Sequence[TensorUpdate]) -> None:
        """Have the next fetch of `unit`, which `let_go` dropped, apply `updates`."""
        cached = self._cache.cached_units[unit]
        by_tensor = {update.tensor: update for update in cached.updates}
        for update in updates:
            earlier = by_tensor.setdefault(update.tensor, update)
            if earlier is not update:
                # Another optimizer's part of the same pack: one fetch updates a tensor once.
                earlier.segments = sorted(earlier.segments + update.segments, key=lambda segment: segment.start)
        cached.updates = list(by_tensor.values())

    def any(self) -> bool:
        """Return whether any update waits for the next fetch of its unit."""
        return any(cached.updates for cached in self._cache.cached_units.values())

    def apply(self, unit: Unit) -> None:
        """Apply the deferred updates of one unit now, because its gradient is about to be replaced."""
        cache, cached = self._cache, self._cache.cached_units[unit]
        if cached.updates:
            cache.fetch(unit, None if unit in cache.streamed else cache.lease(unit))
        if cached.ticket is not None:
            cache.settle(cached)

    def apply_all(self, order: UseOrder[Unit], read: Callable[[Unit], object]) -> None:
        """Apply every deferred update now and wait until it is on the store's drives.

        `read` fetches a unit into host memory, and others ahead by `order`.
        """
        cache = self._cache
        cache.clean()
        waiting = [cached.unit for cached in cache.cached_units.values() if cached.updates]
        if waiting:
            # Expecting exactly these units makes the ordinary prefetch a pipeline over them.
            order.begin_known(waiting)
            for unit in waiting:
                if unit in cache.streamed:
                    self.apply(unit)
                else:
                    read(unit)
        cache.settle_all()
