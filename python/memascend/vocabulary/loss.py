"""The loss of a head in pieces: the logits, tokens x vocabulary, are never whole.

The table is read once forward and once backward, block by block in order. Four products are made where PyTorch makes
three: the logits twice, the gradient of the hidden states (in the forward pass) and of the weights, which is a
`TableGradient`: each of its blocks is made when it is asked for. See `memascend.vocabulary.chunked_loss` for the
arithmetic.

Distance of results from PyTorch's cross entropy on whole logits:
- float32: losses within 1e-6 of the largest, gradients within 1e-5 of the largest element.
- bfloat16: the logits are rounded alike. Partial sums of gradients are rounded, as autograd rounds the gradients of
  the logits: within 2**-6 of the largest element.
`tests/vocabulary/test_loss.py` holds them to that.

On a device, pieces have as many logits as the hidden states have elements, because starting kernels takes as long as
much arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F

from memascend.errors import MemascendError
from memascend.hardware.cuda import is_autocast
from memascend.vocabulary.chunked_loss import HeadSource, Losses, Recipe, Tokens, read_losses
from memascend.vocabulary.gradient import gradient_of
from memascend.vocabulary.known import on_host
from memascend.vocabulary.logit_transforms import dtype_after, steps_of
from memascend.vocabulary.tables import MemoryTable, table_of

if TYPE_CHECKING:
    from memascend.vocabulary.tables import Table

Reduction = Literal["none", "mean", "sum"]

_TWICE = (
    "the loss in pieces has no second derivative: offload the model with fused_loss=False to differentiate its loss "
    "twice, or call torch.nn.functional.cross_entropy on the logits"
)


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor | None) -> Any:
        """Return the gradients."""
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise MemascendError(_TWICE)


def differentiable_once(*gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that raise MemascendError when a graph of them is differentiated."""
    if not torch.is_grad_enabled():
        return gradients
    with torch.inference_mode(False):
        origin = torch.zeros((), requires_grad=True)
    return _Once.apply(origin, *gradients)


class _Loss(torch.autograd.Function):
    """The losses (N,) of N tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        on_host: torch.Tensor,
        table: Table,
        recipe: Recipe,
        gradient_wanted: bool,
    ) -> torch.Tensor:
        """Read the table once. `hidden` (N, width) and `bias` (rows,) have the recipe's dtype.

        `labels` (N,) are beside the hidden states, `on_host` the same in host memory.
        """
        tokens = Tokens(hidden.detach(), labels, on_host)
        wanted = gradient_wanted and ctx.needs_input_grad[0]
        result = read_losses(tokens, table, None if bias is None else bias.detach(), recipe, wanted)
        ctx.table, ctx.recipe, ctx.version, ctx.labels_on_host = table, recipe, table.version, on_host
        saved = (result.peak, result.total, result.rest, result.gradient)
        ctx.save_for_backward(hidden, bias, labels, result.losses, *saved)
        return result.losses

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> Any:
        """Scale the hidden states' gradient; keep the inputs of the weight's."""
        with torch.no_grad():
            gradients = _Loss._gradients(ctx, grad_losses)
        return *differentiable_once(*gradients), None, None, None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, bias, labels, losses, peak, total, rest, gradient = ctx.saved_tensors
        table, recipe = ctx.table, ctx.recipe
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = grad_weight = grad_bias = None
        if needs_hidden:
            grad_hidden = (gradient * grad_losses.unsqueeze(1)).to(hidden.dtype)
        if needs_weight or needs_bias:
            check_version(ctx.version, table)
            source = HeadSource(
                Tokens(hidden.detach(), labels, ctx.labels_on_host),
                None if bias is None else bias.detach(),
                recipe,
                Losses(peak, total, rest, losses, None),
                grad_losses,
                table.dtype,
                table.rows,
            )
            grad_bias, grad_weight = _head_gradients(source, table, needs_weight, needs_bias)
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype)


def _head_gradients(
    source: HeadSource, table: Table, needs_weight: bool, needs_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of bias and weight. In memory, and so at once, both come of one read."""
    grad_bias = torch.zeros(table.rows, dtype=source.recipe.exact, device=table.device) if needs_bias else None
    source.bias_gradient = grad_bias
    if not needs_weight or not isinstance(table, MemoryTable):
        if needs_bias:
            source.read_bias_gradient(table)
        source.bias_gradient = None
    grad_weight = gradient_of(table, source) if needs_weight else None
    return grad_bias, grad_weight


