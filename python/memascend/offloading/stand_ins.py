"""What stands for tensors that are on SSD: absent parameters, kept gradients, and views of both.

A stand-in has shape, dtype, device and autograd history of the tensor it stands for, and a single NaN for data. PyTorch
asks its class before every function (`__torch_function__`, see torch.overrides). The function then runs on the values:
the unit of a weight is fetched, a gradient is read. What it wrote is written back, as the version counter says, and
what it returned of the same memory becomes a stand-in too. So a program that reads or writes weights outside of a pass
gets the bits that it would get in memory, one unit at a time.

In a pass a parameter whose unit is in memory is an ordinary parameter to PyTorch (`ResidentParameter`).
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from memascend.errors import MemascendError
from memascend.layout.units import absent_like
from memascend.offloading.places import place_of
from memascend.residency.host import NoBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.layout.units import Place
    from memascend.offloading.session import Session

#: While it is entered, PyTorch asks no class: a stand-in is what it holds, a NaN.
as_held = torch._C.DisableTorchFunctionSubclass


@dataclass(slots=True)
class _Source:
    """Which values a stand-in stands for: those of a parameter or its gradient, or a view of them."""

    place: weakref.ref[Place]
    is_gradient: bool
    #: Of a gradient: what stands for the whole of it. A later gradient has another.
    marker: weakref.ref[torch.Tensor] | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    #: Elements of `dtype` before the first one.
    offset: int


class _StandIn:
    """The methods that `OffloadedParameter` and `OffloadedTensor` share."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch on the values."""
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The values, without history. What is written to them is written to the store."""
        return _alias(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _assign(self, value)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = _ordinary_copy(self)  # type: ignore[arg-type]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary_copy(self).__reduce_ex__(protocol)  # type: ignore[arg-type]

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that cannot be written to: what is written to it would be lost."""
        array = copy_of(self).requires_grad_(self.requires_grad).numpy(force=force)  # type: ignore[attr-defined]
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)


class OffloadedParameter(_StandIn, nn.Parameter):
    """A parameter whose values are on SSD."""


class OffloadedTensor(_StandIn, torch.Tensor):
    """A gradient that is kept on SSD, or a view of one or of a weight."""

    _memascend_source: _Source


class ResidentParameter(nn.Parameter):
    """A parameter of an offloaded model whose values are in memory. PyTorch treats it as an ordinary one."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        """The values, without history. They share the version counter, so that a write to them is noticed."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _assign(self, value)

    def __repr__(self) -> str:
        """Show the values as those of an ordinary parameter."""
        return repr(nn.Parameter(self.detach(), self.requires_grad))


def disguise(place: Place) -> None:
    """Have the parameter at `place` be a stand-in from now on, whenever its values are not in memory."""
    kind = type(place.parameter)
    place.absent_class = OffloadedParameter
    # A program's own kind of parameter is what it was while its values are in memory.
    place.resident_class = ResidentParameter if kind in (nn.Parameter, OffloadedParameter) else kind
    place.marker = make_marker(place)
    place.hide()


def is_stand_in(tensor: Any) -> bool:
    """Whether a tensor stands for values on SSD."""
    return isinstance(tensor, _StandIn)


def make_marker(place: Place) -> torch.Tensor:
    """Return a new stand-in for the gradient of a parameter."""
    marker = absent_like(place.shape, place.dtype, place.absent.device)
    source = _whole(place)
    source.is_gradient, source.marker = True, weakref.ref(marker)
    marker.__class__ = OffloadedTensor
    marker._memascend_source = source
    return marker


def kept_gradient(tensor: Any) -> tuple[Place, bool] | None:
    """Return the parameter whose gradient `tensor` stands for, and whether for the whole of it.

    None for a tensor that stands for something else. Raises MemascendError if the gradient is gone.
    """
    source = getattr(tensor, "_memascend_source", None)
    if source is None or not source.is_gradient:
        return None
    place = source.place()
    if place is None or not place.held or place.marker is not source.marker():
        raise MemascendError(_gone("a parameter" if place is None else place.name))
    whole = _whole(place)
    return place, (source.dtype, source.size, source.offset) == (whole.dtype, whole.size, whole.offset)


