"""The record of an optimizer in a store, for resumed runs: JSON values, and no tensors."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import Rule
from memascend.durability import exact_json
from memascend.durability.added import PREFIX, added_parameters
from memascend.errors import INCOMPLETE, CheckpointError
from memascend.layout.parameter_state import StoreMoments
from memascend.layout.units import StorePlane, raw_tensor_access
from memascend.optim.offloaded_state import OffloadedState
from memascend.optim.state_allocation import StateAllocation

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memascend._memascend import TensorId
    from memascend.durability.protocols import SessionProtocol
    from memascend.optim.state_backend import StateBackend
    from memascend.optim.state_backends import StateBackends


def empty_parameters(session: SessionProtocol) -> dict[str, nn.Parameter]:
    """Return the parameters without elements of the model that `session` offloads, by name: they have no entry."""
    model = session.model()
    named = () if model is None else model.named_parameters()
    with raw_tensor_access():
        return {name: parameter for name, parameter in named if parameter.numel() == 0}


def trains_only(optimizer: Optimizer, session: SessionProtocol) -> bool:
    """Return whether every parameter of an optimizer is of the model that `session` offloads, and on its store."""
    return not _others(optimizer, session)


def _others(optimizer: Optimizer, session: SessionProtocol) -> set[int]:
    """Return the identities of an optimizer's parameters that are not on the store of `session`."""
    offloaded = {id(place.parameter) for place in session.places}
    offloaded |= {id(parameter) for parameter in empty_parameters(session).values()}
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} - offloaded


def can_be_recorded(optimizer: Optimizer, backends: StateBackends, session: SessionProtocol) -> bool:
    """Return whether generations of `session` can have the states of all parameters of an optimizer.

    Those that are not on the store have to be added to the model, with states in memory, in one process.
    """
    others = _others(optimizer, session)
    if not others:
        return True
    if session.membership.divides or backends.state_stores is not None:
        return False
    return others <= {id(parameter) for parameter in added_parameters(session).values()}


def added_states(optimizer: Optimizer, session: SessionProtocol) -> dict[str, dict[str, torch.Tensor]]:
    """Return the states in memory of an optimizer's parameters that were added to the model of `session`, by name."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        name: {
            key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, torch.Tensor)
        }
        for name, parameter in added_parameters(session).items()
        if id(parameter) in trained
    }


def restore_added(
    optimizer: Optimizer,
    backends: StateBackends,
    described: dict[str, Any],
    states: dict[str, dict[str, torch.Tensor]],
) -> None:
    """Give an optimizer of added parameters their step counts and rules as described, and their `states`."""
    for group, described_group in zip(optimizer.param_groups, described["groups"], strict=True):
        for parameter, name in zip(group["params"], described_group["params"], strict=True):
            if name in described.get("added", {}):
                arguments, numbers = described["added"][name]
                backends.rules[parameter] = Rule(*arguments)
                optimizer.state[parameter] = {**numbers, **states.get(name, {})}


def describe(optimizer: Optimizer, backends: StateBackends, session: SessionProtocol) -> dict[str, Any]:
    """Return the options, step counts and rules of an optimizer, by the names of parameters."""
    places = {id(place.parameter): place for place in session.places}
    empty_names = {id(parameter): name for name, parameter in empty_parameters(session).items()}
    added_names = {id(parameter): name for name, parameter in added_parameters(session).items()}
    groups, states, empty, added, numbers = [], {}, {}, {}, {}
    for group in optimizer.param_groups:
        names = []
        for parameter in group["params"]:
            place = places.get(id(parameter))
            name = (empty_names | added_names)[id(parameter)] if place is None else place.name
            names.append(name)
            numbers[name] = backends.numbers[parameter]
            rule, state = backends.rules.get(parameter), optimizer.state.get(parameter, {})
            if rule is None or "step" not in state:
                continue
            if id(parameter) in added_names:
                values = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
                added[name] = [rule.arguments, exact_json.encode(values, f"the state of {name}")]
            elif place is None:
                empty[name] = [int(state["step"]), rule.arguments]
            elif place.states.owner is optimizer:
                states[name] = [int(state["step"]), rule.arguments, [plane.name for plane in place.states.made]]
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(exact_json.encode(options, "a group's options") | {"params": names})
    return {
        "class": type(optimizer).__name__,
        "defaults": exact_json.encode(optimizer.defaults, "the defaults"),
        "groups": groups,
        "states": states,
        "empty": empty,
        "numbers": numbers,
    } | ({"added": added} if added else {})


def restore(optimizer: Optimizer, backends: StateBackends, described: dict[str, Any]) -> None:
    """Have a new optimizer go on as the one that was described; the store has the states of its parameters."""
    optimizer.defaults.update(described["defaults"])
    backends.numbers.clear()
    empty = described.get("empty", {})
    for group, described_group in zip(optimizer.param_groups, described["groups"], strict=True):
        for parameter, name in zip(group["params"], described_group["params"], strict=True):
            backend = backends.of(parameter)
            backends.numbers[parameter] = described["numbers"][name]
            if not isinstance(backend, OffloadedState):
                if name in empty:
                    _restore_empty(optimizer, backend, *empty[name])
                continue
            place = backend.place
            backend.session.commit_log.join(backends.optimizer)
            if place.name not in described["states"]:
                continue
            step, arguments, made = described["states"][place.name]
            rule = Rule(*arguments)
            backends.rules[parameter] = rule
            place.states.claim(optimizer, rule)
            place.states.made = {plane for plane in rule.planes if plane.name in made}
            backend.note_step(step)


def _restore_empty(optimizer: Optimizer, backend: StateBackend, step: int, arguments: list[Any]) -> None:
    """Give a parameter without elements its count of steps, and states without elements."""
    rule = Rule(*arguments)
    backend.backends.rules[backend.parameter] = rule
    optimizer.state[backend.parameter] = {"step": step}
    backend.prepare_step(rule, StateAllocation())


def find_states(session: SessionProtocol, record: dict[str, Any]) -> None:
    """Give every tensor the planes of its optimizer's states, and remove states that were never written."""
    _find_planes(session, record)
    _find_moments(session, record)
    _remove_unused(session)


