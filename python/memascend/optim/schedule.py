"""The updates of one optimizer step, sorted by where they run."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from memascend._memascend import step_host
from memascend.optim.host_copies import HostCopies, Operands, write_back
from memascend.streaming.updates import TensorUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.layout.units import ParameterEntry, StoreTensor, Unit
    from memascend.optim.state_store import OptimizerStateStore
    from memascend.session.session import Session
    from memascend.streaming.updates import Segment


class Schedule:
    """The updates of one step. Adding to it changes nothing; `defer` and `run` do.

    Updates of offloaded models are deferred to the next fetch of their units. Updates on the optimizer's own stores
    run at once, a store at a time, and those in memory a parameter at a time.
    """

    def __init__(self) -> None:
        """Begin with no updates."""
        #: Functions that run before any update: each gives one update its factors, from the whole gradient.
        self.first: list[Callable[[], None]] = []
        #: Also for units without a share in a rank's store: the rank takes the step as the others do.
        self._deferred: defaultdict[Session, dict[Unit, dict[StoreTensor, TensorUpdate]]] = defaultdict(dict)
        self._on_stores: defaultdict[OptimizerStateStore, dict[StoreTensor, TensorUpdate]] = defaultdict(dict)
        self._store_operands: list[Operands] = []
        self._in_memory: list[tuple[Segment, list[torch.Tensor], Operands]] = []

    def add_deferred(self, session: Session, place: ParameterEntry, segment: Segment) -> None:
        """Add the update of a parameter of an offloaded model, or of none of its elements."""
        updates = self._deferred[session].setdefault(place.tensor.unit, {})
        if segment.numel:
            _add_segment(updates, place, segment, captured=True)

    def add_on_store(
        self, store: OptimizerStateStore, place: ParameterEntry, segment: Segment, operands: Operands
    ) -> None:
        """Add the update of an ordinary parameter whose states are on a store of the optimizer's own."""
        _add_segment(self._on_stores[store], place, segment, captured=False)
        self._store_operands.append(operands)

    def add_in_memory(self, segment: Segment, states: list[torch.Tensor], operands: Operands) -> None:
        """Add the update of an ordinary parameter whose `states`, one per plane of the rule, are in memory.

        The operands may be on a device: they are copied when the update runs.
        """
        self._in_memory.append((segment, states, operands))

    @property
    def sessions(self) -> list[Session]:
        """The offloaded models that the step trains."""
        return list(self._deferred)

    def release(self) -> None:
        """Drop the units that change from host memory. Raises MemascendError if one of them is in use."""
        for session, units in self._deferred.items():
            for unit in units:
                session.streamer.release(unit)

    def defer(self) -> None:
        """Hand the updates of offloaded models to the fetches that will carry them out."""
        for session, units in self._deferred.items():
            for unit, updates in units.items():
                for update in updates.values():
                    update.divide()
                session.streamer.updates.defer(unit, list(updates.values()))

    def run(self, copies: HostCopies) -> None:
        """Carry out the updates of ordinary parameters; those on a device go through `copies`."""
        waiting = iter(self._in_memory)
        for group in copies.groups([(operands.weight, operands.gradient) for _, _, operands in self._in_memory]):
            for weight, gradient in group:
                segment, states, there = next(waiting)
                operands = Operands(there.parameter, weight, gradient)
                _update(segment, states, operands)
                operands.copy_back()
        for store, updates in self._on_stores.items():
            for update in updates.values():
                update.divide()
            store.run(list(updates.values()))
        write_back(self._store_operands)


def _update(segment: Segment, states: list[torch.Tensor], operands: Operands) -> None:
    weight, gradient = operands.addresses
    for part in segment.updated:
        first = part.start - segment.start
        step_host(
            part.rule,
            part.numel,
            weight + first * operands.weight.element_size(),
            [state.data_ptr() + first * state.element_size() for state in states],
            gradient + first * operands.gradient.element_size(),
            part.scalars,
            torch.get_num_threads(),
            part.factors,
        )


def _add_segment(
    updates: dict[StoreTensor, TensorUpdate], place: ParameterEntry, segment: Segment, captured: bool
) -> None:
    """Add one parameter's part to the update of its tensor."""
    update = updates.get(place.tensor)
    if update is None:
        update = updates[place.tensor] = TensorUpdate(place.tensor, captured=captured)
    update.segments.append(segment)