def _gone(name: str) -> str:
    return (
        f"this gradient of {name} is gone: optimizer.step() or zero_grad() has consumed it, or a later backward pass has "
        "replaced it; read it before, or keep a clone"
    )


# ---- where the values are ---------------------------------------------------------------------------------------


def _located(tensor: torch.Tensor) -> tuple[Session, Place, _Source | None]:
    """Return session and place of the values that a stand-in stands for."""
    if isinstance(tensor, OffloadedTensor):
        source: _Source | None = tensor._memascend_source
        assert source is not None
        place = source.place()
        located = None if place is None else place_of(place.parameter)
    else:
        source, located = None, place_of(tensor)  # type: ignore[arg-type]
    if located is None or located[0].runtime.closed:
        raise MemascendError("the model of this parameter was closed: its weights are no longer on the store")
    return *located, source


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for the same values without autograd's history."""
    session, place, source = _located(tensor)
    if source is None:
        session.streamer.enter_loose(place.tensor.unit)  # in a pass, and then until its end
    if not is_stand_in(tensor):
        return tensor.detach()
    with as_held():
        alias = tensor.detach()
    alias.__class__ = OffloadedTensor
    alias._memascend_source = source or _whole(place)
    return alias


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write the values of another tensor, as `tensor.data = value` asks for."""
    if value is tensor:
        return
    _, place, source = _located(tensor)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise MemascendError(
            f"{place.name} is on SSD as {_kind(tensor)} and cannot become {_kind(value)}: convert or resize the model "
            "before memascend.offload"
        )
    if is_stand_in(value):
        _, other, part = _located(value)
        if other is place and (part or _whole(place)) == (source or _whole(place)):
            return  # its own values
    with torch.no_grad():
        _alias(tensor).copy_(value)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of the values that a tensor has or stands for, without history."""
    if not is_stand_in(tensor):
        return tensor.detach().clone()
    with torch.no_grad(), _values(tensor):
        return tensor.detach().clone()


def _ordinary_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = copy_of(tensor)
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@dataclass(slots=True)
class _Loan:
    """The values of a parameter, or of its gradient, in memory while a function runs on them."""

    source: _Source
    #: All values of the parameter, or of its gradient: (numel,).
    stored: torch.Tensor

    def part(self, tensor: torch.Tensor) -> _Source | None:
        """Return what `tensor` shows of the values, or None for a tensor of other memory."""
        stored = self.stored
        if tensor.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
            return None
        begin = tensor.storage_offset() * tensor.itemsize - stored.storage_offset() * stored.itemsize
        if not 0 <= begin < stored.nbytes:
            return None
        source = self.source
        return _Source(
            source.place,
            source.is_gradient,
            source.marker,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            begin // tensor.itemsize,
        )


@contextmanager
def _values(tensor: torch.Tensor) -> Iterator[_Loan]:
    """Have a stand-in hold its values, as an ordinary tensor; write them back if they were written to."""
    session, place, source = _located(tensor)
    if source is not None and source.is_gradient:
        if source.marker is None or place.marker is not source.marker() or not place.held:
            raise MemascendError(_gone(place.name))
        stored = session.gradients.values(place)
        with _Showing(tensor, source, stored) as shown:
            yield _Loan(source, stored)
        if shown.written:
            session.gradients.replace(place, stored)
        return
    unit = place.tensor.unit
    with session.streamer.lend(unit) as storage:
        stored = storage[place.offset : place.offset + place.nbytes].view(place.dtype)
        if source is None:
            source = _whole(place)
            place.show(storage)
            try:
                yield _Loan(source, stored)
            finally:
                written = place.written
                place.hide()
        else:
            with _Showing(tensor, source, stored) as shown:
                yield _Loan(source, stored)
            written = shown.written
        if written:
            session.streamer.check_writable([place])
            session.streamer.mark_written(unit)


