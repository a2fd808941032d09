"""Proxies for tensors that are on SSD: absent parameters, kept gradients, and views of both.

A proxy has shape, dtype, device and autograd history of the tensor it stands for, and a single NaN for data. PyTorch
asks its class before every function (`__torch_function__`, see torch.overrides). The function then runs on the values:
the unit of a weight is fetched, a gradient is read. Values that it wrote are written back, as the version counter says,
and results in the same memory become proxies too. So a program that reads or writes weights outside of a pass
gets the bits that it would get in memory, one unit at a time.

In a pass a parameter whose unit is in memory is an ordinary parameter to PyTorch (`ResidentParameter`).

A parameter object never changes; its `.data` and its class do. `.data`, `.detach()` and views are proxies for a part
of the same values, so a program may keep them, read them after a step, or write through them. `parameter.grad` is a
proxy for the gradient on the store, one object for each gradient: one that a step has consumed refuses to be read. A
NaN without a class was silent: it was logged, averaged, saved and stepped with.

A table stays a proxy within passes too, so that `F.embedding` and `F.linear` reach `vocabulary/` through its class,
whatever module or function calls them. Internal code reads the tensor that a parameter holds under `raw_tensor_access`.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import nn

from memascend.autograd.buffers import version_of
from memascend.common.graphs import in_backward
from memascend.errors import MemascendError
from memascend.layout.registry import place_of
from memascend.layout.units import raw_tensor_access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.durability.protocols import SessionProtocol
    from memascend.layout.units import ParameterEntry


#: The end of an error about a function that gives a tensor other memory.
OTHER_MEMORY = "would change its memory: copy values by .data.copy_(...), and resize before memascend.offload"


@dataclass(slots=True)
class ProxySource:
    """Which values a proxy stands for: a parameter, its gradient, or a view of one of them."""

    place: weakref.ref[ParameterEntry]
    is_gradient: bool
    #: Of a gradient: the proxy of the whole gradient. A later gradient has another.
    marker: weakref.ref[torch.Tensor] | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    #: Elements of `dtype` before the first one.
    offset: int


class _Proxy:
    """The methods that `OffloadedParameter` and `OffloadedTensor` share."""

    #: Runs a function on values: `memascend.autograd.dispatch.run`, which that module sets.
    run: ClassVar[Callable[[Callable, tuple, dict[str, Any]], Any]]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch on the values."""
        return _Proxy.run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The values, without history. Writes to them reach the store."""
        return alias_of(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign(self, value)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = _ordinary_copy(self)  # type: ignore[arg-type]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary_copy(self).__reduce_ex__(protocol)  # type: ignore[arg-type]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a read-only array: writes to it would be lost."""
        array = copy_of(self).requires_grad_(self.requires_grad).numpy(force=force)  # type: ignore
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)


class OffloadedParameter(_Proxy, nn.Parameter):
    """A parameter whose values are on SSD."""


class OffloadedTensor(_Proxy, torch.Tensor):
    """A gradient that is kept on SSD, or a view of one or of a weight."""

    _memascend_source: ProxySource

    @classmethod
    def become(cls, tensor: torch.Tensor, source: ProxySource) -> torch.Tensor:
        """Turn an ordinary tensor into a proxy."""
        tensor.__class__ = cls
        assert isinstance(tensor, cls)
        tensor._memascend_source = source
        return tensor


class ResidentParameter(nn.Parameter):
    """A parameter of an offloaded model whose values are in memory. PyTorch treats it as an ordinary one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The values, without history. They share the version counter, so that a write to them is noticed."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign(self, value)

    def set_(self, *source: Any, **named: Any) -> torch.Tensor:
        """Refuse to take another tensor's memory. To take its own changes nothing, and does not count as a write.

        `torch.nn.utils.parametrize` does that where it registers a parametrization, as PEFT does in each forward for
        adapters on parameters (fused experts).
        """
        if len(source) == 1 and source[0] is self and not named:
            return self
        _, place, _ = locate(self)
        raise MemascendError(f"{place.name} is on SSD: set_ {OTHER_MEMORY}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values as an ordinary parameter does."""
        return repr(nn.Parameter(self.detach(), self.requires_grad))


