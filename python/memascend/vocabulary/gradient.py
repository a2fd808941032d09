"""The gradient of a table, made block by block when it is asked for.

A `TableGradient` has the table's shape and no memory. It holds sources: the results of the backward pass for each use
of the table. A source makes the gradient of one block of rows. Autograd's sum of two is one with the sources of both,
in order: blocks are then added in the table's dtype, as autograd would add the whole gradients, so the bits are the
same. Every other operation makes it an ordinary tensor first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils import _pytree as pytree

from memascend.errors import MemascendError
from memascend.vocabulary.tables import MemoryTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.vocabulary.tables import Rows, Table

_aten = torch.ops.aten


class GradientSource(Protocol):
    """The result of the backward pass for one use of a table."""

    #: Whether `block` needs the table's values.
    needs_weights: bool

    def block(self, first: int, count: int, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of `count` rows from `first` on, a new tensor in the table's dtype; None for zeros."""


class RowsSource:
    """The gradient of a lookup."""

    needs_weights = False

    def __init__(self, ids: torch.Tensor, grad_output: torch.Tensor, padding_idx: int | None) -> None:
        """Take the ids (...), the gradient (..., width) of their rows, and the id whose row gets none."""
        self.ids = ids.reshape(-1)
        self.grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        self.padding_idx = padding_idx

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Add the gradients of each row's tokens, in the tokens' order, as PyTorch does for the whole table."""
        tokens = ((self.ids >= first) & (self.ids < first + count)).nonzero().squeeze(1)
        if tokens.numel() == self.ids.numel():
            ids, gradient = self.ids - first, self.grad_output
        else:
            ids, gradient = self.ids[tokens] - first, self.grad_output[tokens]
        padding = -1 if self.padding_idx is None else self.padding_idx - first
        padding = padding if 0 <= padding < count else -1
        return _aten.embedding_dense_backward(gradient, ids, count, padding, False)


class FoundRowsSource:
    """The gradient of a lookup of rows that the host knows: a device computes all their gradients at once.

    As for the whole table, one call adds up the gradients of all tokens, so that the device adds in the same order.
    """

    needs_weights = False

    def __init__(
        self, rows: torch.Tensor, inverse: torch.Tensor, grad_output: torch.Tensor, padding_idx: int | None
    ) -> None:
        """Take the rows (n,) in ascending order, in host memory, which of them each token has, and as `RowsSource`."""
        self._rows, self._inverse = rows, inverse.reshape(-1)
        self._grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        self._padding_idx = padding_idx
        #: The gradients of the rows (n, width), and the rows' numbers beside them.
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def _find(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._found is None:
            padding = -1 if self._padding_idx is None else int(torch.searchsorted(self._rows, self._padding_idx))
            if padding >= 0 and (padding == len(self._rows) or self._rows[padding] != self._padding_idx):
                padding = -1
            found = _aten.embedding_dense_backward(self._grad_output, self._inverse, len(self._rows), padding, False)
            self._found = found, self._rows.to(found.device, non_blocking=True)
        return self._found

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Put the gradients of the block's rows where they belong; the others get none."""
        gradients, rows = self._find()
        begin, end = torch.searchsorted(self._rows, torch.tensor([first, first + count])).tolist()
        block = gradients.new_zeros(count, gradients.shape[1])
        return block.index_copy_(0, rows[begin:end] - first, gradients[begin:end])