def _whole(place: Place) -> _Source:
    """Describe all values of a parameter."""
    stride = torch.empty(place.shape, device="meta").stride()
    return _Source(weakref.ref(place), False, None, place.dtype, tuple(place.shape), stride, 0)


class _Showing:
    """Have a stand-in be an ordinary tensor over the flat values of its parameter, or of its gradient."""

    __slots__ = ("_absent", "_tensor", "_version", "_view", "written")

    def __init__(self, tensor: torch.Tensor, source: _Source, stored: torch.Tensor) -> None:
        """Prepare to show what `source` describes of `stored`."""
        flat = stored.view(source.dtype)
        self._tensor = tensor
        self._view = flat.as_strided(source.size, source.stride, flat.storage_offset() + source.offset)
        self.written = False

    def __enter__(self) -> _Showing:
        tensor = self._tensor
        tensor.__class__ = torch.Tensor
        self._absent = tensor.data
        tensor.data = self._view
        self._version = _version(tensor)
        return self

    def __exit__(self, *_: Any) -> None:
        tensor = self._tensor
        # A tensor of inference mode does not count its writes.
        self.written = _version(tensor) != self._version or tensor.is_inference()
        tensor.data = self._absent
        tensor.__class__ = OffloadedTensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# ---- functions --------------------------------------------------------------------------------------------------


