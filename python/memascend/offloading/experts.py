"""Products with frozen experts that are read one by one, with the bits of PyTorch's with all of them in memory.

A model takes the weights of an expert from the tensor of all (`weight[expert]`), or multiplies tokens that are sorted
by expert (`grouped_mm`). Both are answered here by stand-ins for a part of the values and by products that read one
expert after the other, those alone that have tokens. No graph holds an expert: the backward pass reads it again.

Functions that are not listed here run on the values, all experts at once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from memascend.errors import MemascendError
from memascend.layout.units import as_held
from memascend.offloading.session import stale
from memascend.offloading.stand_ins import OffloadedParameter, OffloadedTensor, Source, is_stand_in, locate, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.layout.units import Place
    from memascend.residency.experts import ExpertPieces


class _Experts(NamedTuple):
    """All experts of a parameter, or one, whose weights (rows, columns) are transposed or not."""

    pieces: ExpertPieces
    place: Place
    is_transposed: bool
    #: None is all of them.
    number: int | None = None

    def shown(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights of an expert as the model sees them."""
        return values.t() if self.is_transposed else values

    @property
    def version(self) -> int:
        """A number that grows with every write to the experts."""
        return self.pieces.version(self.place)

    def check(self, version: int) -> None:
        """Raise MemascendError if the experts were written to since `version`."""
        if self.version != version:
            raise MemascendError(stale(self.place.name))


def take(weight: Any, index: Any) -> Any:
    """Run `weight[index]` for the number of an expert: a stand-in for its weights, which are not read yet."""
    experts = _experts_of(weight)
    if experts is None or experts.number is not None:
        return NotImplemented
    if isinstance(index, torch.Tensor):
        if index.ndim or index.dtype not in (torch.int64, torch.int32):
            return NotImplemented
        index = int(index)
    elif isinstance(index, bool) or not isinstance(index, int):
        return NotImplemented
    count, rows, columns = experts.place.shape
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")  # PyTorch's own words
    size, stride = (rows, columns), (columns, 1)
    if experts.is_transposed:
        size, stride = size[::-1], stride[::-1]
    return _part(experts, size, stride, index % count * rows * columns)


def transpose(weight: Any, dim0: Any, dim1: Any) -> Any:
    """Run `weight.transpose(dim0, dim1)` for the rows and columns of experts: a stand-in, without their values."""
    experts = _experts_of(weight)
    dims = weight.ndim
    if experts is None or {dim0 % dims, dim1 % dims} != {dims - 2, dims - 1}:
        return NotImplemented
    _, _, source = locate(weight)
    source = source or whole_of(experts.place)
    *outer_size, rows, columns = source.size
    *outer_stride, row_stride, column_stride = source.stride
    return _part(experts, (*outer_size, columns, rows), (*outer_stride, column_stride, row_stride), source.offset)


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
    if len(ends) != experts.place.shape[0] or ends[-1] != len(mat_a) or not len(mat_a):
        return NotImplemented  # Rows of no expert have no values.
    _check_frozen(experts.place)
    return _Groups.apply(mat_a, experts, ends)


