"""The registry of offloaded parameters: the session of each, and its entry there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from memascend.layout.units import ParameterEntry
    from memascend.ranks.group import Ranks

#: Weak references to (Session, ParameterEntry), by identity of the parameter.
_registry = WeakIdKeyDictionary()


def register(session: object, place: ParameterEntry) -> None:
    """Register the entry of a parameter, so that optimizers find it. References to both are weak."""
    _registry[place.parameter] = (weakref.ref(session), weakref.ref(place))


def place_of(parameter: nn.Parameter | torch.Tensor) -> tuple[Any, ParameterEntry] | None:
    """Return the session and the entry of an offloaded parameter, or None for an ordinary one.

    The session is a `memascend.session.session.Session`, which imports this module.
    """
    references = _registry.get(parameter)
    if references is None:
        return None
    session, place = (reference() for reference in references)
    return None if session is None or place is None else (session, place)


def ranks_of(parameters: Iterable[torch.Tensor]) -> Ranks | None:
    """Return the ranks that the store of any of the parameters is divided over; None where none is."""
    located = (place_of(parameter) for parameter in parameters)
    ranks = (entry[0].membership.ranks for entry in located if entry is not None)
    return next(filter(None, ranks), None)


def finish_gradient(place: ParameterEntry) -> None:
    """Wait until a gradient on its way from a device has arrived, and its norm is known."""
    located = place_of(place.parameter)
    if located is not None:
        session, _ = located
        session.gradients.finish(place)