def _run(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of PyTorch some of whose arguments are stand-ins."""
    if func in _AS_HELD:
        with as_held():
            return func(*args, **kwargs)
    if func in (torch.autograd.grad, torch.autograd.backward) or (func in _OWN and args and is_stand_in(args[0])):
        return _OWN[func](*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    stand_ins = list({id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_stand_in(leaf)}.values())
    for tensor in stand_ins:
        session, place, source = _located(tensor)
        if source is None:
            session.streamer.enter_loose(place.tensor.unit)  # in a pass, and then until its end
        if name in _REFUSED or name.startswith("_fused_"):
            raise MemascendError(f"{place.name} is on SSD: {name} {_REFUSED.get(name, _NOT_ON_SSD)}")
    stand_ins = [tensor for tensor in stand_ins if is_stand_in(tensor)]
    if not stand_ins:
        return func(*args, **kwargs)
    if len(stand_ins) > 1 and name.startswith(("_foreach_", "_amp_foreach_")):
        return _one_by_one(func, args, kwargs)
    try:
        return _run_on_values(func, args, kwargs, stand_ins)
    except NoBufferError:
        if len(stand_ins) == 1:
            raise
    return _run_on_copies(func, args, kwargs, stand_ins)


def _run_on_values(func: Callable, args: tuple, kwargs: dict[str, Any], stand_ins: list[torch.Tensor]) -> Any:
    session, _, _ = _located(stand_ins[0])
    with ExitStack() as stack:
        loans = [stack.enter_context(_values(tensor)) for tensor in stand_ins]
        if torch.is_grad_enabled():
            stack.enter_context(session.saving_names())
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _UNCOUNTED:
            for tensor in stand_ins:
                torch.autograd.graph.increment_version(tensor)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: _stand_in(tensor, stand_ins, loans), result)


def _stand_in(tensor: torch.Tensor, arguments: list[torch.Tensor], loans: list[_Loan]) -> torch.Tensor:
    """Have a result stand for its values if they are in memory that is lent."""
    if tensor.layout is not torch.strided or any(tensor is argument for argument in arguments):
        return tensor
    source = next((part for loan in loans if (part := loan.part(tensor)) is not None), None)
    if source is None:
        return tensor
    absent = torch.full((), float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=tensor.device)
    tensor.data = absent.expand(tensor.shape)
    tensor.__class__ = OffloadedTensor
    tensor._memascend_source = source
    return tensor


def conceal(result: Any, session: Session) -> Any:
    """Have tensors that a pass returns as views of weights be stand-ins: the weights leave memory after it."""
    by_address = session.streamer.by_address

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if is_stand_in(tensor) or isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        unit = by_address.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            return tensor
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        loans = [_Loan(_whole(place), place.view(storage).view(-1)) for place in unit.places]
        return _stand_in(tensor, [], loans)

    return pytree.tree_map_only(torch.Tensor, replace, result)


def _run_on_copies(func: Callable, args: tuple, kwargs: dict[str, Any], stand_ins: list[torch.Tensor]) -> Any:
    """Run a function that takes more weights at once than there are buffers: on copies, made one at a time."""
    copies = {id(tensor): tensor.clone() for tensor in stand_ins}
    versions = [_version(copy) for copy in copies.values()]
    args, kwargs = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
    result = func(*args, **kwargs)
    if versions != [_version(copy) for copy in copies.values()]:
        _, place, _ = _located(stand_ins[0])
        raise MemascendError(
            f"{getattr(func, '__name__', func)} was to write to {place.name} and {len(copies) - 1} more at once, which "
            "host_memory has no buffers for; nothing has changed: write to one at a time"
        )
    return result


def _one_by_one(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function on lists of tensors for one tensor of each list after the other."""
    length = len(args[0])

    def item(argument: Any, index: int) -> Any:
        per_tensor = isinstance(argument, list | tuple) and len(argument) == length
        return [argument[index]] if per_tensor else argument

    results = [
        func(*(item(argument, index) for argument in args), **{name: item(a, index) for name, a in kwargs.items()})
        for index in range(length)
    ]
    if not results or results[0] is None:
        return None
    return type(results[0])(value for result in results for value in result)


def _lay_out(func: Callable) -> Callable[..., Any]:
    """Return a function that answers for a stand-in what `func` says of the layout of its values."""

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _, place, source = _located(tensor)
        source = source or _whole(place)
        meta = torch.empty_strided(source.size, source.stride, dtype=source.dtype, device="meta")
        return func(meta, *args, **kwargs)

    return run


def _offset(tensor: torch.Tensor) -> int:
    _, _, source = _located(tensor)
    return 0 if source is None else source.offset


def _describe(tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
    copy = copy_of(tensor).requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return copy.__repr__(tensor_contents=tensor_contents)


def _fill(tensor: torch.Tensor, value: Any = 0.0) -> torch.Tensor:
    """Fill a stand-in. The whole of a gradient is neither read nor written for that."""
    session, place, source = _located(tensor)
    # The gradient that a step has consumed has no values, but may get some.
    if place.marker is tensor and source is not None and not isinstance(value, torch.Tensor):
        session.gradients.fill(place, float(value))
        return tensor
    _run_on_values(torch.Tensor.fill_, (tensor, value), {}, [tensor])
    return tensor


def _backward_to(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Compute `torch.autograd.grad` with respect to stand-ins, whose values it does not need."""
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with as_held():
        ends = [get_gradient_edge(tensor) if is_stand_in(tensor) else tensor for tensor in inputs]
    session = next(_located(tensor)[0] for tensor in inputs if is_stand_in(tensor))
    # The graph of the gradients saves weights too.
    with session.saving_names() if create_graph else nullcontext():
        gradients = torch.autograd.grad(
            outputs,
            ends,
            grad_outputs,
            retain_graph,
            create_graph,
            only_inputs,
            True if materialize_grads else allow_unused,
            is_grads_batched,
        )
    if materialize_grads:
        zeros = (torch.zeros_like(tensor) for tensor in inputs)
        return tuple(zero if gradient is None else gradient for zero, gradient in zip(zeros, gradients, strict=True))
    return gradients


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise MemascendError before an optimizer of another kind steps on parameters that are on SSD."""
    if getattr(optimizer, "updates_on_store", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, _StandIn) or parameter.grad is None:
                continue
            located = place_of(parameter)
            name = "a parameter" if located is None else located[1].name
            kinds = [kind.__name__ for kind in type(optimizer).__mro__]
            own = next((kind for kind in kinds if kind in ("Adam", "AdamW", "SGD", "Lion")), "AdamW")
            raise MemascendError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update {name}, which is on SSD: use "
                f"memascend.{own}(model.parameters(), ...)"
            )


@lru_cache(maxsize=1)
def refuse_other_optimizers() -> None:
    """Have every optimizer checked before its step, from now on."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Compute `torch.autograd.backward` towards stand-ins, or from them."""
    if inputs is not None:
        with as_held():
            inputs = [get_gradient_edge(tensor) if is_stand_in(tensor) else tensor for tensor in inputs]
    tensors = [tensor.view_as(tensor) if is_stand_in(tensor) else tensor for tensor in tensors]
    with as_held():
        ends = [get_gradient_edge(tensor) if is_stand_in(tensor) else tensor for tensor in tensors]
    torch.autograd.backward(ends, *args, inputs=inputs, **kwargs)


_NOT_ON_SSD = "needs it in memory; work on p.detach().clone() instead"
_ADDRESS = "asks for its address in memory; take a copy by .detach().clone() first"
#: Functions that have no meaning for values on SSD, and what the error says of them.
_REFUSED = {
    **dict.fromkeys(("data_ptr", "storage", "untyped_storage", "typed_storage", "_typed_storage"), _ADDRESS),
    **dict.fromkeys(("__dlpack__", "__dlpack_device__", "share_memory_", "is_set_to", "as_subclass"), _ADDRESS),
    **dict.fromkeys(("set_", "resize_", "resize_as_"), "would change its memory: resize before memascend.offload"),
}
#: Functions that write to tensors without counting it in their version.
_UNCOUNTED = frozenset(("apply_", "map_", "map2_", "_amp_foreach_non_finite_check_and_unscale_"))
_T = torch.Tensor
#: What is asked of a tensor without its values, so that the stand-in itself can answer.
_AS_HELD: set[Any] = {
    *(
        getattr(getattr(_T, name), "__get__", None)
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "_grad"),
            *("_version", "output_nr", "name", "names", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta"),
            *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "retains_grad", "_base"),
            *("_backward_hooks", "_post_accumulate_grad_hooks", "is_xla", "is_mps", "is_xpu"),
        )
        if hasattr(_T, name)
    ),
    *(
        getattr(getattr(_T, name), method)
        for name in ("requires_grad", "grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
        for method in ("__set__", "__delete__")
    ),
    *(
        getattr(owner, name)
        for name in (
            *("size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"),
            *("is_signed", "is_inference", "is_conj", "is_neg", "requires_grad_", "register_hook", "retain_grad"),
            *(
                "register_post_accumulate_grad_hook",
                "get_device",
                "__len__",
                "detach_",
                "is_same_size",
                "is_distributed",
            ),
            *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "has_names", "is_shared", "is_pinned"),
            *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
            *("__dir__", "result_type", "__hash__"),
        )
        for owner in (_T, torch)
        if hasattr(owner, name)
    ),
} - {None}
#: Functions that are answered here.
_OWN: dict[Any, Callable[..., Any]] = {
    _T.data.__get__: lambda tensor, *_: _alias(tensor),
    _T.data.__set__: _assign,
    _T.detach: _alias,
    torch.detach: _alias,
    _T.__repr__: _describe,
    _T.zero_: _fill,
    torch.zero_: _fill,
    _T.fill_: _fill,
    torch.fill_: _fill,
    _T.stride: _lay_out(_T.stride),
    _T.is_contiguous: _lay_out(_T.is_contiguous),
    _T.storage_offset: _offset,
    torch.autograd.grad: _backward_to,
    torch.autograd.backward: _backward,
}
