"""Buffers of recomputed units: each recomputation sees them as the first forward did, and leaves them as they are now.

Batch-norm's statistics, an EMA, or the vectors of spectral-norm would otherwise be updated once more in the backward
pass. PyTorch does not count the writes of batch-norm in `_version`, so values are compared, not versions. Attributes
that are tensors, plain values (`training` among them) or containers are treated alike.

Copies are swapped in rather than written over the buffer, since graphs may have saved it.
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memascend.common.sizes import format_size
from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Larger buffers are not copied: a checksum tells whether they were written.
COPY_MAX_BYTES = 1024 * 1024
#: Smaller buffers on a device are copied at each call: comparing them would wait for the device.
COMPARE_FROM_BYTES = 64 * 1024

_MISSING = object()
#: Types of attributes that are values, and are restored as tensors are.
_VALUES = frozenset({bool, int, float, str, tuple, type(None), list, dict, set, deque})
#: Those among them that are changed in place, and the most elements of one that is restored.
_CONTAINERS = frozenset({list, dict, set, deque})
CONTAINER_MAX_ELEMENTS = 1000
#: Attributes of every module: its parameters, submodules and hooks.
_INTERNAL = frozenset(nn.Module().__dict__)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter, or None for a tensor made in inference mode, which has none."""
    return None if tensor.is_inference() else tensor._version


def collected_by_checkpoint() -> bool:
    """Return whether torch.utils.checkpoint collects the tensors that are saved now (not reentrant).

    Its hooks count saved tensors, in the forward pass and when they compute it again, so that ours must not be on top.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def is_plain(value: Any) -> bool:
    """Return whether `value` is a tensor, and of no class of its own."""
    return type(value) is torch.Tensor


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the tensor's storage, in words as wide as they allow; equal words mean equal bytes."""
    storage = tensor.untyped_storage()
    word = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=word, device=tensor.device).set_(storage)


class BufferCopies:
    """Copies of the small buffers of one model. Calls between which a buffer was not written share one."""

    def __init__(self) -> None:
        """Start without copies."""
        #: The latest copy, by identity of the buffer.
        self._latest = WeakIdKeyDictionary()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor's storage, which must not be written to."""
        values = _storage_bytes(tensor)
        latest = self._latest.get(tensor)
        comparable = tensor.device.type == "cpu" or values.nbytes >= COMPARE_FROM_BYTES
        if comparable and latest is not None and latest.shape == values.shape and torch.equal(latest, values):
            return latest
        self._latest[tensor] = copy = values.clone()
        return copy


