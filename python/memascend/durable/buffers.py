"""The buffers of an offloaded model, which stay in memory: a copy of them in its store, for a run that is resumed."""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError
from memascend.layout.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from memascend.offloading.session import Offload

#: The tensor of all small buffers; no parameter has such a name.
_SMALL = ".buffers"
#: Larger buffers are tensors of their own, written when they have changed.
_LARGE_BYTES = 1 << 20


class KeptBuffers:
    """All buffers of a model, those too that a `state_dict` leaves out: their dtype may be another than at first."""

    def __init__(self, state: Offload) -> None:
        """Nothing is kept yet."""
        self._state = weakref.ref(state)
        #: By name in the store, the checksum of what was written last.
        self._sums: dict[str, int] = {}
        #: Name, dtype and shape of each, in the order of their bytes.
        self.described: list[list[Any]] = []

    def changed(self) -> dict[str, Any] | None:
        """Return copies of the buffers that have changed since they were written, to be written later, or None.

        Everything is compared: what batch normalisation does to its buffers, PyTorch does not tell.
        """
        state = self._state()
        model = None if state is None else state.model()
        buffers = {} if model is None else dict(model.named_buffers())
        described = [[name, _dtype_name(buffer), list(buffer.shape)] for name, buffer in buffers.items()]
        copies: dict[str, tuple[torch.Tensor, int]] = {}
        small = [_bytes(buffer) for buffer in buffers.values() if buffer.nbytes <= _LARGE_BYTES]
        if small:
            whole = torch.cat(small)
            copies[_SMALL] = whole, zlib.crc32(whole.numpy())
        for name, buffer in buffers.items():
            if buffer.nbytes > _LARGE_BYTES:
                found = _bytes(buffer)
                copies[f"{_SMALL}.{name}"] = found, zlib.crc32(found.numpy())
        copies = {name: copy for name, copy in copies.items() if self._sums.get(name) != copy[1]}
        if not copies and described == self.described:
            return None
        copies = {name: (copy if name == _SMALL else copy.clone(), sum_) for name, (copy, sum_) in copies.items()}
        return {"described": described, "copies": copies}

    def write(self, changed: dict[str, Any] | None) -> None:
        """Write what `changed` returned."""
        state = self._state()
        if changed is None or state is None:
            return
        runtime = state.runtime
        for name, (copy, sum_) in changed["copies"].items():
            known = runtime.find_tensor(name)
            if known is not None and runtime.tensor_bytes(known) < copy.numel():
                runtime.remove_tensor(known)
                known = None
            room = runtime.create_tensor(name, copy.numel()) if known is None else known
            runtime.write(room, copy.data_ptr(), copy.numel())
            self._sums[name] = sum_
        self.described = changed["described"]

    def take_up(self, described: list[list[Any]]) -> None:
        """Give the model of a resumed run its buffers.

        Raises CheckpointError where it has not those.
        """
        state = self._state()
        model = None if state is None else state.model()
        assert state is not None and model is not None, "a run that is being resumed"
        owners = {
            f"{prefix}.{name}" if prefix else name: (module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        differing = {name for name, _ in model.named_buffers()} ^ {name for name, _, _ in described}
        if differing:
            raise CheckpointError(f"the store holds another model: buffer {min(differing)} is in one of them only")
        kept = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
        small = [copy for copy in kept.values() if copy.nbytes <= _LARGE_BYTES]
        whole = self._read(_SMALL, sum(copy.nbytes for copy in small))
        for copy in small:
            part, whole = whole[: copy.nbytes], whole[copy.nbytes :]
            if copy.numel():
                copy.view(-1).view(torch.uint8).copy_(part)
        for name, copy in kept.items():
            if copy.nbytes > _LARGE_BYTES:
                copy = self._read(f"{_SMALL}.{name}", copy.nbytes).view(copy.dtype).view(copy.shape)
            module, own = owners[name]
            buffer = module._buffers[own]
            assert buffer is not None
            if buffer.device.type == "meta":
                module._buffers[own] = copy
            else:
                buffer.data = copy.to(buffer.device)
        self.described = described

    def _read(self, name: str, nbytes: int) -> torch.Tensor:
        whole = torch.empty(nbytes, dtype=torch.uint8)
        state = self._state()
        if nbytes and state is not None:
            place = state.runtime.find_tensor(name)
            if place is None:
                raise CheckpointError("the store has not the buffers that it speaks of")
            state.runtime.read(place, whole.data_ptr(), nbytes)
            self._sums[name] = zlib.crc32(whole.numpy())
        return whole


def kept_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a model's buffers take in a store, in whole pages."""
    sizes = [buffer.nbytes for buffer in model.buffers()]
    large = sum(round_up(size, PAGE_BYTES) for size in sizes if size > _LARGE_BYTES)
    return large + round_up(sum(size for size in sizes if size <= _LARGE_BYTES), PAGE_BYTES)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