def _experts_of(weight: Any) -> _Experts | None:
    """Return the experts, read one by one, that a stand-in shows; None for another tensor."""
    if not isinstance(weight, OffloadedParameter | OffloadedTensor):
        return None
    session, place, source = locate(weight)
    if not place.tensor.unit.is_experts:
        return None
    if source is None:
        return _Experts(session.pieces, place, False)
    if source.is_gradient or source.dtype != place.dtype:
        return None
    count, rows, columns = place.shape
    orders: dict[Any, bool] = {((rows, columns), (columns, 1)): False, ((columns, rows), (1, columns)): True}
    is_transposed = orders.get((source.size[-2:], source.stride[-2:]))
    if is_transposed is None:
        return None
    if len(source.size) == 2 and source.offset % (rows * columns) == 0:
        return _Experts(session.pieces, place, is_transposed, source.offset // (rows * columns))
    if len(source.size) == 3 and (source.size[0], source.stride[0]) == (count, rows * columns):
        return _Experts(session.pieces, place, is_transposed)
    return None


def _part(experts: _Experts, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return a stand-in for a part of the experts of a parameter."""
    place = experts.place
    absent = torch.full((), float("nan"), dtype=place.dtype).expand(tuple(size))
    source = Source(weakref.ref(place), False, None, place.dtype, tuple(size), tuple(stride), offset)
    return OffloadedTensor.become(absent, source)


def _is_matrix(tensor: Any) -> bool:
    """Return whether the products here take a tensor: a matrix in rows, one behind the other."""
    plain = isinstance(tensor, torch.Tensor) and not is_stand_in(tensor)
    return plain and tensor.ndim == 2 and tensor.is_contiguous() and tensor.device.type == "cpu"


def _check_frozen(place: Place) -> None:
    with as_held():
        trained = place.parameter.requires_grad
    if trained:
        raise MemascendError(
            f"{place.name} is to be trained, but its experts are read one by one, for which they are frozen when the "
            "model is offloaded: use experts='whole'"
        )


def _multiply(input: Any, weight: Any, bias: Any, is_linear: bool) -> Any:
    experts = _experts_of(weight)
    if experts is None or experts.number is None or bias is not None or not _is_matrix(input):
        return NotImplemented
    _check_frozen(experts.place)
    dtype = experts.place.dtype
    if torch.is_autocast_enabled("cpu"):
        # Of both sides, as autocast does before a product.
        dtype = torch.get_autocast_dtype("cpu")
        input = input.to(dtype)
    with torch.autocast("cpu", enabled=False):
        return _Product.apply(input, experts, dtype, is_linear)


class _Product(torch.autograd.Function):
    """A product of (tokens, columns) with the weights of one expert, in a dtype."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, experts: _Experts, dtype: torch.dtype, is_linear: bool) -> torch.Tensor:
        """Read the expert, and multiply."""
        ctx.experts, ctx.dtype, ctx.is_linear, ctx.version = experts, dtype, is_linear, experts.version
        assert experts.number is not None
        experts.pieces.begin(experts.place)
        with experts.pieces.use(experts.place, experts.number) as values:
            weight = experts.shown(values.to(dtype))
            return F.linear(input, weight) if is_linear else torch.matmul(input, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Read the expert again: autograd's product for the gradient of a matrix in rows."""
        experts = ctx.experts
        experts.check(ctx.version)
        experts.pieces.begin(experts.place)
        with experts.pieces.use(experts.place, experts.number) as values:
            weight = experts.shown(values.to(ctx.dtype))
            return grad.mm(weight if ctx.is_linear else weight.t()), None, None, None


class _Groups(torch.autograd.Function):
    """Products of (tokens, columns), sorted by expert, with the weights of those experts that have tokens."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, experts: _Experts, ends: list[int]) -> torch.Tensor:
        """Read one expert after the other."""
        ctx.experts, ctx.ends, ctx.version = experts, ends, experts.version
        return _in_groups(input, experts, ends, lambda weight: weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Read them again: autograd's product for the gradient of a matrix in rows."""
        ctx.experts.check(ctx.version)
        return _in_groups(grad, ctx.experts, ctx.ends, torch.t), None, None


def _in_groups(
    rows: torch.Tensor, experts: _Experts, ends: list[int], oriented: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Multiply each group of rows, (tokens, columns), with the weights of its expert."""
    pieces, place = experts.pieces, experts.place
    groups = list(_groups(ends))
    numbers = [number for number, _, _ in groups]
    result: torch.Tensor | None = None
    pieces.begin(place)
    for order, (number, begin, end) in enumerate(groups):
        offsets = torch.tensor([end - begin], dtype=torch.int32)
        with pieces.use(place, number, numbers[order + 1 :]) as values:
            weight = oriented(experts.shown(values)).unsqueeze(0)
            product = F.grouped_mm(rows[begin:end], weight, offs=offsets)
            del weight
        if result is None:
            result = product.new_empty(len(rows), product.shape[1])
        result[begin:end] = product
    assert result is not None, "some expert has rows"
    return result


def _groups(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each expert with rows, its first row, and the row behind its last."""
    begin = 0
    for number, end in enumerate(ends):
        if end > begin:
            yield number, begin, end
        begin = end