class Recorded:
    """A tensor that a module or a cache held when a unit was called, and how to have its values of then."""

    __slots__ = ("checksum", "copy", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, copies: BufferCopies) -> None:
        """Record the present values of `tensor`."""
        self.tensor = tensor
        self.version = version_of(tensor)
        self.copy: torch.Tensor | None = None
        self.checksum: int | None = None
        # A tensor with a node of autograd is an activation, whose writes it counts. Subclasses and other layouts
        # have no storage to copy.
        stored = is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
        if not stored or tensor.grad_fn is not None:
            return
        size = tensor.untyped_storage().nbytes()
        if 0 < size <= COPY_MAX_BYTES:
            self.copy = copies.take(tensor)
        elif size:
            self.checksum = self._sum()

    def _sum(self) -> int:
        return zlib.crc32(_storage_bytes(self.tensor).cpu().numpy().data)

    def written(self) -> bool:
        """Return whether a tensor without a copy has other values than at the call."""
        if self.copy is not None:
            return False
        return version_of(self.tensor) != self.version or (self.checksum is not None and self._sum() != self.checksum)

    def values(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a tensor with the values of the call; tensors that shared a storage share one of `storages`."""
        tensor = self.tensor
        if self.copy is None:
            # Detached, so that the graph of the recomputation does not reach into an older one.
            return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.grad_fn is not None else tensor
        key = tensor.untyped_storage()._cdata
        if key not in storages:
            storages[key] = self.copy.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        values = empty.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return values.requires_grad_(tensor.requires_grad)


class BufferState:
    """The state of a unit's modules when it was called: registered buffers, and tensors that are plain attributes."""

    def __init__(self, module: nn.Module, copies: BufferCopies, *, within_checkpoint: bool = False) -> None:
        """Record the state of the modules of `module`, also `within_checkpoint`s, which else restore nothing."""
        self.module = module
        #: Generators that are attributes of the modules.
        self.generators: list[torch.Generator] = []
        #: PyTorch's checkpointing, in whose place the recomputation is, restores nothing, and so
        #: writes buffers twice.
        self.checkpointed = not within_checkpoint and _is_checkpointed(module)
        self._modules = [] if self.checkpointed else list(module.modules())
        #: (where a module holds its buffers or attributes, a copy of that dictionary)
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._recorded: dict[int, Recorded] = {}
        #: (container that is an attribute, its elements)
        self._containers: list[tuple[Any, Any]] = []
        for inner in self._modules:
            for holder in (inner._buffers, inner.__dict__):
                held = dict(holder)
                self._held.append((holder, held))
                for name, value in held.items():
                    # An attribute of another class may stand for a weight, which is not read here.
                    state = is_plain(value) or (holder is inner._buffers and value is not None)
                    if state and id(value) not in self._recorded:
                        self._recorded[id(value)] = Recorded(value, copies)
                    elif type(value) is torch.Generator:
                        self.generators.append(value)
                    elif _is_container(name, value):
                        self._containers.append((value, value.copy()))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules hold the values of then; afterwards they hold the present ones again, untouched."""
        if self.checkpointed:
            yield
            return
        self._check()
        present = [dict(holder) for holder, _ in self._held]
        elements = [container.copy() for container, _ in self._containers]
        versions = self._versions()
        storages: dict[int, torch.Tensor] = {}
        values = {key: recorded.values(storages) for key, recorded in self._recorded.items()}
        try:
            for (holder, held), now in zip(self._held, present, strict=True):
                _restore(holder, held, now)
                for name, value in held.items():
                    if id(value) in values:
                        holder[name] = values[id(value)]
            for container, held in self._containers:
                _fill(container, held)
            yield
        finally:
            for (container, _), now in zip(self._containers, elements, strict=True):
                _fill(container, now)
            for (holder, _), now in zip(self._held, present, strict=True):
                _restore(holder, now, dict(holder))
        if versions != self._versions():
            raise MemascendError(
                f"a buffer of {type(self.module).__name__} was written under another name than its own while its "
                "activations were recomputed, and so a second time: pass recompute=False"
            )

    def _versions(self) -> list[int | None]:
        return [version_of(recorded.tensor) for recorded in self._recorded.values()]

    def _check(self) -> None:
        if list(self.module.modules()) != self._modules:
            raise MemascendError(
                f"a module of {type(self.module).__name__} was replaced after the forward pass that is to be "
                "recomputed: call backward() before, or pass recompute=False to memascend.offload"
            )
        for recorded in self._recorded.values():
            if recorded.written():
                nbytes = recorded.tensor.untyped_storage().nbytes()
                raise MemascendError(
                    f"{self._name(recorded.tensor)} of {type(self.module).__name__} was written in place during or "
                    f"after the forward pass that is to be recomputed, and with {format_size(nbytes)} it is too large "
                    f"to be copied before (more than {format_size(COPY_MAX_BYTES)}): pass recompute=False to "
                    "memascend.offload"
                )

    def _name(self, tensor: torch.Tensor) -> str:
        names = [name for name, _ in self.module.named_modules() for _ in ("buffers", "attributes")]
        for name, (_, held) in zip(names, self._held, strict=True):
            for key, value in held.items():
                if value is tensor:
                    return f"the buffer {name}.{key}".replace(" .", " ")
        raise AssertionError("recorded from one of these dictionaries")


def _is_checkpointed(module: nn.Module) -> bool:
    """Return whether transformers or torch.utils.checkpoint would checkpoint a call of `module` now."""
    if module.training and getattr(module, "gradient_checkpointing", False):
        return True
    return collected_by_checkpoint()


def _restore(holder: dict[str, Any], wanted: dict[str, Any], present: dict[str, Any]) -> None:
    """Set the attributes of `holder`, which are `present`, to the tensors and values of `wanted`."""
    for name in wanted.keys() | present.keys():
        value, other = wanted.get(name, _MISSING), present.get(name, _MISSING)
        if value is other or not (_is_value(value) or _is_value(other)):
            continue
        if value is _MISSING:
            del holder[name]
        else:
            holder[name] = value


def _is_container(name: str, value: Any) -> bool:
    return type(value) in _CONTAINERS and name not in _INTERNAL and len(value) <= CONTAINER_MAX_ELEMENTS


def _fill(container: Any, elements: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(elements)


def _is_value(value: Any) -> bool:
    return type(value) in _VALUES or isinstance(value, torch.Tensor)