def check_version(version: int, table: Table) -> None:
    """Raise MemascendError if a table's values have changed since it had `version`."""
    if table.version != version:
        raise MemascendError(
            "the weights of a head have changed since its loss or logits were computed from them: run the backward "
            "pass, or read the logits, before the weights change, or offload the model with fused_loss=False"
        )


def product_dtype(hidden: torch.Tensor, table: Table) -> torch.dtype:
    """Return the dtype in which `torch.nn.functional.linear` multiplies hidden states by a table."""
    kind = hidden.device.type
    if is_autocast(kind) and torch.float64 not in (hidden.dtype, table.dtype):
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != table.dtype:
        raise RuntimeError(f"expected hidden states and weights of the same dtype, got {hidden.dtype} != {table.dtype}")
    return hidden.dtype


def loss_in_pieces(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: Table,
    labels: torch.Tensor,
    recipe: Recipe,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """Return the cross entropy of hidden states (N, width) and labels (N,), in the dtype of sums.

    `weight` is the parameter that gets the gradient; its values are read from `table`.
    """
    told = labels
    if labels.device.type == "cuda":
        # Their statistics are computed on the host, which waits once for the device to tell them.
        known = on_host(labels)
        told = labels.cpu() if known is None else known
    kept = (told != ignore_index).nonzero().squeeze(1)
    kept_labels = labels
    if kept.numel() < labels.numel():
        told = told[kept]
        kept = kept.to(labels.device, non_blocking=True)
        hidden, kept_labels = hidden.index_select(0, kept), labels[kept]
    if told.numel():
        least, most = (int(end) for end in told.aminmax())
        if least < 0 or most >= table.rows:
            raise IndexError(f"Target {least if least < 0 else most} is out of bounds.")
    hidden = hidden.to(recipe.dtype)
    bias = None if bias is None else bias.to(recipe.dtype)
    losses = _Loss.apply(hidden, weight, bias, kept_labels, told, table, recipe, torch.is_grad_enabled())
    if reduction == "none":
        whole = torch.zeros(labels.shape, dtype=losses.dtype, device=losses.device)
        return losses if kept_labels is labels else whole.index_copy(0, kept, losses)
    total = losses.sum()
    return total / kept.numel() if reduction == "mean" else total


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    shift: bool = False,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of the logits `hidden @ weight.T + bias`, which are never whole.

    The result of `cross_entropy(linear(hidden, weight, bias).float(), labels)` of `torch.nn.functional`, in the memory
    of a piece: a chunk of tokens by a block of the vocabulary. Under autocast the product has autocast's dtype.

    - `hidden`: (..., width). `weight`: (vocabulary, width), the head's, in memory or offloaded. `bias`: (vocabulary,).
    - `labels`: (...), int64. A token whose label is `ignore_index` counts for nothing.
    - `reduction`: "mean" over the tokens that count, "sum", or "none" for a loss (...) of each token.
    - `label_smoothing`: as of `torch.nn.functional.cross_entropy`.
    - `scale` multiplies the logits (Cohere's `logit_scale`; 1 / `logits_scaling` of Granite). `soft_cap` c replaces
      them by c * tanh(logits / c) after that (Gemma 2's `final_logit_softcapping`).
    - `shift`: a token predicts the next one along the last dimension of `labels`, as in Hugging Face's causal models.
    - `num_items`: divide the sum by this number, as those models do with `num_items_in_batch`.

    The bits depend on the values alone, not on where the weight is. Raises IndexError for a label outside of the
    vocabulary, and MemascendError if the result is differentiated twice.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is no reduction: choose 'mean', 'sum' or 'none'")
    if num_items is not None and reduction == "none":
        raise ValueError("num_items divides a sum: choose reduction='sum' or 'mean' with it")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    table = table_of(weight)
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != table.width:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit labels of shape {tuple(labels.shape)} and a head "
            f"of width {table.width}"
        )
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    dtype = product_dtype(hidden, table)
    target = torch.promote_types(dtype, torch.float32)
    recipe = Recipe(dtype, steps_of(scale, soft_cap, dtype, target), label_smoothing)
    summed = "sum" if num_items is not None else reduction
    flat_labels = labels.reshape(-1).to(hidden.device)
    flat_hidden = hidden.reshape(-1, table.width)
    loss = loss_in_pieces(flat_hidden, weight, bias, table, flat_labels, recipe, ignore_index, summed)
    loss = loss.to(dtype_after(recipe.steps, dtype))
    if reduction == "none":
        return loss.view(labels.shape)
    if num_items is None:
        return loss
    return loss / (num_items.to(loss.device) if isinstance(num_items, torch.Tensor) else num_items)