def run_functions_by(run: Callable[[Callable, tuple, dict[str, Any]], Any]) -> None:
    """Have `run(func, args, kwargs)` run the functions of PyTorch that are called with proxies."""
    _Proxy.run = staticmethod(run)


def is_proxy(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor stands for values on SSD."""
    return isinstance(tensor, _Proxy)


def make_marker(place: ParameterEntry) -> torch.Tensor:
    """Return a new proxy for the gradient of a parameter."""
    marker = place.binding.absent.detach()
    source = whole_of(place)
    source.is_gradient, source.marker = True, weakref.ref(marker)
    return OffloadedTensor.become(marker, source)


def kept_gradient(tensor: Any) -> tuple[ParameterEntry, bool] | None:
    """Return the parameter whose gradient `tensor` stands for, and whether for the whole of it.

    None for a tensor that stands for something else. Raises MemascendError if the gradient is gone.
    """
    source = getattr(tensor, "_memascend_source", None)
    if source is None or not source.is_gradient:
        return None
    place = source.place()
    if place is not None and place.gradient.updated_in_backward:
        raise MemascendError(applied_gradient(place.name))
    if place is None or not place.gradient.held or place.gradient.marker is not source.marker():
        raise MemascendError(_gone("a parameter" if place is None else place.name))
    located = place_of(place.parameter)
    if located is not None:
        located[0].gradients.note_used(place)
    whole = whole_of(place)
    return place, (source.dtype, source.size, source.offset) == (whole.dtype, whole.size, whole.offset)


def applied_gradient(name: str) -> str:
    """Say that a gradient is asked for that the backward pass has applied."""
    return (
        f"the backward pass has already applied the gradient of {name} (update='backward'), and optimizer.step() has "
        "not followed: a gradient that is clipped, scaled, read, added to or discarded before step() has to be so "
        "from the first step on, or the model offloaded with update='forward'. memascend.resume goes on from the last "
        "durable step"
    )


def _gone(name: str) -> str:
    return (
        f"this gradient of {name} is gone: optimizer.step() or zero_grad() has consumed it, or a later backward pass "
        "has replaced it; read it before, or keep a clone"
    )


# ---- where the values are ---------------------------------------------------------------------------------------


def locate(tensor: torch.Tensor) -> tuple[SessionProtocol, ParameterEntry, ProxySource | None]:
    """Return the session, the entry of the parameter, and which of its values a proxy stands for."""
    if isinstance(tensor, OffloadedTensor):
        source: ProxySource | None = tensor._memascend_source
        assert source is not None
        place = source.place()
        located = None if place is None else place_of(place.parameter)
    else:
        source, located = None, place_of(tensor)
    if located is None or located[0].closed:
        message = "the model of this parameter was closed: its weights are no longer on the store"
        raise MemascendError(message) if located is None else located[0].closed_error(message)
    return *located, source


def shown_by(tensor: torch.Tensor) -> ProxySource:
    """Return which values a proxy stands for."""
    _, place, source = locate(tensor)
    return source or whole_of(place)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a proxy for the same values without autograd's history."""
    session, place, source = locate(tensor)
    if source is None:
        session.streamer.enter_loose(place.tensor.unit)  # in a pass, and then until its end
    if not is_proxy(tensor):
        return tensor.detach()
    with raw_tensor_access():
        alias = tensor.detach()
    return OffloadedTensor.become(alias, source or whole_of(place))


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write the values of another tensor, as `tensor.data = value` asks for."""
    if value is tensor:
        return
    _, place, source = locate(tensor)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise MemascendError(
            f"{place.name} is on SSD as {_kind(tensor)} and cannot become {_kind(value)}: convert or resize the model "
            "before memascend.offload"
        )
    if is_proxy(value):
        _, other, part = locate(value)
        if other is place and (part or whole_of(place)) == (source or whole_of(place)):
            return  # its own values
        raise MemascendError(
            f"{place.name} and {other.name} cannot share their values on SSD: copy them by .data.copy_(...), or tie "
            "the parameters before memascend.offload"
        )
    with torch.no_grad():
        alias_of(tensor).copy_(value)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of the values that a tensor has or stands for, without history."""
    if not is_proxy(tensor):
        return tensor.detach().clone()
    with torch.no_grad(), lent_values(tensor):
        return tensor.detach().clone()


def _ordinary_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = copy_of(tensor)
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@dataclass(slots=True)
class Loan:
    """The values of a parameter, or of its gradient, in memory while a function runs on them."""

    source: ProxySource
    #: All values of the parameter, or of its gradient: (numel,).
    stored: torch.Tensor

    def part(self, tensor: torch.Tensor) -> ProxySource | None:
        """Return which part of the values `tensor` shows, or None for a tensor of other memory."""
        stored = self.stored
        if tensor.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
            return None
        begin = tensor.storage_offset() * tensor.itemsize - stored.storage_offset() * stored.itemsize
        if not 0 <= begin < stored.nbytes:
            return None
        source = self.source
        return ProxySource(
            source.place,
            source.is_gradient,
            source.marker,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(begin) // tensor.itemsize,
        )


@contextmanager
def lent_values(tensor: torch.Tensor) -> Iterator[Loan]:
    """Have a proxy hold its values, as an ordinary tensor; write them back if they were written to."""
    session, place, source = locate(tensor)
    if source is not None and source.is_gradient:
        kept_gradient(tensor)
        with torch.inference_mode(False):
            stored = session.gradients.values(place)
        shown: _Showing | _ShowingAll = _Showing(tensor, source, stored)
        try:
            with shown:
                yield Loan(source, stored)
        finally:
            if shown.written:
                session.gradients.replace(place, stored)
        return
    unit = place.tensor.unit
    with session.streamer.lend(unit) as storage:
        if in_backward():
            for used in unit.places:
                session.gradients.note_used(used)
        with torch.inference_mode(False):
            stored = storage[place.offset : place.offset + place.nbytes].view(place.dtype)
        shown = _Showing(tensor, source, stored) if source is not None else _ShowingAll(place, storage)
        # Values that a function has written before it failed stay, as in memory.
        try:
            with shown:
                yield Loan(source or whole_of(place), stored)
        finally:
            if shown.written:
                session.streamer.values.check_writable([place])
                session.streamer.writes.mark(unit)


class _ShowingAll:
    """Have an absent parameter show its values in its unit's bytes."""

    def __init__(self, place: ParameterEntry, storage: torch.Tensor) -> None:
        """Prepare to show the parameter of `place` in `storage`."""
        self._place, self._storage = place, storage
        self.written = False

    def __enter__(self) -> _ShowingAll:
        self._place.bind(self._storage)
        return self

    def __exit__(self, *_: Any) -> None:
        self.written = self._place.binding.written
        self._place.binding.unbind()


def whole_of(place: ParameterEntry) -> ProxySource:
    """Describe all values of a parameter."""
    size = tuple(place.shape)
    stride = [1]
    for length in reversed(size[1:]):
        stride.append(stride[-1] * max(length, 1))
    return ProxySource(weakref.ref(place), False, None, place.dtype, size, tuple(reversed(stride[: len(size)])), 0)


class _Showing:
    """Have a proxy be an ordinary tensor over the flat values of its parameter, or of its gradient."""

    __slots__ = ("_absent", "_tensor", "_version", "_view", "written")

    def __init__(self, tensor: torch.Tensor, source: ProxySource, stored: torch.Tensor) -> None:
        """Prepare to show the part of `stored` that `source` describes."""
        self._tensor = tensor
        # A view made in inference mode would not count writes.
        with torch.inference_mode(False):
            flat = stored.view(source.dtype)
            self._view = flat.as_strided(source.size, source.stride, flat.storage_offset() + source.offset)
        self.written = False

    def __enter__(self) -> _Showing:
        tensor = self._tensor
        tensor.__class__ = torch.Tensor
        self._absent = tensor.data
        tensor.data = self._view
        self._version = version_of(tensor)
        return self

    def __exit__(self, *_: Any) -> None:
        tensor = self._tensor
        # A tensor of inference mode does not count its writes.
        self.written = version_of(tensor) != self._version or tensor.is_inference()
        tensor.data = self._absent
        tensor.__class__ = OffloadedTensor
