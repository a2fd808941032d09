"""The buffers of an offloaded model, which stay in memory: a copy of them in its store, for a run that is resumed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from memascend._memascend import TensorId
    from memascend.offload import Offload

_NAME = "buffers"
#: Larger buffers count as changed when PyTorch says so. Smaller ones are compared: what batch normalisation does to its
#: own, PyTorch does not tell.
_COMPARED_BYTES = 1 << 20


class KeptBuffers:
    """All buffers of a model, those too that a `state_dict` leaves out: their dtype may be another than at first."""

    def __init__(self, state: Offload) -> None:
        """Nothing is kept yet."""
        self._state = weakref.ref(state)
        self._place: tuple[TensorId, int] | None = None
        #: By name, what tells whether a buffer is as it was when it was written last.
        self._seen: dict[str, Any] = {}
        #: Name, dtype and shape of each, in the order of their bytes.
        self.described: list[list[Any]] = []

    def changed(self) -> list[tuple[str, torch.Tensor, Any]] | None:
        """Return a copy of every buffer, to be written later; None if none has changed since the last were written."""
        state = self._state()
        model = None if state is None else state.model()
        buffers = {} if model is None else dict(model.named_buffers())
        if buffers.keys() == self._seen.keys() and all(_is(buffers[name], seen) for name, seen in self._seen.items()):
            return None
        return [(name, copy := _copied(buffer), _mark(buffer, copy)) for name, buffer in buffers.items()]

    def write(self, copies: list[tuple[str, torch.Tensor, Any]] | None) -> None:
        """Write what `changed` returned."""
        state = self._state()
        if copies is None or state is None:
            return
        self._seen = {name: seen for name, _, seen in copies}
        dtypes = [str(copy.dtype).removeprefix("torch.") for _, copy, _ in copies]
        shapes = [list(copy.shape) for _, copy, _ in copies]
        self.described = [list(each) for each in zip((name for name, _, _ in copies), dtypes, shapes, strict=True)]
        parts = [_bytes(copy) for _, copy, _ in copies]
        whole = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        runtime = state.runtime
        if self._place is not None and self._place[1] != whole.numel():
            runtime.remove_tensor(self._place[0])
            self._place = None
        if not whole.numel():
            return
        if self._place is None:
            self._place = runtime.create_tensor(_NAME, whole.numel()), whole.numel()
        runtime.write(self._place[0], whole.data_ptr(), whole.numel())

    def take_up(self, described: list[list[Any]]) -> None:
        """Give the model of a resumed run its buffers.

        Raises CheckpointError where it has not those.
        """
        state = self._state()
        assert state is not None, "a run that is being resumed"
        model = state.model()
        buffers = {} if model is None else dict(model.named_buffers())
        differing = buffers.keys() ^ {name for name, _, _ in described}
        if differing:
            raise CheckpointError(f"the store holds another model: buffer {min(differing)} is in one of them only")
        kept = [torch.empty(shape, dtype=getattr(torch, dtype)) for _, dtype, shape in described]
        whole = torch.empty(sum(copy.nbytes for copy in kept), dtype=torch.uint8)
        self.described = described
        if not whole.numel():
            return
        place = state.runtime.find_tensor(_NAME)
        if place is None:
            raise CheckpointError("the store has not the buffers that it speaks of")
        self._place = place, whole.numel()
        state.runtime.read(place, whole.data_ptr(), whole.numel())
        for (name, _, _), copy in zip(described, kept, strict=True):
            part, whole = whole[: copy.nbytes], whole[copy.nbytes :]
            _bytes(copy).copy_(part)
            buffer = buffers[name]
            buffer.data = copy.to(buffer.device)
            self._seen[name] = _mark(buffer, copy.clone())


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to("cpu", copy=True).contiguous()


def _mark(buffer: torch.Tensor, copy: torch.Tensor) -> Any:
    return (buffer.data_ptr(), buffer._version) if buffer.nbytes > _COMPARED_BYTES else copy


def _is(buffer: torch.Tensor, seen: Any) -> bool:
    if not isinstance(seen, torch.Tensor):
        return seen == (buffer.data_ptr(), buffer._version)
    if (seen.dtype, seen.shape) != (buffer.dtype, buffer.shape):
        return False
    return torch.equal(_bytes(seen), _bytes(buffer.detach().to("cpu").contiguous()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
