"""Caches of transformers that a recomputed unit fills: a recomputation fills a copy, made before the unit's call.

An entry that the first forward has filled is dropped where the program did not ask for a cache: it would keep keys and
values of every layer in memory, which recomputation is there to avoid.

Turning the cache off instead would change bits: the concatenation that fills it also makes keys contiguous, and
products of those round differently.
"""

from __future__ import annotations

import copy
import functools
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memascend.autograd.buffers import Recorded, is_plain
from memascend.errors import MemascendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.autograd.buffers import BufferCopies

#: Keyword arguments by which models of transformers are given a key-value cache.
_CACHE_ARGUMENTS = ("past_key_values", "layer_past", "past_key_value", "cache")
#: Attributes that a dropped entry still answers.
_DESCRIPTIONS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in ("size", "stride", "numel", "nelement", "dim", "is_floating_point")),
    }
)


class _DroppedEntry(torch.Tensor):
    """Has the shape of a cache's entry, but no values."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> _DroppedEntry:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return cls._refuse()

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return cls._refuse()

    @staticmethod
    def _refuse() -> Any:
        raise MemascendError(
            "the entries of the cache that the model filled in this forward pass were dropped, since its activations "
            "are recomputed and no cache was asked for: pass use_cache=True to the model to keep them"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<dropped cache entry of shape {tuple(self.shape)}>"


@functools.cache
def _is_state_type(kind: type) -> bool:
    packages = {base.__module__.split(".")[0] for base in kind.__mro__}
    return (
        bool(packages & {"transformers", "transformers_modules"})
        and not issubclass(kind, nn.Module | Enum)
        and not any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)
    )


def is_state(value: Any) -> bool:
    """Return whether `value` is an object of transformers that a layer may change, such as a cache."""
    return _is_state_type(type(value))  # type: ignore[arg-type]


def is_cache(value: Any) -> bool:
    """Return whether `value` is a key-value cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def asks_for_cache(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a model's arguments ask it for a cache, or hand it one to fill."""
    return bool(kwargs.get("use_cache")) or any(is_cache(value) for value in (*args, *kwargs.values()))


def caches_as_checkpointed(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's arguments without caches if transformers' own checkpointing, now replaced, would take them out.

    Only layers that it knows to read a cache and not to write to it are left theirs.
    """
    checkpointed = module.training and getattr(module, "gradient_checkpointing", False)
    if not checkpointed or getattr(module, "_can_checkpoint_with_cache", False):
        return kwargs
    without: dict[str, Any] = dict.fromkeys(_CACHE_ARGUMENTS) | {"use_cache": False}
    return {name: without.get(name, value) for name, value in kwargs.items()}


def copies_of(objects: list[Any]) -> list[Any]:
    """Return copies of caches and other objects of transformers, which share their tensors."""
    return _mapped(objects, lambda tensor: tensor, {}) if objects else []


def check_caches(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse caches that cannot be copied, and so would be filled twice by a layer that is recomputed."""
    for name in _CACHE_ARGUMENTS:
        for value in pytree.tree_leaves(kwargs.get(name), is_leaf=is_state):
            if not (value is None or isinstance(value, torch.Tensor | int | float | str) or is_state(value)):
                raise MemascendError(
                    f"{type(module).__name__} was given {name}, a {type(value).__name__}, while its activations are "
                    "recomputed, which would fill it twice: call the model with use_cache=False when training, or "
                    "pass recompute=False to memascend.offload"
                )


def _mapped(value: Any, change: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Return a copy of a structure of objects, lists and dictionaries, its tensors changed, all else as it is."""
    if is_plain(value) or isinstance(value, Recorded):
        return change(value)
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple(_mapped(child, change, copies) for child in value)
    if isinstance(value, list | dict) or is_state(value):
        copies[id(value)] = copied = copy.copy(value)
        _change_children(copied, lambda child: _mapped(child, change, copies))
        return copied
    return value


def _change_children(value: Any, change: Callable[[Any], Any]) -> None:
    if isinstance(value, list):
        value[:] = [change(child) for child in value]
    elif isinstance(value, dict):
        for key, child in value.items():
            value[key] = change(child)
    if hasattr(value, "__dict__"):
        for key, child in vars(value).items():
            vars(value)[key] = change(child)


class CacheState:
    """Caches and other objects of transformers that a unit was called with, as they were then."""

    def __init__(self, objects: list[Any], copies: BufferCopies) -> None:
        """Record `objects`."""
        self._recorded: dict[int, Recorded] = {}

        def record(tensor: torch.Tensor) -> Recorded:
            if id(tensor) not in self._recorded:
                self._recorded[id(tensor)] = Recorded(tensor, copies)
            return self._recorded[id(tensor)]

        self._objects: list[Any] = _mapped(objects, record, {}) if objects else []

    def restored(self) -> list[Any]:
        """Return copies of the objects, with the values of then."""
        for recorded in self._recorded.values():
            if recorded.written():
                raise MemascendError(
                    "a cache was written in place by a layer that is recomputed: call the model with use_cache=False "
                    "when training, or pass recompute=False to memascend.offload"
                )
        storages: dict[int, torch.Tensor] = {}
        return _mapped(self._objects, lambda recorded: recorded.values(storages), {})

    def drop_new(self, objects: list[Any]) -> None:
        """Drop the entries of those caches among `objects` that were not there before."""
        seen: set[int] = set()

        def dropped(value: Any) -> Any:
            if is_plain(value):
                fresh = value.is_floating_point() and value.numel() and id(value) not in self._recorded
                return _DroppedEntry(value) if fresh else value
            if type(value) is tuple:
                return tuple(dropped(child) for child in value)
            if (isinstance(value, list | dict) or is_state(value)) and id(value) not in seen:
                seen.add(id(value))
                _change_children(value, dropped)
            return value

        for value in objects:
            if is_cache(value):
                dropped(value)
