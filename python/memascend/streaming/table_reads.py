"""Tables on the store: by blocks and rows where they have no buffer, and as a whole beyond the budget."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from memascend.common.sizes import format_size
from memascend.streaming.cache import NoBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend._memascend import LeaseBuffer, Ticket
    from memascend.common.turns import Turns
    from memascend.layout.units import Unit
    from memascend.streaming.cache import WeightCache
    from memascend.streaming.order import UseOrder

_log = logging.getLogger("memascend")

#: What reads a unit by its parts, and how memory is planned for the whole.
_BY_BLOCKS = "lookups and the loss read it by blocks (fused_loss=False plans memory for the whole)"
_BY_EXPERTS = "products with one expert read that alone (experts='whole' plans memory for the whole)"


class TableReads:
    """Prepares the reads of tables, and provides the buffers of their blocks."""

    def __init__(
        self,
        cache: WeightCache,
        prefetch: Callable[[], None],
        *,
        order: UseOrder[Unit],
        turns: Turns,
        block_bytes: int,
    ) -> None:
        """Read the tables of `cache` by blocks of `block_bytes`; `prefetch` fetches ahead by `order`."""
        self.runtime = cache.runtime
        self.timeline = cache.timeline
        self._cache = cache
        self._order = order
        self.prefetch = prefetch
        self._turns = turns
        self.block_bytes = block_bytes
        #: Tables that a warning has named.
        self.named: set[Unit] = set()
        #: Experts that were used since other units were.
        self._by_turns: set[Unit] = set()

    def is_streamed(self, unit: Unit) -> bool:
        """Return whether a unit is a table for which there is no buffer: it is read by blocks and by rows."""
        return unit in self._cache.streamed

    def use_table(self, unit: Unit) -> Ticket | None:
        """Begin the deferred update of a table that is about to be read by blocks, and prefetch other units.

        Returns the update under way, whose groups are the table's blocks; None if the table is up to date.
        """
        with self._turns.take("the use of a table"):
            self._order.record(unit)
            return self._begin(unit)

    def _begin(self, unit: Unit) -> Ticket | None:
        cache, cached = self._cache, self._cache.cached_units[unit]
        cache.write_back(cached)
        if cached.updates:
            cache.fetch(unit, None)
        self.prefetch()
        ticket = cached.ticket
        if ticket is not None and not ticket.groups:
            cache.settle(cached)
            ticket = None
        if ticket is None:
            cache.wait_written(unit)
        return ticket

    def use_experts(self, unit: Unit) -> Ticket | None:
        """Begin the deferred update of trained experts that are about to be read one by one, as `use_table` does.

        The parameters of a layer's experts may be used by turns, expert by expert: their first uses predict the others.
        """
        with self._turns.take("the use of a table"):
            if self._order.latest not in self._by_turns:
                self._by_turns.clear()
            if unit not in self._by_turns:
                self._by_turns.add(unit)
                self._order.record(unit)
            return self._begin(unit)

    def finish_writes(self, unit: Unit) -> None:
        """Wait until the program's writes to a unit are on the store. This is no use that predicts others."""
        with self._turns.take("the use of a table"):
            self._cache.write_back(self._cache.cached_units[unit])
            self._cache.wait_written(unit)

    @property
    def comes_back(self) -> bool:
        """Whether the present pass uses units a second time, in the opposite order: it has a backward pass."""
        return self._order.kind is True

    def finish_update(self, unit: Unit) -> None:
        """Wait for the end of a table's update that is under way."""
        cached = self._cache.cached_units[unit]
        if cached.ticket is not None:
            self._cache.settle(cached)
        self._cache.wait_written(unit)

    def spare_blocks(self) -> list[LeaseBuffer]:
        """Return a buffer for a block of a table, in a list, which is empty if none is free."""
        lease = self.runtime.memory.lease_unit(self.block_bytes)
        return [] if lease is None else [lease]

    def lease_block(self) -> LeaseBuffer:
        """Return a buffer for a block of a table, if need be after the oldest copy out of one to a device.

        Raises NoBufferError if all are in use: other tables are being read.
        """
        while not (leases := self.spare_blocks()):
            if not self._cache.uploads.wait_oldest(self.block_bytes):
                raise NoBufferError(
                    "no buffer for a block of a table is free: blocks of other tables are being read; drop references "
                    "to rows of embeddings and heads"
                )
        return leases[0]

    def name_whole(self, unit: Unit) -> None:
        """Warn the first time that a table without a buffer is in use as a whole, beyond the budget."""
        if unit not in self.named:
            self.named.add(unit)
            _log.warning(
                "%s is used as a whole: this takes %s beyond the budget for as long as it is in use; %s",
                unit.name,
                format_size(unit.nbytes),
                _BY_EXPERTS if unit.is_experts else _BY_BLOCKS,
            )
