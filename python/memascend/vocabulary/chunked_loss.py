"""The arithmetic of the loss in pieces: a chunk of tokens by a block of the vocabulary at a time.

The log-sum-exp of a token is kept as a running maximum and a running sum of exponentials (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"), in float32 (float64 for float64 logits), and so is the gradient of its
hidden state, which is rescaled when the maximum grows, as FlashAttention does with its output. Never having the logits
whole is an idea of Liger-Kernel's fused linear cross entropy and of Cut Cross-Entropy (arXiv 2411.09009).

- A logit is rounded as `nn.Linear` and the model's own steps round it; then all is float32.
- The label's own column is left out of the running sum and the running gradient, since probability - 1, its
  coefficient, would lose its digits where the loss is near 0. At the end the label's row of the table is added with the
  coefficient -(sum of the others) / sum.
- Losses are log(sum) + (maximum - logit of the label): no difference of large numbers.
- Products of probabilities are made in the dtype of the model's products, as autograd makes them.

Every operation and its order depend on shapes and dtypes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from memascend.vocabulary.logit_transforms import apply_steps, dtype_after, is_linear, slope, step_back

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.vocabulary.logit_transforms import Step
    from memascend.vocabulary.tables import Table

#: The most logits of a piece: 4 MiB in float32, which stays in a cache. Twice as many took 5% longer, a quarter 20%.
PIECE_ELEMENTS = 1024 * 1024
#: The most logits whose gradients meet the hidden states in one product.
PRODUCT_ELEMENTS = 8 * PIECE_ELEMENTS
#: Both on a device, where starting kernels takes as long as much arithmetic: as many as the hidden states have
#: elements, little beside a layer's activations, between these. With 8 Mi an H200 stood still half of the time.
DEVICE_PIECE_ELEMENTS = 8 * 1024 * 1024, 64 * 1024 * 1024


def device_piece_elements(tokens: int, width: int) -> int:
    """Return the most logits of a piece on a device, for so many hidden states of so many elements."""
    least, most = DEVICE_PIECE_ELEMENTS
    return min(max(least, tokens * width), most)


def _sizes(hidden: torch.Tensor) -> tuple[int, int]:
    """Return the most logits of a piece, and of a product, for hidden states (N, width)."""
    if hidden.device.type == "cuda":
        piece = device_piece_elements(*hidden.shape)
        return piece, piece
    return PIECE_ELEMENTS, PRODUCT_ELEMENTS


@dataclass(frozen=True, slots=True)
class Recipe:
    """How logits become losses."""

    #: The dtype of the product of hidden states and weights.
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    label_smoothing: float = 0.0
    #: The dtype of sums.
    exact: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        wide = torch.promote_types(dtype_after(self.steps, self.dtype), self.dtype)
        object.__setattr__(self, "exact", torch.promote_types(wide, torch.float32))


@dataclass(slots=True)
class Tokens:
    """The hidden states (N, width) of tokens, in the dtype of the product, and their labels (N,)."""

    hidden: torch.Tensor
    labels: torch.Tensor
    #: The labels in host memory.
    on_host: torch.Tensor | None = None
    #: The tokens by blocks of the table that are so many rows high, once they were asked for.
    _by_block: _ByBlock | None = None

    def chunks(self, rows: int, elements: int) -> Iterator[slice]:
        """Yield chunks of tokens whose logits of `rows` rows are at most `elements`."""
        count = max(1, elements // rows)
        for begin in range(0, self.hidden.shape[0], count):
            yield slice(begin, begin + count)

    def labelled(self, chunk: slice, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens of a chunk have their label in a block, and the label's row in it."""
        if self.labels.device.type != "cuda":
            columns = self.labels[chunk] - first
            tokens = ((columns >= 0) & (columns < rows)).nonzero().squeeze(1)
            return tokens, columns[tokens]
        if self._by_block is None or not self._by_block.has(first, rows):
            assert self.on_host is not None, "labels of a device are given in host memory too"
            # Blocks are asked for in order, and the first is as high as any.
            self._by_block = _ByBlock(self.on_host, first, rows, self.labels.device)
        return self._by_block.labelled(chunk, first)


