"""Room on drives for gradients and states: asked for by several parameters, then made for all or for none."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memascend.layout.parameter_state import StoreMoments
from memascend.layout.units import StorePlane
from memascend.streaming.resident_states import share_room

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memascend._memascend import Plane, Rule, Runtime, TensorId
    from memascend.durability.protocols import OptimizerProtocol
    from memascend.layout.units import ParameterEntry, StoreTensor
    from memascend.session.session import Session


@dataclass(slots=True)
class StateAllocation:
    """The states that parameters ask for before any of them is made."""

    #: Tensors of offloaded models, with the rules of the parameters that ask.
    on_sessions: defaultdict[Session, dict[StoreTensor, list[Rule]]] = field(default_factory=lambda: defaultdict(dict))
    #: Ordinary parameters that have no room on a store of the optimizer's own yet.
    on_own_store: dict[nn.Parameter, Rule] = field(default_factory=dict)
    #: Parameters of offloaded models whose moments of projected gradients have no room yet, with their elements.
    moments: defaultdict[Session, dict[ParameterEntry, int]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, session: Session, tensor: StoreTensor, rule: Rule) -> None:
        """Ask for the gradient of a tensor of an offloaded model, and for the states that `rule` keeps."""
        self.on_sessions[session].setdefault(tensor, []).append(rule)

    def add_moments(self, session: Session, place: ParameterEntry, numel: int) -> None:
        """Ask for the moments of a parameter's projected gradient, `numel` float32 in all."""
        self.on_sessions[session].setdefault(place.tensor, [])
        self.moments[session][place] = numel


def missing_planes(tensor: StoreTensor, rule: Rule) -> list[Plane]:
    """Return the states of `rule` for which a tensor has no room yet."""
    return [plane for plane in rule.planes if plane not in tensor.planes]


def allocate_states(runtime: Runtime, tensor: StoreTensor, rule: Rule) -> None:
    """Make room for the states that a tensor lacks; they begin as zeros without being written."""
    for plane in missing_planes(tensor, rule):
        name = f"{tensor.name}.{plane.name}"
        if runtime.store.find_tensor(name) is not None:
            # Two optimizers share a pack, and keep states of this name in different dtypes.
            name = f"{name}.{plane.dtype}"
        tensor.planes[plane] = StorePlane(plane, name, runtime.store.create_tensor(name, plane.bytes(tensor.numel)))


def _allocate_moments(runtime: Runtime, place: ParameterEntry, numel: int) -> None:
    name = f"{place.name}.moments"
    place.states.moments = StoreMoments(name, runtime.store.create_tensor(name, numel * torch.float32.itemsize), numel)


def free_unused_states(runtime: Runtime, tensor: StoreTensor) -> None:
    """Remove the states that no parameter of a tensor uses any more. No transfer of its unit may be under way."""
    used = {plane for place in tensor.places if place.states.rule is not None for plane in place.states.rule.planes}
    for plane in [plane for plane in tensor.planes if plane not in used]:
        runtime.store.remove_tensor(tensor.planes.pop(plane).id)


def _missing_state_bytes(tensors: dict[StoreTensor, list[Rule]], moments: dict[ParameterEntry, int]) -> int:
    """Return the bytes of states that have no room yet."""
    nbytes = sum(numel * torch.float32.itemsize for numel in moments.values())
    for tensor, rules in tensors.items():
        planes = {plane for rule in rules for plane in missing_planes(tensor, rule)}
        nbytes += sum(plane.bytes(tensor.numel) for plane in planes)
    return nbytes


def _missing_gradient_bytes(tensors: Iterable[StoreTensor], moments: dict[ParameterEntry, int]) -> int:
    """Return the bytes of gradients that have no room yet: they may spill to the drives, too."""
    # Captured gradients of matrices are stored projected too: half as much, and a sum for each channel.
    of_matrices = (numel for place, numel in moments.items() if len(place.shape) == 2)
    captured = (tensor.nbytes for tensor in tensors if not tensor.packed and tensor.gradient is None)
    return sum(of_matrices) * torch.float32.itemsize + sum(captured)


def _stored(tensor: StoreTensor) -> list[TensorId]:
    """Return the numbers, in the store, of a tensor that is there, of its states and of its parameters' moments."""
    moments = (place.states.moments for place in tensor.places)
    weights = () if tensor.id is None else (tensor.id,)
    planes = (plane.id for plane in tensor.planes.values())
    return [*weights, *planes, *(stored.id for stored in moments if stored is not None)]


def allocate(
    session: Session,
    tensors: dict[StoreTensor, list[Rule]],
    moments: dict[ParameterEntry, int],
    optimizer: OptimizerProtocol,
) -> None:
    """Make room for the states and gradients of tensors of an offloaded model, and for `moments` of parameters.

    Before anything has been allocated, raises StoreError where the drives have no room for all of it, and
    MemascendError where host memory has none for the gradients of what was frozen when the model was offloaded.
    """
    session.gradients.later.check(tensors)
    session.commit_log.wait_committed()
    runtime = session.runtime
    missing_state_bytes = _missing_state_bytes(tensors, moments)
    missing_bytes = missing_state_bytes + _missing_gradient_bytes(tensors, moments)
    # The second slots, which the durable generation occupies while the next one is written.
    spare_bytes = missing_state_bytes
    spare_bytes += sum(runtime.store.spare_bytes(number) for tensor in tensors for number in _stored(tensor))
    two_slots = session.commit_log.decide(optimizer, missing_bytes, spare_bytes)
    runtime.store.check_room(missing_bytes + (spare_bytes if two_slots else 0))
    for tensor, rules in tensors.items():
        session.gradients.allocate(tensor)
        for rule in rules:
            allocate_states(runtime, tensor, rule)
        for place in tensor.places:
            if place in moments:
                _allocate_moments(runtime, place, moments[place])
        if two_slots:
            for number in _stored(tensor):
                runtime.store.make_spare(number)
    share_room(session.plan, [tensor for unit in session.units for tensor in unit.tensors])
