"""The three homes of a parameter's optimizer state: a model's store, a store of the optimizer's own, and memory.

A step asks the home to prepare, to work and to load, and does not look which one it is.

A place knows which of its states were made, and by which optimizer. A segment says for each plane whether it is new: a
new plane counts as zeros, whatever lies on the SSD. So parameters of a pack may begin in different steps, and begin
anew when a loaded dictionary has no states for them. A second optimizer begins anew with its first step, the planes
that only the first one kept are freed, and the first is told if it steps again. An fp16 weight that is not its master
rounded becomes the master: a master needs no making, and weights that the user sets are not lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.offloading.places import place_of
from memascend.optim.home import HomeContext
from memascend.optim.on_model import OnModel
from memascend.optim.ordinary import InMemory, OnStore
from memascend.optim.room import make_room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memascend.optim.home import Home
    from memascend.optim.room import Room


class Homes(HomeContext):
    """Where the states of one optimizer's parameters live."""

    @property
    def on_drives(self) -> bool:
        """Whether any state is on a drive."""
        return bool(self.sessions) or (self.own_stores is not None and self.own_stores.any_made)

    def of(self, parameter: nn.Parameter) -> Home:
        """Return a parameter's home as it is now: the parameter may be offloaded, or its model closed, later."""
        session_and_place = place_of(parameter)
        if session_and_place is not None:
            return OnModel(self, parameter, *session_and_place)
        if self.own_stores is not None:
            return OnStore(self, parameter, self.own_stores)
        return InMemory(self, parameter)

    def make(self, room: Room) -> None:
        """Make the room that parameters have asked for."""
        for session, tensors in room.on_sessions.items():
            if session.membership is not None and not self.optimizer.trains_only(session):
                session.refuse_ranks(
                    "training other parameters with the same optimizer",
                    "add adapters before memascend.offload, and have an optimizer for each model",
                )
            make_room(session, tensors, room.moments[session], self.optimizer)
            if session not in self.sessions:
                self.sessions.append(session)
            session.generations.join(self.optimizer)
        if room.on_own_store:
            assert self.own_stores is not None
            self.own_stores.reserve(room.on_own_store)

    def bring(self, homes: Iterable[tuple[Home, bool]]) -> None:
        """Copy weights and gradients of a device to host memory, for updates on a store of the optimizer's own.

        Beside each home stands whether something is found from the whole gradient before the update.
        """
        away = [home for home, whole in homes if home.gradient_is_away and (whole or isinstance(home, OnStore))]
        operands = self.copies.operands([(home.parameter, home.check_gradient()) for home in away])
        self.brought = {each.parameter: each for each in operands}

    def gradient_stats(self, homes: Sequence[Home]) -> list[tuple[float, bool]]:
        """Return what `Home.gradient_stats` does of each, with one wait for many gradients of a device."""
        away = [home for home in homes if home.gradient_is_away]
        measured = dict(zip(away, self.copies.stats([home.check_gradient() for home in away]), strict=True))
        return [measured[home] if home in measured else home.gradient_stats() for home in homes]

    def flush(self) -> None:
        """Apply deferred updates, and wait until all states are on the drives."""
        for session in self.sessions:
            if not session.closed:
                session.flush()
        if self.own_stores is not None:
            self.own_stores.flush()