class LinearSource:
    """The gradient of logits that were computed whole."""

    needs_weights = False

    def __init__(self, hidden: torch.Tensor, grad_logits: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the hidden states (N, width), the gradient (N, rows) of their logits, and the table's dtype."""
        self.hidden, self.grad_logits, self.dtype = hidden, grad_logits, dtype

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply the block's columns by the hidden states."""
        return (self.grad_logits[:, first : first + count].t() @ self.hidden).to(self.dtype)


class ConstantSource:
    """A gradient all of whose elements have one value, as after `zero_`."""

    needs_weights = False

    def __init__(self, table: Rows, value: float) -> None:
        """Fill blocks of `table`'s gradient with `value`."""
        self._table, self._value = table, value

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Make a block of the value."""
        table = self._table
        return torch.full((count, *table.shape[1:]), self._value, dtype=table.dtype, device=table.device)


class _SumSource:
    """A sum that is one term of another: it is rounded by itself."""

    def __init__(self, sources: tuple[GradientSource, ...]) -> None:
        self._sources = sources
        self.needs_weights = any(source.needs_weights for source in sources)

    def block(self, first: int, count: int, weights: torch.Tensor | None) -> torch.Tensor | None:
        return _add_up(self._sources, first, count, weights)


def _add_up(
    sources: tuple[GradientSource, ...], first: int, count: int, weights: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the sum of the sources' blocks, in their order; None for a sum of zeros."""
    total, terms = None, 0
    for source in sources:
        block = source.block(first, count, weights)
        if block is not None:
            total, terms = block if total is None else total.add_(block), terms + 1
    if total is not None and terms < len(sources):
        total.add_(0.0)  # Zeros that were added make 0 of -0, wherever they stood in the sum.
    return total


class _GradientContents:
    """State shared by a gradient and its aliases: sources, or values once they were asked for."""

    __slots__ = ("sources", "table", "values", "version")

    def __init__(self, table: Rows, sources: tuple[GradientSource, ...]) -> None:
        self.table, self.sources = table, sources
        self.values: torch.Tensor | None = None
        self.version = table.version


class TableGradient(torch.Tensor):
    """The gradient of a table, without memory for it; see the module."""

    _contents: _GradientContents

    @staticmethod
    def __new__(
        cls, table: Rows, sources: Sequence[GradientSource] = (), contents: _GradientContents | None = None
    ) -> TableGradient:
        """Make the gradient that is the sum of `sources`, none for zero. `contents` makes an alias instead."""
        gradient = torch.Tensor._make_wrapper_subclass(cls, table.shape, dtype=table.dtype, device=table.device)
        gradient._contents = contents or _GradientContents(table, tuple(sources))
        return gradient

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: `__new__` has made it."""

    @property
    def table(self) -> Rows:
        """The table whose gradient it is."""
        return self._contents.table

    @property
    def sources(self) -> tuple[GradientSource, ...]:
        """Sources of its blocks. Empty for zero, and once it was made dense."""
        return self._contents.sources

    @property
    def is_dense(self) -> bool:
        """Whether its values were asked for, and so are in memory."""
        return self._contents.values is not None

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, gradient of n rows in the table's dtype) in order."""
        contents = self._contents
        table = contents.table
        if contents.values is None and any(source.needs_weights for source in contents.sources):
            if contents.version != table.version:
                raise MemascendError(
                    "the weights of a head have changed since the backward pass, and its gradient was to be made "
                    "from them: read the gradient before they change, or offload with fused_loss=False"
                )
            for first, weights in table.blocks():
                yield first, self.block(first, weights.shape[0], weights)
            return
        for first in range(0, table.rows, table.block_rows):
            yield first, self.block(first, min(table.block_rows, table.rows - first))

    @torch.no_grad()
    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of the block of `count` rows from `first` on; `weights` are its values, if needed."""
        contents = self._contents
        if contents.values is not None:
            return contents.values[first : first + count]
        block = _add_up(self._terms(), first, count, weights)
        return ConstantSource(self.table, 0.0).block(first, count) if block is None else block

    def _terms(self) -> tuple[GradientSource, ...]:
        # A gradient without sources is zero, and adding to zero is no copy: 0 + -0 is 0.
        return self.sources or (ConstantSource(self.table, 0.0),)

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        """Return the gradient as an ordinary tensor, and drop the sources."""
        contents = self._contents
        if contents.values is None:
            values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            for first, block in self.blocks():
                values[first : first + block.shape[0]] = block
            contents.values, contents.sources = values, ()
        return contents.values

    def release(self) -> None:
        """Drop the sources, and the hidden states that they hold: the gradient is zero from now on."""
        self._contents.sources, self._contents.values = (), None

    def _alias(self) -> TableGradient:
        return TableGradient(self.table, contents=self._contents)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on sources where it only moves or adds them, else on the values."""
        kwargs = kwargs or {}
        without_values = _WITHOUT_VALUES.get(func)
        if without_values is not None:
            result = without_values(*args, **kwargs)
            if result is not None:
                return result
        wrappers: dict[int, TableGradient] = {}

        def values_of(leaf: Any) -> Any:
            if not isinstance(leaf, TableGradient):
                return leaf
            values = leaf.dense()
            wrappers[id(values)] = leaf
            return values

        args, kwargs = pytree.tree_map(values_of, (args, kwargs))
        result = func(*args, **kwargs)
        # A function writes to the gradient itself, not to its values.
        return pytree.tree_map(lambda leaf: wrappers.get(id(leaf), leaf), result)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.dense().detach().requires_grad_(self.requires_grad).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.dense().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.dense())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.dense().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


