"""Products with experts that are read one by one, with the bits of PyTorch's with all of them in memory.

A model takes the weights of an expert from the tensor of all (`weight[expert]`), multiplies tokens that are sorted by
expert (`grouped_mm`), or gives tokens to every expert (`bmm`). These are answered here by proxies for a part of the
values and by products that read one expert after the other, those alone that have tokens. No graph holds an expert: the
backward pass reads it again, and leaves gradients that are made one by one (`expert_weights`).

Functions that are not listed here run on the values, all experts at once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from memascend.autograd.expert_products import OfAll, OfGroups, OfOne
from memascend.autograd.expert_weights import ExpertWeights, ProductsSource, TakenSource, TransposedSource
from memascend.autograd.proxies import OffloadedParameter, OffloadedTensor, ProxySource, is_proxy, locate
from memascend.vocabulary.gradient import TableGradient

if TYPE_CHECKING:
    from memascend.autograd.expert_products import Products


def take(weight: Any, index: Any) -> Any:
    """Run `weight[index]` for the number of an expert: a proxy for its weights, which are not read yet."""
    experts = _experts_of(weight)
    if experts is None or experts.number is not None:
        return NotImplemented
    if isinstance(index, torch.Tensor):
        if index.ndim or index.dtype not in (torch.int64, torch.int32):
            return NotImplemented
        index = int(index)
    elif isinstance(index, bool) or not isinstance(index, int):
        return NotImplemented
    count = experts.rows
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")  # PyTorch's own words
    return _proxy_for(_Taken.apply(weight, experts, index % count), experts._replace(number=index % count))


def transpose(weight: Any, dim0: Any, dim1: Any) -> Any:
    """Run `weight.transpose(dim0, dim1)` for the rows and columns of experts: a proxy, without their values."""
    experts = _experts_of(weight)
    dims = weight.ndim
    if experts is None or {dim0 % dims, dim1 % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    other = experts._replace(is_transposed=not experts.is_transposed)
    return _proxy_for(_Transposed.apply(weight, experts, other), other)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """Run `torch.nn.functional.linear` with the weights of one expert."""
    return _multiply(input, weight, bias, is_linear=True)


def matmul(input: Any, other: Any, **others: Any) -> Any:
    """Run `input @ other` with the weights of one expert."""
    return NotImplemented if others else _multiply(input, other, None, is_linear=False)


def grouped_mm(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """Run `torch.nn.functional.grouped_mm` with the weights of all experts, of rows that are sorted by expert."""
    experts = _experts_of(mat_b)
    if experts is None or experts.number is not None or offs is None or bias is not None or out_dtype is not None:
        return NotImplemented
    if not _is_matrix(mat_a):
        return NotImplemented
    ends = offs.tolist()
    if len(ends) != experts.rows or ends[-1] != len(mat_a) or not len(mat_a):
        return NotImplemented  # Rows of no expert have no values.
    return _Multiply.apply(mat_a, mat_b, OfGroups(experts, ends))


def bmm(input: Any, mat2: Any, **others: Any) -> Any:
    """Run `torch.bmm` with the weights of all experts, which have equally many rows each."""
    experts = _experts_of(mat2)
    if experts is None or experts.number is not None or others or not _is_plain(input):
        return NotImplemented
    if input.ndim != 3 or (len(input), input.shape[2]) != experts.shape[:2]:
        return NotImplemented
    input, dtype = _as_autocast(input, experts)
    with torch.autocast("cpu", enabled=False):
        return _Multiply.apply(input, mat2, OfAll(experts, dtype))


def _experts_of(weight: Any) -> ExpertWeights | None:
    """Return the experts, read one by one, that a proxy shows; None for another tensor."""
    if not isinstance(weight, OffloadedParameter | OffloadedTensor):
        return None
    session, place, source = locate(weight)
    if not place.tensor.unit.is_experts:
        return None
    if source is None:
        return ExpertWeights(session.pieces, place, False)
    if source.is_gradient or source.dtype != place.dtype:
        return None
    _, rows, columns = place.shape
    number, rest = divmod(source.offset, rows * columns)
    for is_transposed in (False, True):
        for experts in (ExpertWeights(session.pieces, place, is_transposed, n) for n in (number, None)):
            begins = rest == 0 if experts.number is not None else source.offset == 0
            if begins and (source.size, source.stride) == (experts.shape, experts.strides):
                return experts
    return None


def _proxy_for(absent: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Have a tensor without values, and with the history of experts, stand for them."""
    place, number = experts.place, experts.number or 0
    _, rows, columns = place.shape
    offset = number * rows * columns
    source = ProxySource(weakref.ref(place), False, None, place.dtype, experts.shape, experts.strides, offset)
    return OffloadedTensor.become(absent, source)


def _absent(experts: ExpertWeights) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=experts.dtype).expand(experts.shape)


class _Taken(torch.autograd.Function):
    """One expert of all, without values."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, experts: ExpertWeights, number: int) -> torch.Tensor:
        """Return a tensor for expert `number`."""
        ctx.experts, ctx.number = experts, number
        return _absent(experts._replace(number=number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Put the expert's gradient in its place among all experts'."""
        return TableGradient(ctx.experts, (TakenSource(ctx.number, grad),)), None, None


class _Transposed(torch.autograd.Function):
    """Experts with rows and columns exchanged, without values."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, experts: ExpertWeights, other: ExpertWeights) -> torch.Tensor:
        """Return a tensor for `other`, which is `experts` transposed."""
        ctx.experts = experts
        return _absent(other)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Exchange rows and columns of each gradient."""
        return TableGradient(ctx.experts, (TransposedSource(grad),)), None, None


def _is_plain(tensor: Any) -> bool:
    """Return whether the products here take a tensor: values in rows, one behind the other."""
    plain = isinstance(tensor, torch.Tensor) and not is_proxy(tensor)
    return plain and tensor.is_contiguous() and tensor.device.type == "cpu"


def _is_matrix(tensor: Any) -> bool:
    return _is_plain(tensor) and tensor.ndim == 2


def _as_autocast(input: torch.Tensor, experts: ExpertWeights) -> tuple[torch.Tensor, torch.dtype]:
    """Return the input of a product and the dtype for the weights, converted as autocast does before a product."""
    if not torch.is_autocast_enabled("cpu"):
        return input, experts.dtype
    dtype = torch.get_autocast_dtype("cpu")
    return input.to(dtype), dtype


def _multiply(input: Any, weight: Any, bias: Any, is_linear: bool) -> Any:
    experts = _experts_of(weight)
    if experts is None or experts.number is None or bias is not None or not _is_matrix(input):
        return NotImplemented
    input, dtype = _as_autocast(input, experts)
    with torch.autocast("cpu", enabled=False):
        return _Multiply.apply(input, weight, OfOne(experts, dtype, is_linear))


class _Multiply(torch.autograd.Function):
    """Products with the weights of experts."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, products: Products) -> torch.Tensor:
        """Read one expert after the other; `weight` stands for them."""
        ctx.products, ctx.version = products, products.experts.version
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(input)
        return products.multiply(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Read them again for the gradient of the input; the gradient of the weights is made as it is put aside."""
        products, of_input, of_weight = ctx.products, None, None
        products.experts.check(ctx.version)
        if ctx.needs_input_grad[1]:
            (input,) = ctx.saved_tensors
            of_weight = TableGradient(products.experts, (ProductsSource(products, input, grad),))
        if ctx.needs_input_grad[0]:
            of_input = products.multiply_back(grad)
        return of_input, of_weight, None
