"""Names of weights in the graphs of autograd, which hold no view of a unit's buffer.

A saved-tensor hook over the whole forward replaces every saved view of a unit's buffer by its unit, offset, shape and
stride, and the unit is fetched again when the backward pass asks. PyTorch compares no versions of tensors that hooks
pack, so names and other saved tensors carry theirs. Every parameter counts its steps: a backward pass through a graph
older than a step raises.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.autograd.buffers import version_of
from memascend.autograd.recompute import refuse_overwritten
from memascend.errors import MemascendError, stale
from memascend.layout.units import raw_tensor_access

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from memascend.layout.units import ParameterEntry
    from memascend.session.session import Session


class Holder(Protocol):
    """The object that a graph refers to as long as it lives, so that the session is not closed meanwhile."""

    session: Session


class _SavedWeight:
    """Stands for a view of a unit's weights in the autograd graph, so that the graph does not hold the buffer."""

    __slots__ = ("dtype", "offset", "place", "shape", "stride", "version")

    def __init__(self, place: ParameterEntry, tensor: torch.Tensor, offset: int) -> None:
        self.place = place
        self.version = version_now(place)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        #: Elements before the first one, in the unit's bytes.
        self.offset = offset
        place.binding.saved_names += 1

    def __del__(self) -> None:
        # Dynamo makes objects without attributes while it traces.
        if hasattr(self, "place"):
            self.place.binding.saved_names -= 1


class _Saved:
    """A tensor in the autograd graph, and its version: with hooks, PyTorch does not compare versions by itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own output would refer to itself, and never be freed.
        with nullcontext() if has_memory(tensor) else raw_tensor_access():
            self.tensor = tensor.detach()
        self.version = version_of(tensor)


class SavedNames:
    """Packs saved tensors of a pass: names of weights instead of views of them, and other tensors unchanged."""

    def __init__(self, holder: Holder, absent: Mapping[int, ParameterEntry]) -> None:
        """Name the weights of a session.

        `absent` has the entries of parameters by the address of the tensor that each holds while it is absent.
        """
        self._holder, self._absent = holder, absent
        self._streamer, self._device = holder.session.streamer, holder.session.torch_device

    def saving(self) -> AbstractContextManager[Any]:
        """Have autograd save tensors so."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> _SavedWeight | _Saved:
        """Return a weight's name, or an object that keeps another tensor."""
        if tensor.device == self._device and tensor.layout is torch.strided and has_memory(tensor):
            with raw_tensor_access():
                address = tensor.untyped_storage().data_ptr()
                start = int(tensor.storage_offset()) * tensor.itemsize
            unit = self._streamer.by_address.get(address)
            if unit is not None:
                place = next(place for place in unit.places if place.offset <= start < place.offset + place.nbytes)
                return _SavedWeight(place, tensor, start // tensor.itemsize)
            if address in self._absent:
                # A custom Function saves a weight that nothing has read yet.
                place = self._absent[address]
                return _SavedWeight(place, torch.empty(place.shape, dtype=place.dtype, device="meta"), -1)
        return _Saved(tensor)

    def unpack(self, saved: _SavedWeight | _Saved) -> torch.Tensor:
        """Return the tensor that was saved. Raises RuntimeError or MemascendError where it was written to since."""
        if isinstance(saved, _Saved):
            refuse_overwritten(saved.tensor, saved.version)
            return saved.tensor
        place = saved.place
        if version_now(place) != saved.version:
            raise MemascendError(stale(place.name))
        # By way of the holder, so that the graph refers to it.
        streamer = self._holder.session.streamer
        storage = streamer.storage(place.tensor.unit).untyped_storage()
        offset = place.offset // place.dtype.itemsize if saved.offset < 0 else saved.offset
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        weights = empty.set_(storage, offset, saved.shape, saved.stride)
        streamer.free_whole(place.tensor.unit)
        return weights

    def tensor_of(self, saved: _SavedWeight | _Saved) -> torch.Tensor | None:
        """Return the tensor that `saved` keeps alive; None for a name."""
        return saved.tensor if isinstance(saved, _Saved) else None

    def overwritten(self, saved: _SavedWeight | _Saved) -> bool:
        """Return whether the tensor that `saved` keeps alive was written to since."""
        return isinstance(saved, _Saved) and version_of(saved.tensor) != saved.version


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: a class that answers operations itself need not."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def version_now(place: ParameterEntry) -> tuple[int, int]:
    """Count the steps taken on a parameter, and the program's writes to it."""
    with raw_tensor_access():
        return place.binding.version, place.parameter._version
