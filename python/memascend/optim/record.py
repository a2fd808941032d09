"""What a store keeps of an optimizer, so that a resumed run has it again: JSON values, and no tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from memascend._memascend import Rule
from memascend.durable import exact_json
from memascend.optim.homes import OnModel

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memascend.durable.protocols import Session
    from memascend.optim.homes import Homes


def trains_only(optimizer: Optimizer, session: Session) -> bool:
    """Whether every parameter of an optimizer is of the model that `session` offloads."""
    offloaded = {id(place.parameter) for place in session.places}
    return all(id(parameter) in offloaded for group in optimizer.param_groups for parameter in group["params"])


def describe(optimizer: Optimizer, homes: Homes, session: Session) -> dict[str, Any]:
    """Return the options, step counts and rules of an optimizer, by the names of parameters."""
    places = {id(place.parameter): place for place in session.places}
    groups, states, numbers = [], {}, {}
    for group in optimizer.param_groups:
        names = []
        for parameter in group["params"]:
            place = places[id(parameter)]
            names.append(place.name)
            numbers[place.name] = homes.numbers[parameter]
            rule, state = homes.rules.get(parameter), optimizer.state.get(parameter, {})
            is_owner = place.owner is not None and place.owner() is optimizer
            if is_owner and rule is not None and "step" in state:
                states[place.name] = [state["step"], rule.arguments, [plane.name for plane in place.made]]
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(exact_json.encode(options, "a group's options") | {"params": names})
    return {
        "class": type(optimizer).__name__,
        "defaults": exact_json.encode(optimizer.defaults, "the defaults"),
        "groups": groups,
        "states": states,
        "numbers": numbers,
    }


def take_up(optimizer: Optimizer, homes: Homes, described: dict[str, Any]) -> None:
    """Have a new optimizer go on as the one that was described; the store has the states of its parameters."""
    optimizer.defaults.update(described["defaults"])
    homes.numbers.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            home = homes.of(parameter)
            assert isinstance(home, OnModel)
            place = home.place
            homes.numbers[parameter] = described["numbers"][place.name]
            home.session.generations.join(homes.optimizer)
            if place.name not in described["states"]:
                continue
            step, arguments, made = described["states"][place.name]
            rule = Rule(*arguments)
            homes.rules[parameter] = place.rule = rule
            place.owner = weakref.ref(optimizer)
            place.made = {plane for plane in rule.planes if plane.name in made}
            optimizer.state[parameter] = {"step": step}
