"""The overflow check: CPU tensors, the CUDA kernels compiled and run on the host, and, marked gpu, on a device."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tiny_models
import torch
from overflow_cases import BLOCK, DTYPES, FACTORS, SIZES, all_patterns, numbers, same, squares, unscaled_by_torch

import memascend
from memascend import _memascend
from memascend.optim.overflow import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]


# ---- CPU tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_finite_tensors_have_their_sum_and_nothing_is_found(dtype: torch.dtype, offset: int) -> None:
    for size in SIZES:
        tensor = numbers(size, dtype, size, offset)
        before = tensor.clone()
        result = check(tensor, norm=True)
        assert result.found_inf is False and not result
        assert result.sum_squares == pytest.approx(squares(tensor), rel=1e-13)
        assert result.norm == math.sqrt(result.sum_squares)
        assert torch.equal(tensor, before)
        assert check(tensor).found_inf is False


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_every_pattern_is_judged_as_torch_judges_it(dtype: torch.dtype, norm: bool) -> None:
    patterns = all_patterns(dtype)
    # One at a time, among numbers that are finite.
    for position in (0, 36):
        tensor = numbers(37, dtype)
        for pattern in patterns if dtype == torch.float32 else patterns[::7]:
            tensor[position] = pattern
            assert check(tensor, norm=norm).found_inf == (not torch.isfinite(pattern)), pattern
    finite = patterns[torch.isfinite(patterns)]
    result = check(finite, norm=True)
    assert not result.found_inf and result.sum_squares == pytest.approx(squares(finite), rel=1e-13)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    tensor = numbers(2 * BLOCK + 77, dtype)
    for position in (0, 1, 31, 32, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 76):
        kept = tensor[position].clone()
        tensor[position] = bad
        for threads in (1, 3):
            assert check(tensor, threads=threads).found_inf, position
            result = check([numbers(9, dtype), tensor], norm=True, threads=threads)
            assert result.found_inf and math.isnan(result.sum_squares) and math.isnan(result.norm)
        tensor[position] = kept
    assert not check(tensor).found_inf


def test_a_list_is_the_sum_of_its_tensors_on_any_number_of_threads() -> None:
    tensors = [numbers(size, dtype, seed) for seed, size in enumerate(SIZES) for dtype in DTYPES]
    expected = sum((check(tensor, norm=True).sum_squares for tensor in tensors), 0.0)
    for threads in (1, 2, 3, 8, 33):
        assert check(iter(tensors), norm=True, threads=threads).sum_squares == expected
    assert expected == pytest.approx(squares(*tensors), rel=1e-13)
    foreach = torch.stack(torch._foreach_norm([t.double() for t in tensors if t.numel()])).norm().item()
    assert math.sqrt(expected) == pytest.approx(foreach, rel=1e-13)


def test_the_norm_is_that_of_clipping() -> None:
    parameters = [torch.nn.Parameter(numbers(size, torch.float32, size)) for size in SIZES[1:]]
    for parameter in parameters:
        parameter.grad = numbers(parameter.numel(), torch.float32, parameter.numel() + 1)
    norm = check([p.grad for p in parameters], norm=True).norm
    assert memascend.AdamW(parameters).clip_grad_norm_(1.0).item() == np.float32(norm)


def test_nothing_at_all() -> None:
    for nothing in ([], [torch.empty(0)], [torch.empty(3, 0, dtype=torch.bfloat16)] * 2):
        result = check(nothing, norm=True)
        assert (result.found_inf, result.sum_squares, result.norm) == (False, 0.0, 0.0)
        assert not check(nothing, unscale=2.0).found_inf
    assert check(torch.tensor(3.0), norm=True).norm == 3.0
    assert check([torch.tensor(math.inf)]).found_inf_tensor.item() == 1.0
    assert check([torch.tensor(1.0)]).found_inf_tensor.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: torch.dtype) -> None:
    base = numbers(6 * 5 * 8, dtype).view(6, 5, 8)
    views = [
        base.transpose(0, 2),
        base[:, 1:3],
        base[:, :, ::2],
        base[2],
        base[0, 0, 0],
        base.view(1, 6, 1, 5, 8).permute(4, 0, 2, 1, 3),
        base[:, :1].expand(6, 7, 8),
        base.as_strided((4, 4), (1, 2)),
    ]
    for view in views:
        assert check(view, norm=True).sum_squares == pytest.approx(squares(view), rel=1e-13)
        if 0 not in [stride for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1]:
            whole, expected = base.clone(), base.clone()
            mine, theirs = (b.as_strided(view.shape, view.stride(), view.storage_offset()) for b in (whole, expected))
            check(mine, unscale=0.5)
            theirs.copy_(theirs * 0.5)
            assert torch.equal(whole, expected), "what lies between the view's elements is left alone"
    # An infinity between the elements of a view is not the view's.
    hole = base.clone()
    hole[:, 0] = math.inf
    assert not check(hole[:, 1:]).found_inf and check(hole).found_inf


# ---- unscaling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaling_is_that_of_torch(dtype: torch.dtype, factor: float) -> None:
    finite = all_patterns(dtype)
    finite = finite[torch.isfinite(finite)]
    for tensors in ([finite], [all_patterns(dtype)], [numbers(size, dtype, size, 1) for size in SIZES[1:]]):
        mine, theirs = ([t.clone() for t in tensors] for _ in range(2))
        result = check(mine, norm=True, unscale=factor, threads=2)
        assert result.found_inf == bool(unscaled_by_torch(theirs, factor))
        for a, b in zip(mine, theirs, strict=True):
            assert same(a, b)
        if not result.found_inf and all(bool(t.isfinite().all()) for t in mine):
            assert result.sum_squares == pytest.approx(squares(*mine), rel=1e-13)


def test_the_factor_may_be_a_tensor_and_what_overflows_was_not_found() -> None:
    tensor = torch.full((40,), 60_000.0, dtype=torch.float16)
    result = check(tensor, norm=True, unscale=torch.tensor([2.0], dtype=torch.float64))
    assert not result.found_inf and result.sum_squares == math.inf
    assert torch.isinf(tensor).all()
    with pytest.raises(ValueError, match="one element"):
        check(tensor, unscale=torch.ones(2))


def test_autograd_is_told() -> None:
    weight = torch.ones(8, requires_grad=True)
    product = (weight * weight).sum()
    assert check(weight, norm=True).norm == math.sqrt(8)
    product.backward(retain_graph=True)
    check(weight, unscale=0.5)
    assert torch.equal(weight.detach(), torch.full((8,), 0.5)) and weight.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        inference = torch.ones(3)
    check(inference, unscale=0.5)
    assert inference[0] == 0.5


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, dtype=torch.float64), "dtype float64"),
        (torch.ones(3, dtype=torch.int32), "dtype int32"),
        (torch.ones(3, dtype=torch.complex64), "dtype complex64"),
        (torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(3, device="meta"), "on meta"),
        (None, "NoneType"),
        ([1.0], "a list"),
    ],
)
def test_what_cannot_be_checked_is_named(tensor: object, words: str) -> None:
    first = torch.ones(3)
    with pytest.raises(ValueError, match=r"tensors\[1\].*" + words):
        check([first, tensor], unscale=0.5)  # type: ignore[list-item]
    assert torch.equal(first, torch.ones(3)), "nothing was changed"


def test_unscaling_refuses_shared_memory() -> None:
    tensor = torch.ones(100)
    for other in (tensor, tensor[50:], tensor[99:], tensor[::2]):
        with pytest.raises(ValueError, match=r"tensors\[2\] shares memory with tensors\[0\]"):
            check([tensor, torch.ones(1), other], unscale=0.5)
    with pytest.raises(ValueError, match=r"tensors\[0\] is expanded"):
        check(torch.ones(1).expand(5), unscale=0.5)
    assert torch.equal(tensor, torch.ones(100))
    assert not check([tensor, tensor]).found_inf
    check([tensor[:50], tensor[50:]], unscale=0.5)
    assert torch.equal(tensor, torch.full((100,), 0.5))


def test_the_sum_must_have_been_asked_for() -> None:
    with pytest.raises(ValueError, match="norm=True"):
        _ = check(torch.ones(1)).norm
    with pytest.raises(ValueError, match="threads"):
        check(torch.ones(1), threads=0)


# ---- offloaded models ---------------------------------------------------------------------------------------


def test_kept_gradients_are_judged_by_what_was_recorded(offloaded: Callable[..., nn.Module]) -> None:
    model, ordinary = tiny_models.build("llama"), tiny_models.build("llama")
    offloaded(model)
    for each in (model, ordinary):
        each(**tiny_models.batch("llama", 0)).loss.backward()
    extra = numbers(1000, torch.float32)
    kept = check([extra, *(p.grad for p in model.parameters())], norm=True)
    plain = check([extra, *(p.grad for p in ordinary.parameters())], norm=True)
    assert not kept.found_inf and kept.sum_squares == plain.sum_squares > 0
    parameter = next(iter(model.parameters()))
    assert not check(parameter.grad.detach()).found_inf
    with pytest.raises(ValueError, match=r"tensors\[1\] is the gradient of .* cannot be unscaled"):
        check([extra.clone(), parameter.grad], unscale=0.5)
    with pytest.raises(ValueError, match="pass it whole"):
        check(parameter.grad[:1])
    gradient = parameter.grad
    parameter.grad = None
    assert not check(gradient).found_inf
    model(**tiny_models.batch("llama", 1)).loss.backward()
    with pytest.raises(ValueError, match=r"this gradient of .* is gone"):
        check(gradient)


def test_an_overflowed_kept_gradient_is_found(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))
    (model(**tiny_models.batch("llama", 0)).loss * math.inf).backward()
    gradients = [p.grad for p in model.parameters()]
    assert check(gradients).found_inf and math.isnan(check(gradients, norm=True).norm)
    # A filled marker shows its values.
    model.zero_grad(set_to_none=False)
    assert check([p.grad for p in model.parameters()], norm=True).norm == 0.0


def test_absent_weights_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))
    with pytest.raises(ValueError, match="weights are not in memory"):
        check(model.parameters())
    memascend.close(model)
    gc.collect()


# ---- memory -------------------------------------------------------------------------------------------------

MEMORY = """
import re, sys
import torch
from pathlib import Path
from memascend.optim.overflow import check

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def growth(call):
    # 5 sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    call()
    return peak() - before

torch.set_num_threads(2)
MIB = 2**20
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensor = torch.ones(64 * MIB // dtype.itemsize, dtype=dtype)
    small = tensor[:MIB]
    for options in ({}, {"norm": True}, {"unscale": 1.0, "norm": True}):
        check(small, **options)
        grown = growth(lambda: check(tensor, **options))
        assert grown < MIB, f"{dtype}, {options}: {grown} bytes"
    grown = growth(lambda: torch.isinf(tensor).any() | torch.isnan(tensor).any())
    assert grown > 15 * MIB, f"this would not have noticed {grown} bytes"
    del tensor, small
"""


def test_no_memory_is_taken() -> None:
    """Counted by the kernel, as the process's peak; the Rust tests count requests to the allocator."""
    done = subprocess.run([sys.executable, "-P", "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_ends_at_the_first_block() -> None:
    tensor = torch.zeros(100 * BLOCK)
    for position, blocks in ((5, 1), (3 * BLOCK, 4), (None, 100)):
        if position is not None:
            tensor[position] = math.inf
        found, _, read = _memascend.check_overflow([("float32", tensor.numel(), tensor.data_ptr())], False, None, 1)
        assert (found, read) == (position is not None, blocks)
        tensor.zero_()
