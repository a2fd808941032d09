"""Experts that are read one by one, as a use of them sees them, and the gradients of trained ones.

A gradient has no memory until it is put aside, as a table's (`memascend.vocabulary.gradient`): each expert's is made
then from the tokens' rows that its products had, and put aside before the next. An expert without tokens gets zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from memascend.errors import MemascendError, stale
from memascend.layout.units import CPU
from memascend.vocabulary.gradient import TableGradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.layout.units import ParameterEntry
    from memascend.streaming.experts import ExpertPieces


class ExpertWeights(NamedTuple):
    """All experts of a parameter, or one, whose weights (rows, columns) are transposed or not.

    It implements `memascend.vocabulary.tables.Rows`. The rows of all experts are experts.
    """

    pieces: ExpertPieces
    place: ParameterEntry
    is_transposed: bool
    #: None is all of them.
    number: int | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of one expert's weights as the model sees them."""
        _, rows, columns = self.place.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights as the model sees them."""
        return self.matrix if self.number is not None else (self.place.shape[0], *self.matrix)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of `shape` in the parameter."""
        _, rows, columns = self.place.shape
        strides = (1, columns) if self.is_transposed else (columns, 1)
        return strides if self.number is not None else (rows * columns, *strides)

    @property
    def rows(self) -> int:
        """The experts; of one expert, its rows."""
        return self.shape[0]

    @property
    def block_rows(self) -> int:
        """One expert."""
        return 1 if self.number is None else self.rows

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.place.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return CPU

    @property
    def version(self) -> int:
        """A number that grows with every step, and every write to the experts."""
        return self.pieces.version(self.place)

    def check(self, version: int) -> None:
        """Raise MemascendError if the experts were written to since `version`."""
        if self.version != version:
            raise MemascendError(stale(self.place.name))

    def shown(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights of an expert, (rows, columns), as the model sees them."""
        return values.t() if self.is_transposed else values

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, weights) of one expert after the other; each is valid until the next is asked for."""
        self.pieces.begin(self.place)
        for number in range(self.place.shape[0]) if self.number is None else [self.number]:
            with self.pieces.use(self.place, number) as values:
                yield (number, self.shown(values)[None]) if self.number is None else (0, self.shown(values))


class ExpertGradients(Protocol):
    """Products of rows with the weights of experts; see `memascend.autograd.expert_products`."""

    experts: ExpertWeights

    def gradient(self, input: torch.Tensor, grad: torch.Tensor, number: int, /) -> torch.Tensor | None:
        """Return the gradient of expert `number`, a new tensor; None for zeros."""


class ProductsSource:
    """The gradient of experts from products with their weights."""

    needs_weights = False

    def __init__(self, products: ExpertGradients, input: torch.Tensor, grad: torch.Tensor) -> None:
        """Take the rows of the products' input and of their result's gradient."""
        self._products, self._input, self._grad = products, input, grad

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor | None:
        """Make the gradient of one expert."""
        number = self._products.experts.number
        return self._products.gradient(self._input, self._grad, first if number is None else number)


class TakenSource:
    """The gradient of all experts from the gradient of one that was taken from them."""

    needs_weights = False

    def __init__(self, number: int, grad: torch.Tensor) -> None:
        """Take the gradient (rows, columns) of expert `number`."""
        self._number, self._grad = number, grad

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor | None:
        """Make the gradient of the expert; the others have zeros."""
        return _block(self._grad, 0, len(self._grad))[None] if first == self._number else None


class TransposedSource:
    """The gradient of weights from the gradient of the transposed ones."""

    needs_weights = False

    def __init__(self, grad: torch.Tensor) -> None:
        """Take the gradient (..., columns, rows)."""
        self._grad = grad

    def block(self, first: int, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Transpose the gradient of an expert."""
        block = _block(self._grad, first, count if self._grad.ndim == 3 else len(self._grad))
        return block.transpose(-2, -1)


def _block(gradient: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return rows of a gradient as a new tensor."""
    if isinstance(gradient, TableGradient) and not gradient.is_dense:
        return gradient.block(first, count)
    return gradient[first : first + count].clone()
