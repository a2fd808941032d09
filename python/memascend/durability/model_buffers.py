"""The model's buffers stay in memory. Their copies in the store let a run be resumed."""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import PAGE_BYTES
from memascend.errors import INCOMPLETE, CheckpointError
from memascend.layout.units import round_up

if TYPE_CHECKING:
    from memascend._memascend import Runtime
    from memascend.durability.protocols import SessionProtocol

#: The store's tensor of all small buffers. No parameter has such a name.
_SMALL = ".buffers"
#: Larger buffers are tensors of their own, written when they have changed.
_LARGE_BYTES = 1 << 20


class ModelBuffers:
    """Copies of all buffers of a model, including the non-persistent ones, which `state_dict` leaves out.

    A buffer's dtype and shape may change during the run.
    """

    def __init__(self, session: SessionProtocol, runtime: Runtime) -> None:
        """Begin with nothing written to the store of `runtime`."""
        self._session_reference = weakref.ref(session)
        self._runtime = runtime
        #: CRC-32 of the bytes that were written last, by name in the store.
        self._checksums: dict[str, int] = {}
        #: Name, dtype and shape of each buffer, in the order of their bytes.
        self.described: list[list[Any]] = []

    def changed(self) -> dict[str, Any] | None:
        """Return copies of the buffers that changed since they were written, for `write`, or None.

        All bytes are compared, since PyTorch does not count the writes of batch normalisation to its buffers.
        """
        session = self._session_reference()
        model = None if session is None else session.model()
        buffers = {} if model is None else dict(model.named_buffers())
        described = [[name, _dtype_name(buffer), list(buffer.shape)] for name, buffer in buffers.items()]
        copies: dict[str, tuple[torch.Tensor, int]] = {}
        small = [bytes_of(buffer) for buffer in buffers.values() if buffer.nbytes <= _LARGE_BYTES]
        if small:
            packed = torch.cat(small)
            copies[_SMALL] = packed, _checksum(packed)
        for name, buffer in buffers.items():
            if buffer.nbytes > _LARGE_BYTES:
                flat = bytes_of(buffer)
                copies[f"{_SMALL}.{name}"] = flat, _checksum(flat)
        copies = {name: copy for name, copy in copies.items() if self._checksums.get(name) != copy[1]}
        if not copies and described == self.described:
            return None
        # `torch.cat` has copied the small ones. A large one may still be the buffer itself.
        copies = {
            name: (copy if name == _SMALL else copy.clone(), checksum) for name, (copy, checksum) in copies.items()
        }
        return {"described": described, "copies": copies}

    def write(self, changed: dict[str, Any] | None) -> None:
        """Write the copies that `changed` returned."""
        if changed is None:
            return
        runtime = self._runtime
        for name, (copy, checksum) in changed["copies"].items():
            tensor = runtime.store.find_tensor(name)
            if tensor is not None and runtime.store.tensor_bytes(tensor) < copy.numel():
                runtime.store.remove_tensor(tensor)
                tensor = None
            if tensor is None:
                tensor = runtime.store.create_tensor(name, copy.numel())
            runtime.store.write(tensor, copy.data_ptr(), copy.numel())
            self._checksums[name] = checksum
        self.described = changed["described"]

    def restore(self, described: list[list[Any]]) -> None:
        """Load the buffers of a resumed run into its model.

        Raises CheckpointError where the model has other buffers.
        """
        session = self._session_reference()
        model = None if session is None else session.model()
        assert model is not None, "a run that is being resumed"
        differing = {name for name, _ in model.named_buffers()} ^ {name for name, _, _ in described}
        if differing:
            raise CheckpointError(f"the store holds another model: buffer {min(differing)} is in one of them only")
        copies = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
        small = [copy for copy in copies.values() if copy.nbytes <= _LARGE_BYTES]
        packed = self._read(_SMALL, sum(copy.nbytes for copy in small))
        for copy in small:
            part, packed = packed[: copy.nbytes], packed[copy.nbytes :]
            if copy.numel():
                copy.view(-1).view(torch.uint8).copy_(part)
        for name, copy in copies.items():
            if copy.nbytes > _LARGE_BYTES:
                large = self._read(f"{_SMALL}.{name}", copy.nbytes)
                copies[name] = large.view(copy.dtype).view(copy.shape)
        _set_buffers(model, copies)
        self.described = described

    def _read(self, name: str, nbytes: int) -> torch.Tensor:
        """Return the bytes (uint8, of `nbytes`) of a tensor in the store."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            tensor = self._runtime.store.find_tensor(name)
            if tensor is None:
                raise CheckpointError(
                    f"the store lacks the tensor {name}, which its record of buffers names: {INCOMPLETE}"
                )
            self._runtime.store.read(tensor, data.data_ptr(), nbytes)
            self._checksums[name] = _checksum(data)
        return data


def _set_buffers(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    owners = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    for path, value in values.items():
        module, name = owners[path]
        buffer = module._buffers[name]
        assert buffer is not None
        if buffer.device.type == "meta":
            module._buffers[name] = value
        else:
            buffer.data = value.to(buffer.device)


def buffers_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a model's buffers take in a store, in whole pages."""
    sizes = [buffer.nbytes for buffer in model.buffers()]
    large = sum(round_up(size, PAGE_BYTES) for size in sizes if size > _LARGE_BYTES)
    return large + round_up(sum(size for size in sizes if size <= _LARGE_BYTES), PAGE_BYTES)


def _checksum(data: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor of bytes."""
    return zlib.crc32(data.numpy().data)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer's values as flat bytes on the CPU, without a copy where possible."""
    flat = buffer.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