def _remove_unused(session: SessionProtocol) -> None:
    """Remove states that have room in the store and were never written: they begin anew when they are needed."""
    runtime = session.runtime
    tensors = [tensor for unit in session.units for tensor in unit.tensors]
    used = {tensor.name for tensor in tensors}
    used |= {store_plane.name for tensor in tensors for store_plane in tensor.planes.values()}
    used |= {place.states.moments.name for place in session.places if place.states.moments is not None}
    for name in runtime.store.tensor_names():
        if name not in used and not name.startswith((".buffers", PREFIX)):
            tensor_id = runtime.store.find_tensor(name)
            assert tensor_id is not None
            runtime.store.remove_tensor(tensor_id)


def _find_planes(session: SessionProtocol, record: dict[str, Any]) -> None:
    """Give every tensor the planes of its optimizer's states."""
    names = {
        (tensor["name"], plane, dtype): name
        for unit in record["units"]
        for tensor in unit["tensors"]
        for name, plane, dtype in tensor["states"]
    }
    rules: defaultdict[str, list[Rule]] = defaultdict(list)
    for optimizer in record["optimizers"]:
        for name, (_, arguments, _) in optimizer["states"].items():
            rules[name].append(Rule(*arguments))
    for place in session.places:
        for plane in (plane for rule in rules[place.name] for plane in rule.planes):
            name = names.get((place.tensor.name, plane.name, plane.dtype))
            if name is not None and plane not in place.tensor.planes:
                tensor_id = _needed(session, name)
                place.tensor.planes[plane] = StorePlane(plane, name, tensor_id, written=True)


def _needed(session: SessionProtocol, name: str) -> TensorId:
    """Return the number of a tensor of the optimizer's in the store. Raises CheckpointError where it is not there."""
    tensor_id = session.runtime.store.find_tensor(name)
    if tensor_id is None:
        raise CheckpointError(f"the store has no {name}, which the optimizer needs: {INCOMPLETE}")
    return tensor_id


def _find_moments(session: SessionProtocol, record: dict[str, Any]) -> None:
    """Give every parameter the moments of its projected gradients."""
    places = {place.name: place for place in session.places}
    for tensor in (tensor for unit in record["units"] for tensor in unit["tensors"]):
        for place_name, name, numel in tensor["moments"]:
            places[place_name].states.moments = StoreMoments(name, _needed(session, name), numel, written=True)
