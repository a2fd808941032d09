"""A table's gradient in sources: operations of autograd and programs give the bits of an ordinary gradient."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tables_in_blocks import StoredTable
from torch import nn
from torch.nn import functional as F

from memascend.errors import MemascendError
from memascend.vocabulary.gradient import LinearSource, RowsSource, TableGradient
from memascend.vocabulary.lookup import embedding

ROWS, WIDTH = 41, 8


@pytest.fixture
def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(ROWS, WIDTH))


def rows_gradient(weight: torch.Tensor, seed: int = 0, table: StoredTable | None = None) -> TableGradient:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (3, 30), generator=generator)
    gradient = torch.randn(3, 30, WIDTH, generator=generator).to(weight.dtype)
    return TableGradient(table or StoredTable(weight, 7), [RowsSource(ids, gradient, None)])


@pytest.mark.parametrize("padding_idx", [None, 0, 6, 7, ROWS - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [1, 7, ROWS, 100])
def test_blocks_of_a_lookup_have_the_bits_of_the_whole(
    dtype: torch.dtype, padding_idx: int | None, block_rows: int
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, ROWS, (4, 64))
    ids[0, :8] = 6 if padding_idx is None else padding_idx
    gradient = torch.randn(4, 64, WIDTH).to(dtype)
    expected = torch.ops.aten.embedding_dense_backward(
        gradient, ids, ROWS, -1 if padding_idx is None else padding_idx, False
    )
    table = StoredTable(torch.zeros(ROWS, WIDTH, dtype=dtype), block_rows)
    made = TableGradient(table, [RowsSource(ids, gradient, padding_idx)])
    blocks = list(made.blocks())
    assert [first for first, _ in blocks] == list(range(0, ROWS, block_rows))
    assert torch.equal(torch.cat([block for _, block in blocks]), expected)
    assert torch.equal(made.dense(), expected)
    assert table.reads == 0
    assert not made.sources


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("shape", [(5,), (3, 50), (0,)])
def test_a_lookup_has_the_bits_of_pytorch(dtype: torch.dtype, padding_idx: int | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))]
    weights.append(nn.Parameter(weights[0].detach().clone()))
    ids = torch.randint(0, ROWS, shape)
    table = StoredTable(weights[1], 7)
    expected = F.embedding(ids, weights[0], padding_idx)
    found = embedding(ids, weights[1], table, padding_idx)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    found.backward(gradient)
    assert isinstance(weights[1].grad, TableGradient)
    assert torch.equal(weights[1].grad.dense(), weights[0].grad)


def test_a_lookup_of_an_unknown_id_raises(weight: nn.Parameter) -> None:
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError, match="out of range"):
            embedding(torch.tensor([0, wrong]), weight, StoredTable(weight, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_adds_two_uses_without_making_them_dense(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))
    stored = nn.Parameter(plain.detach().clone())
    table = StoredTable(stored, 7)
    ids, again = torch.randint(0, ROWS, (60,)), torch.randint(0, ROWS, (50,))
    scale = torch.randn(60, WIDTH).to(dtype)
    (F.embedding(ids, plain) * scale).sum().add(F.embedding(again, plain).square().sum()).backward()
    found = (embedding(ids, stored, table) * scale).sum().add(embedding(again, stored, table).square().sum())
    found.backward()
    assert isinstance(stored.grad, TableGradient)
    assert len(stored.grad.sources) == 2
    assert torch.equal(stored.grad.dense(), plain.grad)


def test_a_second_backward_pass_adds_to_the_first(weight: nn.Parameter) -> None:
    table = StoredTable(weight, 7)
    ids = torch.randint(0, ROWS, (60,))
    plain = nn.Parameter(weight.detach().clone())
    for _ in range(3):
        embedding(ids, weight, table).square().sum().backward()
        F.embedding(ids, plain).square().sum().backward()
    assert isinstance(weight.grad, TableGradient)
    assert len(weight.grad.sources) == 3
    assert torch.equal(weight.grad.dense(), plain.grad)


@pytest.fixture
def every_warning() -> Iterator[None]:
    """PyTorch gives a warning again that it has given before in this process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_warning")
def test_create_graph_clones_it(weight: nn.Parameter) -> None:
    table = StoredTable(weight, 7)
    ids = torch.randint(0, ROWS, (60,))
    plain = nn.Parameter(weight.detach().clone())
    F.embedding(ids, plain).square().sum().backward()
    with pytest.warns(UserWarning, match="create_graph"):
        embedding(ids, weight, table).square().sum().backward(create_graph=True)
    assert weight.grad is not None
    assert torch.equal(weight.grad.detach() + 0, plain.grad)


def test_accumulation_into_a_leaf_that_is_shared_clones_it(weight: nn.Parameter) -> None:
    table = StoredTable(weight, 7)
    gradient = rows_gradient(weight, table=table)
    weight.backward(gradient)  # the caller holds it, so that autograd cannot steal it
    assert isinstance(weight.grad, TableGradient)
    assert weight.grad is not gradient
    expected = gradient.dense().clone()
    gradient.zero_()
    assert torch.equal(weight.grad.dense(), expected)


