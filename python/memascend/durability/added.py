"""Parameters that are added to a model after it was offloaded, such as adapters: in memory, with copies in the store.

They and their optimizer's states change in `optimizer.step()` alone, which first waits for the commit of the step
before. So the copies are made with the record, without a snapshot, and a resumed run has all of them from one step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.durability.model_buffers import bytes_of
from memascend.errors import INCOMPLETE, CheckpointError
from memascend.layout.units import raw_tensor_access

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memascend._memascend import Runtime
    from memascend.durability.protocols import OptimizerProtocol, SessionProtocol

#: The store's tensors of copies begin with this. No parameter has such a name.
PREFIX = ".added"
#: Copies up to so many bytes lie in one tensor of the store.
_PACK_BYTES = 64 << 20
#: The name of a parameter's values beside its states.
_VALUES = ""

#: Copies by name of the parameter, and there by name of the state.
Copies = dict[str, dict[str, torch.Tensor]]


class _Copied(NamedTuple):
    """The values of a parameter, or one of its states."""

    parameter: str
    state: str
    tensor: torch.Tensor

    @property
    def described(self) -> list[Any]:
        """How the record describes it: both names, dtype and shape."""
        return [self.parameter, self.state, str(self.tensor.dtype).removeprefix("torch."), list(self.tensor.shape)]


def added_parameters(session: SessionProtocol) -> dict[str, nn.Parameter]:
    """Return the parameters of a session's model that are not on its store, by name; none without elements."""
    model = session.model()
    if model is None:
        return {}
    with raw_tensor_access():
        offloaded = {id(place.parameter) for place in session.places}
        named = model.named_parameters()
        return {name: value for name, value in named if id(value) not in offloaded and value.numel()}


class AddedParameters:
    """The copies of one model's added parameters and of their states."""

    def __init__(self, session: SessionProtocol, runtime: Runtime) -> None:
        """Begin with nothing written to the store of `runtime`."""
        self._session_reference = weakref.ref(session)
        self._runtime = runtime
        #: Packs in the store; None until that was looked at, since a resumed run may have some.
        self._stored: int | None = None

    def write(self, optimizers: Iterable[OptimizerProtocol]) -> list[Any]:
        """Write the parameters that `optimizers` train, and their states, and return their description.

        It is empty where they train none. Otherwise all added parameters are written, those that are frozen too.
        """
        session = self._session_reference()
        assert session is not None, "the session outlives its generations"
        # Not known where this ends in an error.
        stored, self._stored = self._stored, None
        states: Copies = {}
        for optimizer in optimizers:
            states |= optimizer.added_states(session)
        described = []
        if states:
            copied = []
            for name, parameter in added_parameters(session).items():
                copied.append(_Copied(name, _VALUES, parameter))
                copied += [_Copied(name, state, tensor) for state, tensor in states.get(name, {}).items()]
            for number, pack in enumerate(_packs(copied)):
                self._write(f"{PREFIX}.{number}", pack)
                described.append([f"{PREFIX}.{number}", [each.described for each in pack]])
        if stored != len(described):
            self._remove_from(len(described))
        self._stored = len(described)
        return described

    def _write(self, name: str, pack: Sequence[_Copied]) -> None:
        flat = [bytes_of(each.tensor) for each in pack]
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
        store = self._runtime.store
        tensor = store.find_tensor(name)
        if tensor is not None and store.tensor_bytes(tensor) < whole.numel():
            store.remove_tensor(tensor)
            tensor = None
        if tensor is None:
            tensor = store.create_tensor(name, whole.numel())
        store.write(tensor, whole.data_ptr(), whole.numel())

    def _remove_from(self, number: int) -> None:
        """Remove the packs from a number on, which earlier steps have written."""
        while (tensor := self._runtime.store.find_tensor(f"{PREFIX}.{number}")) is not None:
            self._runtime.store.remove_tensor(tensor)
            number += 1

    def restore(self, described: Sequence[Any]) -> Copies:
        """Load the values of a resumed run into its model's added parameters, and return their states.

        Raises CheckpointError where the model has other ones.
        """
        session = self._session_reference()
        assert session is not None, "a run that is being resumed"
        here = added_parameters(session)
        there = {
            parameter: (dtype, shape)
            for _, pack in described
            for parameter, state, dtype, shape in pack
            if state == _VALUES
        }
        for name in there | here:
            mine = None if name not in here else [str(here[name].dtype).removeprefix("torch."), list(here[name].shape)]
            if mine != (list(there[name]) if name in there else None):
                raise CheckpointError(
                    f"the run has other parameters beside its store than those that add_adapters has made: {name} is "
                    f"{_shown(there.get(name))} there and {_shown(mine)} here"
                )
        states: Copies = {}
        for store_name, pack in described:
            for (parameter, state, _, _), value in zip(pack, self._read(store_name, pack), strict=True):
                if state == _VALUES:
                    with torch.no_grad():
                        here[parameter].copy_(value)
                else:
                    states.setdefault(parameter, {})[state] = value
        return states

    def _read(self, name: str, pack: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors of a pack."""
        values = [torch.empty(shape, dtype=getattr(torch, dtype)) for _, _, dtype, shape in pack]
        tensor = self._runtime.store.find_tensor(name)
        nbytes = sum(value.nbytes for value in values)
        if tensor is None or self._runtime.store.tensor_bytes(tensor) < nbytes:
            raise CheckpointError(
                f"the store lacks the tensor {name}, which its record of added parameters names: {INCOMPLETE}"
            )
        whole = torch.empty(nbytes, dtype=torch.uint8)
        self._runtime.store.read(tensor, whole.data_ptr(), nbytes)
        for value in values:
            part, whole = whole[: value.nbytes], whole[value.nbytes :]
            if value.numel():
                value.view(-1).view(torch.uint8).copy_(part)
        return values


def copied_bytes(session: SessionProtocol) -> int:
    """Return about the bytes that copies of a model's added parameters take, with two float32 states of each."""
    sizes = (value.nbytes + 2 * value.numel() * torch.float32.itemsize for value in added_parameters(session).values())
    return sum(sizes)


def _packs(copied: Iterable[_Copied]) -> list[list[_Copied]]:
    """Return copies in packs, in their order; a large one is alone."""
    packs: list[list[_Copied]] = []
    room = 0
    for each in copied:
        if each.tensor.nbytes > room:
            packs.append([])
            room = _PACK_BYTES
        packs[-1].append(each)
        room -= each.tensor.nbytes
    return packs


def _shown(described: Sequence[Any] | None) -> str:
    if described is None:
        return "missing"
    dtype, shape = described
    return f"{dtype} of shape {tuple(shape)}"