class _ByBlock:
    """The tokens of a device by the block of the table that their label is in, found in host memory for all blocks.

    How many there are is so known on the host without a wait for the device.
    """

    def __init__(self, labels: torch.Tensor, origin: int, height: int, device: torch.device) -> None:
        """Sort labels (N,) in host memory by blocks of `height` rows, one beginning at row `origin`."""
        self._origin, self._height = origin, height
        blocks = (labels - origin).div(height, rounding_mode="floor")
        #: The blocks in order; the tokens of each in order; and their rows in it.
        self._blocks, self._tokens = torch.sort(blocks, stable=True)
        self._columns = (labels - origin)[self._tokens] - self._blocks * height
        self._there = [part.to(device, non_blocking=True) for part in (self._tokens, self._columns)]

    def _of(self, first: int) -> tuple[int, int]:
        number = (first - self._origin) // self._height
        begin, end = torch.searchsorted(self._blocks, torch.tensor([number, number + 1])).tolist()
        return begin, end

    def has(self, first: int, rows: int) -> bool:
        """Return whether the rows are one of the blocks, as far as labels lie in it."""
        if (first - self._origin) % self._height or rows > self._height:
            return False
        begin, end = self._of(first)
        return rows == self._height or begin == end or int(self._columns[begin:end].max()) < rows

    def labelled(self, chunk: slice, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `Tokens.labelled`, of the block that begins at row `first`."""
        begin, end = self._of(first)
        ends = torch.searchsorted(self._tokens[begin:end], torch.tensor([chunk.start, chunk.stop]))
        low, high = (ends + begin).tolist()
        tokens, columns = self._there
        return tokens[low:high] - chunk.start, columns[low:high]


@dataclass(slots=True)
class Losses:
    """Results of a read of the table for each token."""

    peak: torch.Tensor  # (N,): the maximum of the logits
    total: torch.Tensor  # (N,): the sum of exp(logit - peak)
    rest: torch.Tensor  # (N,): the same without the label's
    losses: torch.Tensor  # (N,)
    gradient: torch.Tensor | None  # (N, width): of each token's loss for its hidden state


class _Reading:
    """One read of the table: the losses, and the hidden states' gradients where they are wanted."""

    def __init__(self, tokens: Tokens, table: Table, bias: torch.Tensor | None, recipe: Recipe, wanted: bool) -> None:
        self.tokens, self.table, self.bias, self.recipe, self.wanted = tokens, table, bias, recipe, wanted
        count, width = tokens.hidden.shape
        self._piece_elements, _ = _sizes(tokens.hidden)
        exact: dict[str, Any] = {"dtype": recipe.exact, "device": tokens.hidden.device}
        self.peak = torch.full((count,), -torch.inf, **exact)
        self.rest = torch.zeros(count, **exact)
        self.picked = torch.zeros(count, **exact)
        #: A number in Python would be copied to a device for each piece, which the host waits for.
        self.zero = torch.zeros((), **exact)
        self.smooth = recipe.label_smoothing > 0
        self.sums = torch.zeros(count if self.smooth else 0, **exact)
        if wanted:
            self.gradient = torch.zeros(count, width, **exact)
            self.slopes = torch.zeros(count, **exact)
            self.label_rows = torch.zeros(count, width, dtype=recipe.dtype, device=tokens.hidden.device)
            # The derivative of the sum of a token's logits: the same for all tokens where the steps are linear.
            rows = 0 if not self.smooth else 1 if is_linear(recipe.steps) else count
            self.sum_gradient = torch.zeros(rows, width, **exact)

    def run(self) -> Losses:
        for first, block in self.table.blocks():
            weights = block.to(self.recipe.dtype)
            rows = weights.shape[0]
            bias = None if self.bias is None else self.bias[first : first + rows]
            if self.wanted and self.smooth and is_linear(self.recipe.steps):
                ones = torch.ones((), dtype=self.recipe.exact, device=weights.device)
                number = slope(self.recipe.steps, (), ones)
                self.sum_gradient += weights.sum(0, keepdim=True, dtype=self.recipe.exact) * number
            for chunk in self.tokens.chunks(rows, self._piece_elements):
                self._take(chunk, first, weights, bias)
        return self._finish()

    def _take(self, chunk: slice, first: int, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
        steps = self.recipe.steps
        logits, tanhs = apply_steps(F.linear(self.tokens.hidden[chunk], weights, bias), steps)  # (chunk, rows)
        after, values = logits.dtype, logits.to(self.recipe.exact)
        tokens, columns = self.tokens.labelled(chunk, first, weights.shape[0])
        self.picked[chunk][tokens] = values[tokens, columns]
        if self.smooth:
            self.sums[chunk] += values.sum(1)
        if self.wanted:
            self.label_rows[chunk][tokens] = weights[columns]
            at_labels = [tanh[tokens, columns] for tanh in tanhs]
            self.slopes[chunk][tokens] = slope(steps, at_labels, self.slopes[:1].expand(tokens.numel()))
            if self.smooth and tanhs:
                slopes = step_back(torch.ones_like(values, dtype=after), steps, tanhs)
                self.sum_gradient[chunk] += slopes @ weights

        peak = torch.maximum(self.peak[chunk], values.amax(1))
        # Where all logits are -inf so far, any finite reference will do.
        reference = torch.where(peak == -torch.inf, 0, peak)
        shrink = (self.peak[chunk] - reference).exp_()
        values.sub_(reference.unsqueeze(1)).exp_()
        values.index_put_((tokens, columns), self.zero)
        self.rest[chunk] = self.rest[chunk] * shrink + values.sum(1)
        self.peak[chunk] = peak
        if self.wanted:
            probabilities = step_back(values.to(after), steps, tanhs)
            self.gradient[chunk].mul_(shrink.unsqueeze(1)).add_(probabilities @ weights)

    def _finish(self) -> Losses:
        smoothing = self.recipe.label_smoothing
        distance = self.peak - self.picked
        total = self.rest + torch.exp(-distance)
        log_total = torch.where(distance == 0, self.rest.log1p(), total.log())
        losses = log_total + distance
        if self.smooth:
            mean = self.sums / self.table.rows
            losses = losses * (1 - smoothing) + (log_total + (self.peak - mean)) * smoothing
        if not self.wanted:
            return Losses(self.peak, total, self.rest, losses, None)
        gradient = self.gradient.div_(total.unsqueeze(1))
        coefficient = (smoothing - self.rest / total).mul_(self.slopes)
        gradient.addcmul_(self.label_rows.to(gradient.dtype), coefficient.unsqueeze(1))
        if self.smooth:
            gradient.sub_(self.sum_gradient, alpha=smoothing / self.table.rows)
        return Losses(self.peak, total, self.rest, losses, gradient)


def read_losses(
    tokens: Tokens, table: Table, bias: torch.Tensor | None, recipe: Recipe, gradient_wanted: bool
) -> Losses:
    """Compute the losses in one read of the table, and the gradient of the hidden states in the same read."""
    return _Reading(tokens, table, bias, recipe, gradient_wanted).run()


class HeadSource:
    """The gradient of a head from the loss in pieces, and of its bias.

    Logits of the block are computed again, and their gradient is rounded as the model's steps round it.
    """

    needs_weights = True

    def __init__(
        self,
        tokens: Tokens,
        bias: torch.Tensor | None,
        recipe: Recipe,
        losses: Losses,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rows: int,
    ) -> None:
        """Take the results of the forward pass, the gradient (N,) of the losses, and dtype and rows of the table."""
        self.tokens, self.bias, self.recipe, self.dtype, self.rows = tokens, bias, recipe, dtype, rows
        self._piece_elements, self._product_elements = _sizes(tokens.hidden)
        self.peak = losses.peak.unsqueeze(1)
        self.scale = (scale / losses.total).unsqueeze(1)
        # Of the labels: the derivative is probability - (1 - smoothing) - smoothing / rows.
        uniform = recipe.label_smoothing / rows
        self.uniform = (scale * uniform).unsqueeze(1)
        self.at_labels = scale * (recipe.label_smoothing - losses.rest / losses.total - uniform)
        #: Where `block` adds the gradient of the block's biases: (rows,) in the dtype of sums.
        self.bias_gradient: torch.Tensor | None = None

    def block(self, first: int, count: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient (count, width) of a block of rows."""
        assert weights is not None
        weights = weights.to(self.recipe.dtype)
        chunks = list(self.tokens.chunks(count, self._product_elements))
        total: torch.Tensor | None = None
        for chunk in chunks:
            grad_logits = self._grad_logits(chunk, first, weights)  # (chunk, count)
            self._add_to_bias(first, grad_logits)
            part = grad_logits.t() @ self.tokens.hidden[chunk]
            if len(chunks) == 1:
                return part.to(self.dtype)
            total = part.to(self.recipe.exact) if total is None else total.add_(part)
        if total is None:
            return torch.zeros(count, weights.shape[1], dtype=self.dtype, device=weights.device)
        return total.to(self.dtype)

    def read_bias_gradient(self, table: Table) -> None:
        """Fill `bias_gradient` in a read of the table."""
        for first, block in table.blocks():
            weights = block.to(self.recipe.dtype)
            for chunk in self.tokens.chunks(weights.shape[0], self._product_elements):
                self._add_to_bias(first, self._grad_logits(chunk, first, weights))

    def _add_to_bias(self, first: int, grad_logits: torch.Tensor) -> None:
        if self.bias_gradient is not None:
            part = self.bias_gradient[first : first + grad_logits.shape[1]]
            part += grad_logits.sum(0, dtype=part.dtype)

    def _grad_logits(self, chunk: slice, first: int, weights: torch.Tensor) -> torch.Tensor:
        part = Tokens(self.tokens.hidden[chunk], self.tokens.labels[chunk])
        rows = weights.shape[0]
        result = torch.empty(part.hidden.shape[0], rows, dtype=self.recipe.dtype, device=weights.device)
        for piece in part.chunks(rows, self._piece_elements):
            begin = chunk.start + piece.start
            self._take(slice(begin, begin + (piece.stop - piece.start)), first, weights, result[piece])
        return result

    def _take(self, chunk: slice, first: int, weights: torch.Tensor, result: torch.Tensor) -> None:
        rows = weights.shape[0]
        # A piece never reaches beyond its product's tokens.
        chunk = slice(chunk.start, chunk.start + result.shape[0])
        bias = None if self.bias is None else self.bias[first : first + rows]
        logits, tanhs = apply_steps(F.linear(self.tokens.hidden[chunk], weights, bias), self.recipe.steps)
        after, values = logits.dtype, logits.to(self.recipe.exact)
        values.sub_(self.peak[chunk]).exp_().mul_(self.scale[chunk])
        if self.recipe.label_smoothing:
            values.sub_(self.uniform[chunk])
        tokens, columns = self.tokens.labelled(chunk, first, rows)
        values[tokens, columns] = self.at_labels[chunk][tokens]
        result.copy_(step_back(values.to(after), self.recipe.steps, tanhs))
