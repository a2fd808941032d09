"""Addresses of tensors on SSD: identities, which are compared and never read at.

Libraries find tensors that share memory by the addresses of their storages. A parameter on SSD, and the gradient that
is kept there, has a storage of its own in an address space that no processor has: two tensors have the same address
only where they show the same values, whatever is in memory meanwhile.

An address of the tensor itself (`data_ptr`) is read at by some callers: kernels, ctypes. So it is answered to the
modules in `_COMPARING` alone, which compare addresses. Others are refused.

safetensors, which reads at addresses, is met by name (`formats.safetensors_library`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memascend.autograd.proxies import kept_gradient, locate, whole_of
from memascend.errors import MemascendError
from memascend.layout.units import raw_tensor_access, round_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: Modules that compare the addresses of tensors, tested with safetensors 0.8, transformers 5.24, accelerate 1.15,
#: huggingface_hub 2.4 and peft 0.21. One that is missing here gets the error of `refuse_address`.
_COMPARING = frozenset(
    (
        *("safetensors.torch", "huggingface_hub.serialization._torch", "peft.tuners.tuners_utils"),
        *("transformers.modeling_utils", "transformers.pytorch_utils", "transformers.trainer"),
        *("accelerate.accelerator", "accelerate.big_modeling", "accelerate.hooks", "accelerate.utils.modeling"),
    )
)
#: Functions in them that read at the address; see `memascend.formats.safetensors_library`.
_READING = frozenset(("_to_ndarray", "_tobytes"))
#: Through which a call comes here.
_BETWEEN = (
    "torch.overrides",
    "torch._tensor",
    *(f"memascend.{room}." for room in ("autograd", "gradients", "session", "slicing")),
)

ADDRESS = (
    "asks for its address in memory; take a copy by .detach().clone() first, or save models by "
    "memascend.save_pretrained"
)

#: Above the addresses of all processors' virtual memory, and below 2**63.
_FIRST = (1 << 62) + (1 << 54)
_ALIGNMENT = 4096
_lock = threading.Lock()
_next = _FIRST
#: Storages of weights by their entries, and of gradients by their markers.
_of_weights: weakref.WeakKeyDictionary[Any, ProxyStorage] = weakref.WeakKeyDictionary()
_of_gradients = WeakIdKeyDictionary()


class _NoMemoryError(MemascendError, AttributeError):
    """A storage on SSD was asked for something that only memory has."""


class ProxyStorage:
    """Stands for the storage of values that are on SSD: an identity, a size and a device."""

    def __init__(self, name: str, nbytes: int, device: torch.device) -> None:
        """Take the next free addresses for the `nbytes` bytes of `name`."""
        global _next
        with _lock:
            self._address, _next = _next, _next + round_up(nbytes + 1, _ALIGNMENT)
        self._name, self._nbytes, self.device = name, nbytes, device

    def data_ptr(self) -> int:
        """Return the identity: of no other storage, and no address of memory."""
        return self._address

    @property
    def _cdata(self) -> int:
        return self._address

    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return self._nbytes

    size = __len__ = nbytes

    def element_size(self) -> int:
        """Return 1: the storage is one of bytes."""
        return 1

    def is_pinned(self, *_: Any) -> bool:
        """Return False."""
        return False

    is_shared = is_pinned

    def __getattr__(self, name: str) -> NoReturn:
        raise _NoMemoryError(f"{self.__dict__.get('_name', 'a tensor')} is on SSD: its storage's {name} {ADDRESS}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _NoMemoryError(f"{self._name} is on SSD: copying its storage {ADDRESS}")


class TypedProxyStorage:
    """As `ProxyStorage`, counted in elements, for `torch.Tensor.storage`."""

    def __init__(self, untyped: ProxyStorage, dtype: torch.dtype) -> None:
        """Show `untyped` in elements of `dtype`."""
        self._untyped_storage, self.dtype, self.device = untyped, dtype, untyped.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypedProxyStorage) and other._untyped_storage is self._untyped_storage

    def __hash__(self) -> int:
        return hash(self._untyped_storage)

    def __len__(self) -> int:
        return self._untyped_storage.nbytes() // self.dtype.itemsize

    size = _size = __len__

    def element_size(self) -> int:
        """Return the size of an element in bytes."""
        return self.dtype.itemsize

    def untyped(self) -> ProxyStorage:
        """Return the storage counted in bytes."""
        return self._untyped_storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_untyped_storage"], name.removeprefix("_") if name == "_data_ptr" else name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._untyped_storage.__reduce_ex__(protocol)


def storage_of(tensor: torch.Tensor) -> ProxyStorage:
    """Return the storage that a proxy shows a part of: a whole parameter's, or its present gradient's."""
    session, place, source = locate(tensor)
    if session.membership.divides:  # The code below would read the values on one rank alone.
        raise MemascendError(f"{place.name} is on SSD, divided over ranks: its storage {ADDRESS}")
    with raw_tensor_access():
        device = tensor.device
    storages: Any = _of_weights
    key: Any = place
    if source is not None and source.is_gradient:
        kept_gradient(tensor)
        storages, key = _of_gradients, place.gradient.marker
    storage = storages.get(key)
    if storage is None:
        storage = storages[key] = ProxyStorage(place.name, place.nbytes, device)
    return storage


def _typed_storage_of(tensor: torch.Tensor) -> TypedProxyStorage:
    with raw_tensor_access():
        dtype = tensor.dtype
    return TypedProxyStorage(storage_of(tensor), dtype)


def _address_of(tensor: torch.Tensor) -> int:
    """Return the address of a proxy's first element, to callers that compare it."""
    _, place, source = locate(tensor)
    caller = _caller()
    if caller.f_globals.get("__name__") not in _COMPARING or caller.f_code.co_name in _READING:
        raise MemascendError(f"{place.name} is on SSD: data_ptr {ADDRESS}")
    source = source or whole_of(place)
    return storage_of(tensor).data_ptr() + source.offset * source.dtype.itemsize


def _caller() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _is_set_to(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Answer whether two tensors show the same values in the same order."""

    def shown(one: torch.Tensor) -> Any:
        return one.untyped_storage().data_ptr(), one.storage_offset(), tuple(one.shape), one.stride()

    return shown(tensor) == shown(other)


#: Functions of PyTorch that ask where a tensor is, and how they are answered of proxies.
ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.untyped_storage: storage_of,
    torch.Tensor.storage: _typed_storage_of,
    torch.Tensor._typed_storage: _typed_storage_of,
    torch.Tensor.data_ptr: _address_of,
    torch.Tensor.is_set_to: _is_set_to,
}
