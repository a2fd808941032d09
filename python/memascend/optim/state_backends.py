"""The three backends of a parameter's optimizer state: a model's store, a store of the optimizer's own, and memory.

A step asks the backend to prepare, to work and to load, and does not look which one it is.

An entry knows which of its states were made, and by which optimizer. A segment says for each plane whether it is new: a
new plane counts as zeros, whatever lies on the SSD. So parameters of a pack may begin in different steps, and begin
anew when a loaded dictionary has no states for them. A second optimizer begins anew with its first step, the planes
that only the first one kept are freed, and the first is told if it steps again. An fp16 weight that is not its master
rounded becomes the master: a master needs no making, and weights that the user sets are not lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.durability.added import added_parameters
from memascend.layout.registry import place_of
from memascend.optim.offloaded_state import OffloadedState
from memascend.optim.ordinary_states import MemoryState, StoreState
from memascend.optim.state_allocation import allocate
from memascend.optim.state_backend import BackendContext
from memascend.session.session import open_sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import StateBackend
    from memascend.session.session import Session


class StateBackends(BackendContext):
    """Where the states of one optimizer's parameters live."""

    @property
    def on_drives(self) -> bool:
        """Whether any state is on a drive."""
        return bool(self.sessions) or (self.state_stores is not None and self.state_stores.any_made)

    def of(self, parameter: nn.Parameter) -> StateBackend:
        """Return a parameter's backend as it is now: the parameter may be offloaded, or its model closed, later."""
        session_and_place = place_of(parameter)
        if session_and_place is not None:
            return OffloadedState(self, parameter, *session_and_place)
        if self.state_stores is not None:
            return StoreState(self, parameter, self.state_stores)
        return MemoryState(self, parameter)

    def make(self, room: StateAllocation) -> None:
        """Make the room that parameters have asked for."""
        for session, tensors in room.on_sessions.items():
            if not self.optimizer.trains_only(session):
                session.refuse_ranks(
                    "training other parameters with the same optimizer",
                    "add adapters before memascend.offload, and have an optimizer for each model",
                )
            allocate(session, tensors, room.moments[session], self.optimizer)
            if session not in self.sessions:
                self.sessions.append(session)
            session.commit_log.join(self.optimizer)
        if room.on_own_store:
            assert self.state_stores is not None
            self.state_stores.reserve(room.on_own_store)

    @property
    def joined(self) -> list[Session]:
        """The offloaded models whose generations have any of this optimizer's states."""
        return list(dict.fromkeys([*self.sessions, *self.beside]))

    def join_beside(self, groups: Iterable[dict[str, Any]]) -> None:
        """Have steps be durable with the models that ordinary parameters were added to, where that is asked for."""
        ordinary = {id(p) for group in groups for p in group["params"] if p.requires_grad and place_of(p) is None}
        for session in open_sessions() if ordinary else ():
            added = {id(parameter) for parameter in added_parameters(session).values()}
            if not ordinary & added:
                session.commit_log.check_beside(self.optimizer)
            elif session not in self.beside and session.commit_log.join_beside(self.optimizer):
                self.beside.append(session)

    def bring(self, backends: Iterable[tuple[StateBackend, bool]]) -> None:
        """Copy weights and gradients of a device to host memory, for updates on a store of the optimizer's own.

        Beside each backend stands whether something is found from the whole gradient before the update.
        """
        away = [
            backend
            for backend, whole in backends
            if backend.gradient_is_away and (whole or isinstance(backend, StoreState))
        ]
        operands = self.copies.operands([(backend.parameter, backend.check_gradient()) for backend in away])
        self.brought = {each.parameter: each for each in operands}

    def gradient_stats(self, backends: Sequence[StateBackend]) -> list[tuple[float, bool]]:
        """Return what `StateBackend.gradient_stats` does of each, with one wait for many gradients of a device."""
        away = [backend for backend in backends if backend.gradient_is_away]
        measured = dict(zip(away, self.copies.stats([backend.check_gradient() for backend in away]), strict=True))
        return [measured[backend] if backend in measured else backend.gradient_stats() for backend in backends]

    def flush(self) -> None:
        """Apply deferred updates, and wait until all states are on the drives."""
        for session in self.sessions:
            if not session.closed:
                session.flush()
        if self.state_stores is not None:
            self.state_stores.flush()
