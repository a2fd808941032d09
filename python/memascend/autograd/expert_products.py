"""Products of rows with the weights of experts, one expert after the other, with the bits of one call for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.autograd.expert_weights import ExpertWeights


class Products:
    """Products of `rows` of an input with the weights of each expert, in a dtype, and their gradients."""

    def __init__(self, experts: ExpertWeights, dtype: torch.dtype, rows: dict[int, slice]) -> None:
        """Multiply the rows that each expert has, by its number."""
        self.experts, self._dtype, self._rows = experts, dtype, rows

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """Return the products, (..., columns), once each expert was read that has rows."""
        return self._in_turn(list(self._rows), input, self._product)

    def multiply_back(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input from the gradient of the products; it reads the experts again."""
        # Backwards, since the last ones of the forward pass may still be in memory.
        return self._in_turn(list(reversed(self._rows)), grad, self._product_back)

    def gradient(self, input: torch.Tensor, grad: torch.Tensor, number: int) -> torch.Tensor | None:
        """Return the gradient of an expert's weights, as autograd computes it; None where it has no rows."""
        rows = self._rows.get(number)
        return None if rows is None else self._gradient(input[rows], grad[rows]).to(self.experts.dtype)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _product_back(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _gradient(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _in_turn(
        self,
        numbers: Sequence[int],
        rows: torch.Tensor,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return `product(rows, weight)` of experts in this order; no tensor holds the weight of one after that."""
        experts = self.experts
        if not len(rows):
            return product(rows, rows.new_zeros(()).expand(experts.shape))  # whose shape alone matters: none is read
        result: torch.Tensor | None = None
        experts.pieces.begin(experts.place)
        for order, number in enumerate(numbers):
            of_expert = self._rows[number]
            with experts.pieces.use(experts.place, number, numbers[order + 1 :]) as values:
                part = product(rows[of_expert], experts.shown(values.to(self._dtype)))
            if len(numbers) == 1:
                return part
            if result is None:
                result = part.new_empty(*rows.shape[:-1], part.shape[-1])
            result[of_expert] = part
        assert result is not None, "some expert has rows"
        return result


class OfOne(Products):
    """Products of (tokens, columns) with one expert, by `linear` or by `matmul`."""

    def __init__(self, experts: ExpertWeights, dtype: torch.dtype, is_linear: bool) -> None:
        """Multiply all rows."""
        assert experts.number is not None
        super().__init__(experts, dtype, {experts.number: slice(None)})
        self._is_linear = is_linear

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, weight) if self._is_linear else torch.matmul(rows, weight)

    def _product_back(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows.mm(weight if self._is_linear else weight.t())

    def _gradient(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        # By the order in which the weights lie, as autograd chooses.
        in_rows = self._is_linear != self.experts.is_transposed
        return self.experts.shown(grad.t().mm(rows) if in_rows else rows.t().mm(grad))


class OfGroups(Products):
    """Products of (tokens, columns), sorted by expert, by `grouped_mm`."""

    def __init__(self, experts: ExpertWeights, ends: Sequence[int]) -> None:
        """Multiply the rows up to `ends` of each expert."""
        groups = zip([0, *ends], ends, strict=False)
        rows = {number: slice(begin, end) for number, (begin, end) in enumerate(groups) if end > begin}
        super().__init__(experts, experts.dtype, rows)

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, weight[None], offs=_all_of(rows))

    def _product_back(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, weight.t()[None], offs=_all_of(rows))

    def _gradient(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if self.experts.is_transposed:
            return F.grouped_mm(grad.t(), rows, offs=_all_of(rows)).transpose(1, 2)
        return F.grouped_mm(rows.t(), grad, offs=_all_of(rows))


def _all_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the end of the only group."""
    return torch.tensor([len(rows)], dtype=torch.int32)


class OfAll(Products):
    """Products of (experts, tokens, columns), by `bmm`."""

    def __init__(self, experts: ExpertWeights, dtype: torch.dtype) -> None:
        """Multiply the rows that each expert has."""
        super().__init__(experts, dtype, {number: slice(number, number + 1) for number in range(experts.rows)})

    def _product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows, weight[None])

    def _product_back(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows, weight.t()[None])

    def _gradient(self, rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return rows.transpose(1, 2).bmm(grad)
