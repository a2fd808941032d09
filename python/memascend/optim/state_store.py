"""Stores that an optimizer makes for the states of ordinary parameters, which no offloaded model owns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memascend.common.sizes import parse_size
from memascend.hardware.threads import update_threads
from memascend.layout.units import Unit, lay_out
from memascend.memory_plan.host import make_states_plan
from memascend.optim.state_allocation import allocate_states
from memascend.session.runtime import close_at_exit, open_runtime
from memascend.streaming.resident_states import share_room

if TYPE_CHECKING:
    from torch import nn

    from memascend._memascend import Rule
    from memascend.layout.units import ParameterEntry
    from memascend.options import StorePaths, Tuning
    from memascend.streaming.updates import TensorUpdate


class OptimizerStateStore:
    """A store that holds the optimizer states of some ordinary parameters. Their weights stay in memory."""

    def __init__(
        self,
        rules: dict[nn.Parameter, Rule],
        paths: StorePaths,
        host_memory: str | int | None,
        tuning: Tuning,
    ) -> None:
        """Create the store in `paths` with room for the states that each parameter's rule keeps.

        Raises StoreError, leaving no files behind, where the drives have no room for all of them.
        """
        self.unit = Unit("parameters", repeated=False)
        lay_out(self.unit, ((f"parameter{index}", parameter) for index, parameter in enumerate(rules)))
        on_device = any(parameter.device.type != "cpu" for parameter in rules)
        threads = update_threads(on_device, tuning.get("compute_threads"))
        plan = make_states_plan(self.unit, None if host_memory is None else parse_size(host_memory), threads)
        self.runtime = open_runtime(plan, paths, tuning)
        try:
            self.unit.index = self.runtime.units.add_unit()
            planes = {(place.tensor, plane) for place in self.unit.places for plane in rules[place.parameter].planes}
            self.runtime.store.check_room(sum(plane.bytes(tensor.numel) for tensor, plane in planes))
            for place in self.unit.places:
                allocate_states(self.runtime, place.tensor, rules[place.parameter])
            share_room(plan, self.unit.tensors)
        except BaseException:
            self.runtime.close(keep=False)
            raise
        close_at_exit(self)

    def run(self, updates: list[TensorUpdate]) -> None:
        """Carry out `updates` and wait until the new states are on the drives, or in memory to stay there."""
        for update in updates:
            update.write_through = False  # nothing goes on from such a store
        ticket = self.runtime.units.fetch(self.unit.index, [], None, updates)
        for update in updates:
            update.started()
        ticket.wait()
        self.runtime.units.wait_unit(self.unit.index)

    def flush(self) -> None:
        """Wait until everything written is on the drives."""
        if not self.runtime.closed:
            self.runtime.units.wait_unit(self.unit.index)

    def close(self, failed: bool = False, ended: bool = False) -> None:
        """Remove the store's files."""
        self.runtime.close(keep=False)


class OptimizerStateStores:
    """All stores that one optimizer makes below the directories that it was given: one per group of parameters."""

    def __init__(self, paths: StorePaths, host_memory: str | int | None, tuning: Tuning) -> None:
        """Remember where stores go and how they are opened; the first call of `reserve` makes one."""
        self._paths = paths
        self._host_memory = host_memory
        self._tuning = tuning
        self._stores: list[OptimizerStateStore] = []
        self._locations: dict[nn.Parameter, tuple[OptimizerStateStore, ParameterEntry]] = {}

    @property
    def any_made(self) -> bool:
        """Whether there is a store yet."""
        return bool(self._stores)

    def reserve(self, rules: dict[nn.Parameter, Rule]) -> None:
        """Make a store for the states of these parameters, which have none yet."""
        store = OptimizerStateStore(rules, self._next_paths(), self._host_memory, self._tuning)
        self._stores.append(store)
        self._locations |= {place.parameter: (store, place) for place in store.unit.places}

    def location(self, parameter: nn.Parameter) -> tuple[OptimizerStateStore, ParameterEntry] | None:
        """Return the store that holds a parameter's states and their entry there, or None before `reserve`."""
        return self._locations.get(parameter)

    def flush(self) -> None:
        """Wait until everything written is on the drives."""
        for store in self._stores:
            store.flush()

    def close(self) -> None:
        """Remove the files of every store."""
        # Later stores lie inside the first one's directories, so they go first.
        for store in reversed(self._stores):
            store.close()

    def _next_paths(self) -> StorePaths:
        """Return the directories given, or for parameters added later a new directory inside each of them."""
        if not self._stores:
            return self._paths
        paths = [self._paths] if isinstance(self._paths, str | os.PathLike) else list(self._paths)
        return [os.path.join(path, f"group{len(self._stores)}") for path in paths]
