"""The loss in pieces against PyTorch's cross entropy on whole logits, and against exact arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tables_in_blocks import blocks_of
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

import memascend
from memascend.errors import MemascendError
from memascend.vocabulary import chunked_loss
from memascend.vocabulary.gradient import TableGradient

TOKENS, WIDTH, ROWS, BLOCK = 45, 16, 203, 24

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"scale": 0.0625},
    "capped": {"soft_cap": 3.0},
    "scaled, capped, smoothed": {"scale": 2.5, "soft_cap": 3.0, "label_smoothing": 0.3},
    "smoothed, none": {"label_smoothing": 1.0, "reduction": "none"},
    "shifted": {"shift": True},
    "by items": {"shift": True, "num_items": 17},
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "PIECE_ELEMENTS", 10 * BLOCK)
    monkeypatch.setattr(chunked_loss, "PRODUCT_ELEMENTS", 20 * BLOCK)


def whole_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    shift: bool = False,
    num_items: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the loss as transformers' models compute it."""
    logits = F.linear(hidden, weight, bias)
    if scale != 1:
        logits = logits * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    if num_items is not None:
        return ForCausalLMLoss(logits.double(), labels, weight.shape[0], num_items)
    if shift:
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options).view(
        labels.shape if options.get("reduction") == "none" else ()
    )


