"""Functions of PyTorch that are called with proxies: run on the values, answered without them, or refused.

Answered without values: shapes, `requires_grad`, hooks. Run for one parameter at a time: `torch._foreach_*`. Refused:
foreign optimizers and torch.func's transforms. A function that is not listed runs on the values: it is slow, and not
wrong.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from memascend.autograd import experts
from memascend.autograd.addresses import ADDRESS, ANSWERS
from memascend.autograd.buffers import collected_by_checkpoint, version_of
from memascend.autograd.proxies import (
    OTHER_MEMORY,
    Loan,
    OffloadedParameter,
    OffloadedTensor,
    alias_of,
    assign,
    copy_of,
    is_proxy,
    kept_gradient,
    lent_values,
    locate,
    run_functions_by,
    whole_of,
)
from memascend.errors import MemascendError
from memascend.layout.registry import place_of
from memascend.layout.units import raw_tensor_access
from memascend.optimizers import CLASS_NAMES
from memascend.streaming.streamer import NoBufferError
from memascend.vocabulary.logits import deferred_linear
from memascend.vocabulary.lookup import embedding
from memascend.vocabulary.tables import find_tables_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.durability.protocols import SessionProtocol
    from memascend.layout.units import ParameterEntry
    from memascend.vocabulary.tables import Table


def run(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function of PyTorch some of whose arguments are proxies."""
    if func in _AS_HELD:
        with raw_tensor_access():
            return func(*args, **kwargs)
    if func in (torch.autograd.grad, torch.autograd.backward) or (func in _OWN and args and is_proxy(args[0])):
        return _OWN[func](*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    check_transforms("a parameter")
    for of_parts in _OF_PARTS.get(func, ()):
        if (result := of_parts(*args, **kwargs)) is not NotImplemented:
            return result
    proxies = list({id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_proxy(leaf)}.values())
    gradients = _enter(proxies, name)
    proxies = [tensor for tensor in proxies if is_proxy(tensor)]
    if not proxies:
        return func(*args, **kwargs)
    if func in ANSWERS:
        return ANSWERS[func](*args, **kwargs)
    if len(proxies) > 1 and name.startswith(("_foreach_", "_amp_foreach_")):
        return _one_by_one(func, args, kwargs)
    if len(gradients) > len(set(gradients)):
        return _run_on_copies(func, args, kwargs, proxies)  # one gradient is read for each view of it
    return _run_on_values(func, args, kwargs, proxies)


def _enter(proxies: Iterable[torch.Tensor], name: str) -> list[ParameterEntry]:
    """Have the units of proxies be in memory until the end of a pass, if one runs. Return the places of gradients.

    Raises MemascendError where the function `name` cannot run on parameters that are on SSD.
    """
    gradients = []
    for tensor in proxies:
        session, place, source = locate(tensor)
        if source is None:
            session.streamer.enter_loose(place.tensor.unit)
        elif source.is_gradient:
            gradients.append(place)
        if name in _REFUSED or name.startswith("_fused_"):
            raise MemascendError(f"{place.name} is on SSD: {name} {_REFUSED.get(name, _NOT_ON_SSD)}")
    return gradients


def _look_up(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Run `torch.nn.functional.embedding` on a table."""
    located = _table_of(weight)
    if located is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    session, place = located
    return embedding(input, weight, session.table(place), padding_idx)


def _apply_head(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Run `torch.nn.functional.linear` on a table: the logits are computed when they are asked for."""
    located = _table_of(weight)
    if located is None or is_proxy(input):
        return NotImplemented
    session, place = located
    if session.options.fused_loss is False:
        return NotImplemented
    return deferred_linear(input, weight, bias, session.table(place))


def _table_of(weight: torch.Tensor) -> tuple[Any, ParameterEntry] | None:
    """Return the session and the entry of a parameter that is a table on the store, and not in memory as a whole."""
    located = place_of(weight) if isinstance(weight, OffloadedParameter) else None
    if located is None or located[0].closed:
        return None
    unit = located[1].tensor.unit
    return located if unit.is_table and not unit.is_experts else None


def _find_table(weight: torch.Tensor) -> Table | None:
    """Return the table of an offloaded parameter, also of one that is read whole; None for others."""
    located = place_of(weight) if weight.ndim == 2 else None
    return None if located is None else located[0].table(located[1])


def check_transforms(name: str) -> None:
    """Raise MemascendError within the transforms of torch.func: they would trace the coming and going of weights."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MemascendError(
            f"{name} is on SSD, and cannot be used within torch.func's transforms (grad, vmap, jvp and others): use "
            "torch.autograd, or call the transform on copies (.detach().clone()) of the weights"
        )


def _run_on_values(func: Callable, args: tuple, kwargs: dict[str, Any], proxies: list[torch.Tensor]) -> Any:
    session, _, _ = locate(proxies[0])
    with ExitStack() as stack:
        try:
            loans = [stack.enter_context(lent_values(tensor)) for tensor in proxies]
        except NoBufferError:
            if len(proxies) == 1:
                raise
            stack.close()
            return _run_on_copies(func, args, kwargs, proxies)
        if torch.is_grad_enabled() and not collected_by_checkpoint():
            stack.enter_context(session.saving_names())
        try:
            result = func(*args, **kwargs)
        finally:
            if getattr(func, "__name__", "") in _UNCOUNTED:
                for tensor in proxies:
                    torch.autograd.graph.increment_version(tensor)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: _proxy_for(tensor, proxies, loans), result)


def _proxy_for(tensor: torch.Tensor, arguments: list[torch.Tensor], loans: list[Loan]) -> torch.Tensor:
    """Have a result stand for its values if they are in memory that is lent."""
    if tensor.layout is not torch.strided or any(tensor is argument for argument in arguments):
        return tensor
    source = next((part for loan in loans if (part := loan.part(tensor)) is not None), None)
    if source is None:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().clone()
    absent = torch.full((), float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=tensor.device)
    tensor.data = absent.expand(tensor.shape)
    return OffloadedTensor.become(tensor, source)


def wrap_outputs(result: Any, session: SessionProtocol) -> Any:
    """Have tensors that a pass returns as views of weights be proxies: the weights leave memory after it."""
    by_address = session.streamer.by_address

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        unit = by_address.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            return tensor
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        loans = [Loan(whole_of(place), place.view(storage).view(-1)) for place in unit.places]
        return _proxy_for(tensor, [], loans)

    return pytree.tree_map_only(torch.Tensor, replace, result)


def _run_on_copies(func: Callable, args: tuple, kwargs: dict[str, Any], proxies: list[torch.Tensor]) -> Any:
    """Run a function that takes more weights at once than there are buffers, on copies of those it only reads."""
    name = getattr(func, "__name__", str(func))
    in_place = name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    target = kwargs.get("out", args[0] if args and in_place else None)
    copies = {id(tensor): tensor.clone() for tensor in proxies if tensor is not target}
    versions = [version_of(copy) for copy in copies.values()]
    args, kwargs = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
    result = _run_on_values(func, args, kwargs, [target]) if is_proxy(target) else func(*args, **kwargs)
    storages = {copy.untyped_storage().data_ptr() for copy in copies.values()}
    views = [
        tensor
        for tensor in pytree.tree_leaves(result)
        if type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() in storages
    ]
    if views or versions != [version_of(copy) for copy in copies.values()]:
        _, place, _ = locate(proxies[0])
        raise MemascendError(
            f"{name} was to write to {place.name} and {len(copies) - 1} more at once, or to return views of them: "
            "nothing has changed; take one at a time"
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
    """Return a function that answers for a proxy as `func` does for the layout of its values."""

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(_layout_of(tensor), *args, **kwargs)

    return run


def _like(func: Callable) -> Callable[..., Any]:
    """Return a function that makes, as `func` does, a tensor like a proxy: of its layout, on its device."""

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(_layout_of(tensor), *args, **{"device": tensor.device} | kwargs)

    return run


def _layout_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data that is laid out as the values of a proxy are."""
    _, place, source = locate(tensor)
    source = source or whole_of(place)
    return torch.empty_strided(source.size, source.stride, dtype=source.dtype, device="meta")


def _offset(tensor: torch.Tensor) -> int:
    _, _, source = locate(tensor)
    return 0 if source is None else source.offset


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set `parameter.grad`. The gradient of another parameter is copied: later it may be gone."""
    if is_proxy(value):
        located, kept = locate(parameter), kept_gradient(value)
        if kept is None or kept[0] is not located[1] or value is not kept[0].gradient.marker:
            value = copy_of(value)
    with raw_tensor_access():
        parameter.grad = value


def _describe(tensor: torch.Tensor, *, tensor_contents: Any = None) -> str:
    copy = copy_of(tensor).requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return _T.__repr__(copy, tensor_contents=tensor_contents)  # type: ignore[call-arg]


def _fill(tensor: torch.Tensor, value: Any = 0.0) -> torch.Tensor:
    """Fill a proxy. The whole of a gradient is neither read nor written for that."""
    session, place, source = locate(tensor)
    # The gradient that a step has consumed has no values, but may get some.
    if place.gradient.marker is tensor and source is not None and not isinstance(value, torch.Tensor):
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
    """Compute `torch.autograd.grad` with respect to proxies, whose values it does not need."""
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    grad_outputs = pytree.tree_map(lambda leaf: copy_of(leaf) if is_proxy(leaf) else leaf, grad_outputs)
    with raw_tensor_access():
        ends = [get_gradient_edge(tensor) if is_proxy(tensor) else tensor for tensor in inputs]
    session = next(locate(tensor)[0] for tensor in inputs if is_proxy(tensor))
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


def refuse_foreign(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise MemascendError if an optimizer of another kind is to step on parameters that are on SSD."""
    if getattr(optimizer, "updates_on_store", False):
        return
    for parameter in parameters:
        if not is_proxy(parameter):
            continue
        located = place_of(parameter)
        name = "a parameter" if located is None else located[1].name
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        own = next((kind for kind in kinds if kind in CLASS_NAMES), "AdamW")
        raise MemascendError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update {name}, which is on SSD: use "
            f"memascend.{own}(model.parameters(), ...)"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise MemascendError before an optimizer of another kind steps on parameters that are on SSD."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    refuse_foreign(optimizer, (parameter for parameter in parameters if parameter.grad is not None))


@lru_cache(maxsize=1)
def refuse_other_optimizers() -> None:
    """Have every optimizer checked before its step, from now on."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _backward(tensors: Any, *, inputs: Any = None, **kwargs: Any) -> None:
    """Compute `torch.autograd.backward` towards proxies, or from them."""
    if inputs is not None:
        with raw_tensor_access():
            inputs = [get_gradient_edge(tensor) if is_proxy(tensor) else tensor for tensor in inputs]
    tensors = [tensor.view_as(tensor) if is_proxy(tensor) else tensor for tensor in tensors]
    with raw_tensor_access():
        ends = [get_gradient_edge(tensor) if is_proxy(tensor) else tensor for tensor in tensors]
    torch.autograd.backward(ends, inputs=inputs, **kwargs)


#: Functions that read tables by blocks or rows, and experts one by one.
_OF_PARTS: dict[Any, tuple[Callable[..., Any], ...]] = {
    F.embedding: (_look_up,),
    F.linear: (experts.linear, _apply_head),
    torch.Tensor.__getitem__: (experts.take,),
    **dict.fromkeys((torch.Tensor.transpose, torch.transpose), (experts.transpose,)),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), (experts.matmul,)),
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm), (experts.bmm,)),
    **dict.fromkeys(
        (getattr(owner, name) for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(owner, name)),
        (experts.grouped_mm,),
    ),
}
_NOT_ON_SSD = "needs it in memory; work on p.detach().clone() instead"
#: Functions that have no meaning for values on SSD, and the text of the error.
_REFUSED = {
    **dict.fromkeys(("typed_storage", "__dlpack__", "__dlpack_device__", "share_memory_", "as_subclass"), ADDRESS),
    **dict.fromkeys(("set_", "resize_", "resize_as_"), OTHER_MEMORY),
}
#: Functions that write to tensors without counting it in their version.
_UNCOUNTED = frozenset(("apply_", "map_", "map2_", "_amp_foreach_non_finite_check_and_unscale_"))
#: Operators that write to their first argument.
_WRITING_OPERATORS = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))
#: Functions that make a tensor with the layout of another.
_LIKE = ("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like")
_T = torch.Tensor
#: Queries that need no values, so that the proxy itself can answer.
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
        if (name, method) != ("grad", "__set__")
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
            *("new_empty", "new_zeros", "new_ones", "has_names", "is_shared", "is_pinned"),
            *("__dir__", "result_type", "__hash__", "_has_compatible_shallow_copy_type"),
        )
        for owner in (_T, torch)
        if hasattr(owner, name)
    ),
} - {None}
#: Functions that are answered here.
_OWN: dict[Any, Callable[..., Any]] = {
    vars(torch._C.TensorBase)["data"].__get__: lambda tensor, *_: alias_of(tensor),
    vars(torch._C.TensorBase)["data"].__set__: assign,
    _T.detach: alias_of,
    torch.detach: alias_of,
    _T.__repr__: _describe,
    vars(torch._C.TensorBase)["grad"].__set__: _set_gradient,
    _T.zero_: _fill,
    torch.zero_: _fill,
    _T.fill_: _fill,
    torch.fill_: _fill,
    _T.stride: _lay_out(_T.stride),
    _T.is_contiguous: _lay_out(_T.is_contiguous),
    _T.storage_offset: _offset,
    **{getattr(torch, name): _like(getattr(torch, name)) for name in _LIKE},
    torch.autograd.grad: _backward_to,
    torch.autograd.backward: _backward,
}

run_functions_by(run)
find_tables_by(_find_table)
