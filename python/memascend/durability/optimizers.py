"""The optimizers of a run, as the records of its generations describe them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from memascend.durability import exact_json

if TYPE_CHECKING:
    from memascend.durability.protocols import OptimizerProtocol, SessionProtocol


class JoinedOptimizers:
    """The optimizers that train one model, the oldest first, and the latest description of each."""

    def __init__(self) -> None:
        """Begin without optimizers."""
        self._entries: list[_Entry] = []

    def __bool__(self) -> bool:
        """Return whether any optimizer has joined whose states are still in the store."""
        return bool(self._entries)

    @property
    def living(self) -> list[OptimizerProtocol]:
        """The optimizers that the program still has."""
        return [optimizer for entry in self._entries if (optimizer := entry.reference()) is not None]

    def join(self, optimizer: OptimizerProtocol) -> None:
        """Add an optimizer, once."""
        if all(joined is not optimizer for joined in self.living):
            self._entries.append(_Entry(optimizer))

    def leave(self, optimizer: OptimizerProtocol) -> None:
        """Remove an optimizer that has taken no step."""
        self._entries = [entry for entry in self._entries if entry.reference() is not optimizer]

    def stepped(self, optimizer: OptimizerProtocol, holds: bool) -> None:
        """Drop noted options. If `holds`, keep the optimizer that has taken a step alive until it is described."""
        for entry in self._entries:
            entry.options = None
            if entry.reference() is optimizer and holds:
                entry.alive = optimizer

    def note_options(self) -> None:
        """Copy the options of all groups, which the program may change before the next step."""
        for entry in self._entries:
            entry.note_options()

    def forget_options(self) -> None:
        """Drop noted options: the next description has the present ones."""
        for entry in self._entries:
            entry.options = None

    def restore_groups(self, described: list[dict[str, Any]]) -> None:
        """Set the options of all groups to those in the descriptions of a resumed run."""
        for entry, recorded in zip(self._entries, described, strict=False):
            optimizer = entry.reference()
            groups = optimizer.param_groups if optimizer else ()
            for group, options in zip(groups, recorded["groups"], strict=False):
                group.update({name: value for name, value in options.items() if name != "params"})

    def describe(self, session: SessionProtocol) -> list[dict[str, Any]]:
        """Describe the optimizers, including those that are gone but whose states are still in the store."""
        for entry in self._entries:
            optimizer = entry.reference()
            if optimizer is not None:
                entry.described = optimizer.describe(session) if optimizer.can_be_recorded(session) else None
                entry.restore_options()
            elif entry.described is not None:
                _remove_overtaken(entry.described["states"], session)
                entry.described.pop("added", None)  # In memory, these states went with the optimizer.
            entry.alive = None
        self._entries = [
            entry
            for entry in self._entries
            if entry.reference() is not None or (entry.described is not None and entry.described["states"])
        ]
        return [entry.described for entry in self._entries if entry.described is not None]


def _remove_overtaken(states: dict[str, Any], session: SessionProtocol) -> None:
    """Remove the states, by parameter, that another optimizer has taken over."""
    places = {place.name: place for place in session.places}
    for name in list(states):
        if places[name].states.owner is not None:
            del states[name]


class _Entry:
    """An optimizer of the model, and its latest description."""

    def __init__(self, optimizer: OptimizerProtocol) -> None:
        self.reference: weakref.ref[OptimizerProtocol] = weakref.ref(optimizer)
        #: Outlives the optimizer, since its states stay in the store.
        self.described: dict[str, Any] | None = None
        #: Keeps the optimizer alive from a step until it has been described.
        self.alive: OptimizerProtocol | None = None
        #: The options of its groups when the present pass began.
        self.options: list[dict[str, Any]] | None = None

    def note_options(self) -> None:
        """Copy the options of the groups as they are now."""
        optimizer = self.reference()
        if optimizer is not None:
            self.options = [
                exact_json.encode({name: value for name, value in group.items() if name != "params"}, "a group")
                for group in optimizer.param_groups
            ]

    def restore_options(self) -> None:
        """Put the noted options, if any, into the description."""
        if self.described is not None and self.options is not None:
            for group, options in zip(self.described["groups"], self.options, strict=False):
                group.update(options)