def inputs(dtype: torch.dtype, bias: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return hidden states, weight and bias, and labels, the same for all dtypes up to rounding."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, TOKENS // 3, WIDTH), (ROWS, WIDTH), (ROWS,)][: 3 if bias else 2]
    tensors = [torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(0, ROWS, (3, TOKENS // 3), generator=generator)
    labels[0, :4] = torch.tensor([0, ROWS - 1, -100, BLOCK])
    labels[1, :5] = 7
    return tensors, labels


def gradients(loss: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad = torch.rand(loss.shape, generator=generator, dtype=torch.float64).to(loss.dtype)
    return [gradient + 0 for gradient in torch.autograd.grad(loss, tensors, grad)]


def in_pieces(
    tensors: list[torch.Tensor], labels: torch.Tensor, *, stored: bool = False, block: int = BLOCK, **options: Any
) -> list[torch.Tensor]:
    """Return loss and gradients of the loss in pieces."""
    hidden, weight, *bias = tensors
    with blocks_of(block, stored=stored):
        loss = memascend.linear_cross_entropy(hidden, weight, labels, bias=bias[0] if bias else None, **options)
        return [loss.detach(), *gradients(loss, tensors)]


def whole(tensors: list[torch.Tensor], labels: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return loss and gradients of the whole logits."""
    hidden, weight, *bias = tensors
    loss = whole_loss(hidden, weight, labels, bias=bias[0] if bias else None, **options)
    return [loss.detach(), *gradients(loss, tensors)]


def assert_within(found: list[torch.Tensor], expected: list[torch.Tensor], loss: float, gradient: float) -> None:
    """Assert the bounds of `memascend.vocabulary.loss`, relative to the largest element."""
    for tensor, reference, bound in zip(found, expected, [loss, *[gradient] * (len(found) - 1)], strict=True):
        error = (tensor.double() - reference.double()).abs().max()
        assert error <= bound * max(reference.double().abs().max(), 1e-3), (tensor, reference)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float64_is_exact(options: dict[str, Any], bias: bool, stored: bool) -> None:
    tensors, labels = inputs(torch.float64, bias)
    # transformers itself sums these in float32.
    bound = 1e-6 if "num_items" in options else 1e-13
    assert_within(in_pieces(tensors, labels, stored=stored, **options), whole(tensors, labels, **options), bound, bound)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dtype", "loss", "gradient"), [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-6, 2**-6)])
def test_it_stays_within_the_stated_bounds(
    dtype: torch.dtype, loss: float, gradient: float, options: dict[str, Any]
) -> None:
    tensors, labels = inputs(dtype)
    assert_within(in_pieces(tensors, labels, **options), whole(tensors, labels, **options), loss, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_store_has_the_bits_of_memory(options: dict[str, Any], dtype: torch.dtype) -> None:
    tensors, labels = inputs(dtype)
    once = in_pieces(tensors, labels, **options)
    for stored in (False, True):
        for found, expected in zip(in_pieces(tensors, labels, stored=stored, **options), once, strict=True):
            assert torch.equal(found, expected)


def test_a_stored_table_is_read_once_forward_and_once_backward() -> None:
    (hidden, weight), labels = inputs(torch.float32, bias=False)
    with blocks_of(BLOCK, stored=True) as stores:
        loss = memascend.linear_cross_entropy(hidden, weight, labels)
        assert stores[0].reads == 1
        loss.backward()
        assert isinstance(weight.grad, TableGradient)
        assert stores[0].reads == 1
        for (first, block), after in pairwise([*weight.grad.blocks(), (ROWS, None)]):
            assert block is not None
            assert first + block.shape[0] == after[0]
        assert stores[0].reads == 2


# ---- adversarial logits -----------------------------------------------------------------------------------------


def adversarial(case: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return inputs whose logits are hard on a log-sum-exp."""
    (hidden, weight, bias), labels = inputs(dtype)
    with torch.no_grad():
        if case == "huge":
            hidden *= 1000
        elif case == "tiny":
            hidden *= 1e-6
            bias.zero_()
        elif case == "equal":
            hidden.zero_()
            bias.fill_(3)
        elif case == "confident":
            # The label's row is along the hidden state: losses near 0.
            flat = hidden.view(-1, WIDTH)
            for token, label in enumerate(labels.flatten().tolist()):
                if label >= 0:
                    flat[token] = weight[label] * 4
        elif case == "sure":
            labels.fill_(5)
            bias.zero_()
            bias[5] = 200
        elif case == "-inf":
            bias[: BLOCK + 3] = -torch.inf
            labels[labels < BLOCK + 3] = BLOCK + 3
        elif case == "growing":
            bias.copy_(torch.arange(ROWS) * 2.0)
        elif case == "falling":
            bias.copy_(torch.arange(ROWS) * -2.0)
        elif case == "one token":
            kept = labels[2, 3].item()
            labels.fill_(-100)
            labels[2, 3] = kept
    return [hidden, weight, bias], labels


CASES = ("huge", "tiny", "equal", "confident", "sure", "-inf", "growing", "falling", "one token")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}], ids=["plain", "capped"])
def test_adversarial_logits(case: str, options: dict[str, Any]) -> None:
    """No further from exact arithmetic than PyTorch is, by more than the stated bounds."""
    tensors, labels = adversarial(case, torch.float32)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = whole(doubles, labels, **options)
    assert_within(in_pieces(doubles, labels, **options), exact, 1e-12, 1e-11)
    found, torchs = in_pieces(tensors, labels, **options), whole(tensors, labels, **options)
    for ours, theirs, reference, bound in zip(found, torchs, exact, [1e-6, 1e-5, 1e-5, 1e-5], strict=True):
        worst = (theirs.double() - reference).abs().max()
        error = (ours.double() - reference).abs().max()
        assert error <= 2 * worst + bound * max(reference.abs().max(), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_adversarial_logits_in_bfloat16(case: str) -> None:
    tensors, labels = adversarial(case, torch.bfloat16)
    found, expected = in_pieces(tensors, labels), whole(tensors, labels)
    assert_within(found, expected, 2e-6, 2**-6)


def test_digits_of_confident_tokens_are_kept() -> None:
    """A loss near 0 has a gradient near 0, made of small probabilities and not of the rounded 1 - p."""
    tensors, labels = adversarial("sure", torch.float32)
    with torch.no_grad():
        tensors[2][5] = 25
        tensors[0].mul_(0.1)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = whole(doubles, labels, reduction="sum")
    found = in_pieces(tensors, labels, reduction="sum")
    assert 0 < exact[1].abs().max() < 1e-7
    for ours, reference in zip(found[1:], exact[1:], strict=True):
        assert (ours.double() - reference).abs().max() <= 1e-4 * reference.abs().max()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["one row", "all rows"])
def test_logits_that_are_not_finite_give_what_pytorch_gives(value: float, where: str) -> None:
    tensors, labels = inputs(torch.float32)
    labels[0, :3] = 3  # the row in question; no token is ignored, whose gradient PyTorch makes NaN here
    with torch.no_grad():
        tensors[2][3 if where == "one row" else slice(None)] = value
    found = in_pieces(tensors, labels, reduction="none")
    expected = whole(tensors, labels, reduction="none")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


# ---- ignored, refused and unwanted ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_when_all_tokens_are_ignored(reduction: str) -> None:
    tensors, labels = inputs(torch.float32)
    labels.fill_(-100)
    found = in_pieces(tensors, labels, reduction=reduction)
    expected = whole(tensors, labels, reduction=reduction)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("label", [-1, ROWS, ROWS + 7])
def test_labels_outside_of_the_vocabulary_raise(label: int) -> None:
    tensors, labels = inputs(torch.float32, bias=False)
    labels[1, 2] = label
    with pytest.raises(IndexError, match="out of bounds"):
        whole(tensors, labels)
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        in_pieces(tensors, labels)


def test_another_ignore_index() -> None:
    tensors, labels = inputs(torch.float64)
    labels[labels < 0] = 9
    options = {"ignore_index": 7}
    assert_within(in_pieces(tensors, labels, **options), whole(tensors, labels, **options), 1e-13, 1e-13)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("stored", [False, True])
def test_frozen_inputs_get_no_gradient(needed: tuple[int, ...], stored: bool) -> None:
    tensors, labels = inputs(torch.float32)
    everything = in_pieces(tensors, labels)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in needed)
    with blocks_of(BLOCK, stored=stored):
        loss = memascend.linear_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2])
        found = gradients(loss, [tensors[index] for index in needed])
    assert torch.equal(loss, everything[0])
    for index, gradient in zip(needed, found, strict=True):
        assert torch.equal(gradient, everything[index + 1])