def gradient_of(table: Table, source: GradientSource) -> torch.Tensor:
    """Return the gradient of a table from its one use: an ordinary tensor where the weight is in memory."""
    gradient = TableGradient(table, (source,))
    return gradient.dense() if isinstance(table, MemoryTable) else gradient


# ---- operations that need no values: each returns None where it does ------------------------------------------------


def _same(gradient: TableGradient, *_: Any, **__: Any) -> torch.Tensor:
    return gradient._alias()


def _copy(gradient: TableGradient, **_: Any) -> torch.Tensor | None:
    return None if gradient.is_dense else TableGradient(gradient.table, gradient.sources)


def _convert(gradient: TableGradient, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor | None:
    same_dtype = dtype in (None, gradient.dtype)
    same_device = device is None or torch.device(device) == gradient.device
    return _copy(gradient) if same_dtype and same_device else None


def _joined(left: Any, right: Any, alpha: float) -> tuple[GradientSource, ...] | None:
    """Return the sources of a sum of two gradients, or None if it is not one of gradients of the same table."""
    both = isinstance(left, TableGradient) and isinstance(right, TableGradient) and left.table == right.table
    if not both or alpha != 1 or left.is_dense or right.is_dense:
        return None
    if left._contents.version != right._contents.version:
        return None
    terms, more = left._terms(), right._terms()
    return terms + (more if len(more) == 1 else (_SumSource(more),))


def _add(left: Any, right: Any, *, alpha: float = 1) -> torch.Tensor | None:
    sources = _joined(left, right, alpha)
    return None if sources is None else TableGradient(left.table, sources)


def _add_in_place(left: Any, right: Any, *, alpha: float = 1) -> torch.Tensor | None:
    sources = _joined(left, right, alpha)
    if sources is None:
        return None
    left._contents.sources = sources
    return left


def _copy_in_place(left: Any, right: Any, *_: Any) -> torch.Tensor | None:
    if not isinstance(left, TableGradient) or not isinstance(right, TableGradient):
        return None
    if left.table != right.table or left.is_dense or right.is_dense:
        return None
    left._contents.sources, left._contents.version = right.sources, right._contents.version
    return left


def _zero_in_place(gradient: TableGradient) -> torch.Tensor:
    if gradient.is_dense:
        gradient.dense().zero_()
    gradient._contents.sources = ()
    return gradient


def _like(gradient: TableGradient, size: Any = None, *_: Any, dtype: Any = None, device: Any = None, **__: Any) -> Any:
    same_size = size is None or tuple(size) == tuple(gradient.shape)
    same_device = device is None or torch.device(device) == gradient.device
    if not same_size or not same_device or dtype not in (None, gradient.dtype):
        return None
    return TableGradient(gradient.table)


_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _copy,
    _aten._to_copy.default: _convert,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_in_place,
    _aten.copy_.default: _copy_in_place,
    _aten.zero_.default: _zero_in_place,
    _aten.new_empty_strided.default: _like,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
}