def test_hooks_see_it_and_may_replace_it(weight: nn.Parameter) -> None:
    table = StoredTable(weight, 7)
    ids = torch.randint(0, ROWS, (60,))
    seen: list[torch.Tensor] = []
    handle = weight.register_hook(lambda gradient: seen.append(gradient))
    embedding(ids, weight, table).sum().backward()
    assert isinstance(seen[0], TableGradient)
    handle.remove()
    weight.grad = None
    weight.register_hook(lambda gradient: gradient * 2)
    embedding(ids, weight, table).sum().backward()
    assert torch.equal(weight.grad, seen[0].dense() * 2)


USES: dict[str, Any] = {
    "norm": lambda gradient: gradient.norm(),
    "foreach norm": lambda gradient: torch._foreach_norm([gradient])[0],
    "times": lambda gradient: 2 * gradient,
    "row": lambda gradient: gradient[3],
    "transposed": lambda gradient: gradient.t() @ gradient,
    "add, alpha": lambda gradient: gradient.add(gradient, alpha=2),
    "add to an ordinary one": lambda gradient: torch.ones(ROWS, WIDTH).add_(gradient),
    "double": lambda gradient: gradient.double(),
    "float": lambda gradient: gradient.float(),
    "clone": lambda gradient: gradient.clone(),
    "clone, contiguous": lambda gradient: gradient.clone(memory_format=torch.contiguous_format),
    "in place": lambda gradient: gradient.mul_(3),
    "in place, view": lambda gradient: (gradient[2].zero_(), gradient)[1],
    "in place, alias": lambda gradient: (gradient.detach().mul_(3), gradient)[1],
    "zeros like": torch.zeros_like,
    "sum of an alias": lambda gradient: gradient.detach() + gradient,
    "zero_": lambda gradient: gradient.clone().zero_(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda gradient: pickle.loads(pickle.dumps(gradient)),
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
    "list": lambda gradient: torch.tensor(gradient.tolist()),
    "all finite": lambda gradient: torch.isfinite(gradient).all(),
    "added in place": lambda gradient: gradient.add_(torch.ones(ROWS, WIDTH)),
    "copy": lambda gradient: torch.empty(ROWS, WIDTH).copy_(gradient),
    "data": lambda gradient: gradient.data + 1,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_gives_the_bits_of_an_ordinary_gradient(weight: nn.Parameter, use: str) -> None:
    expected = USES[use](rows_gradient(weight).dense().clone())
    found = USES[use](rows_gradient(weight))
    assert found.dtype == expected.dtype
    assert torch.equal(found + 0, expected)


def test_it_shows_its_values(weight: nn.Parameter) -> None:
    gradient = rows_gradient(weight)
    assert repr(gradient) == repr(rows_gradient(weight).dense())
    assert gradient.is_dense


def test_the_gradient_of_an_input_has_a_norm(weight: nn.Parameter) -> None:
    ids = torch.randint(0, ROWS, (60,))
    (found,) = torch.autograd.grad(embedding(ids, weight, StoredTable(weight, 7)).square().sum(), weight)
    (expected,) = torch.autograd.grad(F.embedding(ids, weight).square().sum(), weight)
    assert isinstance(found, TableGradient)
    assert torch.equal(found.norm(), expected.norm())


def test_the_gradient_of_whole_logits_is_made_by_blocks(weight: nn.Parameter) -> None:
    hidden, grad_logits = torch.randn(20, WIDTH), torch.randn(20, ROWS)
    gradient = TableGradient(StoredTable(weight, 7), [LinearSource(hidden, grad_logits, weight.dtype)])
    torch.testing.assert_close(gradient.dense(), grad_logits.t() @ hidden)


def test_no_source_is_zero_and_release_drops_them(weight: nn.Parameter) -> None:
    assert not TableGradient(StoredTable(weight, 7)).dense().any()
    gradient = rows_gradient(weight)
    gradient.release()
    assert not gradient.sources
    assert not gradient.dense().any()


def test_weights_that_have_changed_are_noticed(weight: nn.Parameter) -> None:
    class Needing(RowsSource):
        needs_weights = True

    gradient = TableGradient(StoredTable(weight, 7), [Needing(torch.tensor([1]), torch.ones(1, WIDTH), None)])
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(MemascendError, match="fused_loss=False"):
        gradient.dense()


class Constant:
    """A source of one value, or of zeros that it does not make."""

    needs_weights = False

    def __init__(self, value: float | None) -> None:
        self.value = value

    def block(self, first: int, count: int, weights: torch.Tensor | None) -> torch.Tensor | None:
        return None if self.value is None else torch.full((count, WIDTH), self.value)


@pytest.mark.parametrize("values", [[-0.0], [None], [-0.0, None], [None, -0.0], [-0.0, None, 2.0], [None, None]])
def test_zeros_that_are_not_made_count_in_a_sum(values: list[float | None]) -> None:
    gradient = TableGradient(StoredTable(torch.ones(ROWS, WIDTH), 7), [Constant(value) for value in values])
    first, *others = (0.0 if value is None else value for value in values)
    expected = torch.full((ROWS, WIDTH), first)
    for value in others:
        expected += value
    assert torch.equal(gradient.dense().view(torch.int32), expected.view(torch.int32))