def test_evaluation_makes_one_product_and_has_the_same_loss() -> None:
    tensors, labels = inputs(torch.float32)
    expected = in_pieces(tensors, labels)[0]
    with torch.no_grad():
        hidden, weight, bias = tensors
        with blocks_of(BLOCK), _Products() as products:
            loss = memascend.linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert torch.equal(loss, expected)
    # Chunks of 10 tokens for whole blocks, of 21 for the last one, which has 11 rows.
    assert (ROWS // BLOCK, ROWS % BLOCK) == (8, 11)
    assert products.count == 8 * 5 + 3
    with torch.inference_mode(), blocks_of(BLOCK):
        assert torch.equal(memascend.linear_cross_entropy(hidden, weight, labels, bias=bias), expected)


def test_a_second_derivative_is_refused() -> None:
    tensors, labels = inputs(torch.float32, bias=False)
    hidden, weight = tensors
    loss = memascend.linear_cross_entropy(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(MemascendError, match="fused_loss=False"):
        gradient.square().sum().backward()


def test_weights_that_change_before_the_backward_pass_are_noticed() -> None:
    (hidden, weight), labels = inputs(torch.float32, bias=False)
    loss = memascend.linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(MemascendError, match="have changed"):
        loss.backward()


def test_autocast_multiplies_in_its_dtype() -> None:
    tensors, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = whole(tensors, labels), in_pieces(tensors, labels)
    assert_within(found, expected, 1e-6, 2**-7)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 4


def test_arguments_that_do_not_fit_are_refused() -> None:
    (hidden, weight), labels = inputs(torch.float32, bias=False)
    with pytest.raises(ValueError, match="reduction"):
        memascend.linear_cross_entropy(hidden, weight, labels, reduction="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_items"):
        memascend.linear_cross_entropy(hidden, weight, labels, reduction="none", num_items=3)
    with pytest.raises(ValueError, match="shape"):
        memascend.linear_cross_entropy(hidden, weight, labels[:1])
    with pytest.raises(ValueError, match="label_smoothing"):
        memascend.linear_cross_entropy(hidden, weight, labels, label_smoothing=2)
    with pytest.raises(RuntimeError, match="same dtype"):
        memascend.linear_cross_entropy(hidden.bfloat16(), weight, labels)


# ---- memory -----------------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Counts elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result

    def note(self, func: Any, results: list[torch.Tensor]) -> None:
        sizes = [leaf.numel() for leaf in results if not isinstance(leaf, TableGradient)]
        self.largest = max([self.largest, *sizes])


class _Products(_Watch):
    def note(self, func: Any, results: list[torch.Tensor]) -> None:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_never_whole(options: dict[str, Any]) -> None:
    (hidden, weight), labels = inputs(torch.bfloat16, bias=False)
    with _Watch() as watch:
        whole_loss(hidden, weight, labels, **options)
    assert watch.largest >= TOKENS * ROWS
    with blocks_of(BLOCK, stored=True), _Watch() as watch:
        loss = memascend.linear_cross_entropy(hidden, weight, labels, **options)
        loss.sum().backward()
        for _, block in weight.grad.blocks():
            assert block.shape[0] <= BLOCK
    assert 0 < watch.largest < max(TOKENS * WIDTH, 20 * BLOCK, ROWS * WIDTH) + 1
    assert watch.largest < TOKENS * ROWS / 2
