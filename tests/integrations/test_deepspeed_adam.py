"""Adam behind DeepSpeed's operators: the bits of PyTorch's."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import deepspeed_parts  # noqa: F401 - skips these tests where DeepSpeed is not installed
import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
#: After so many steps no bias is corrected.
LATE = 10_000_000
#: Error of PyTorch's square root where it does not fuse, in units in the last place of the update.
ROOT_ULPS = 8


@pytest.fixture
def adam(deepspeed: types.ModuleType) -> Iterator[Callable[..., int]]:
    """Do a step with options as in `torch.optim`: AdamW (`decoupled`) or Adam."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    operator = CPUAdamBuilder().load()
    for number, decoupled in enumerate((False, True)):
        assert operator.create_adam(9000 + number, adamw_mode=decoupled) == 0

    def step(decoupled: bool, number: int, corrected: bool, *tensors: torch.Tensor, undo: bool = False) -> int:
        function = operator.adam_rollback if undo else operator.adam_update
        lr, betas, eps, decay = OPTIONS.values()
        return function(9000 + decoupled, number, lr, *betas, eps, decay, corrected, *tensors)

    yield step
    for number in range(2):
        assert operator.destroy_adam(9000 + number) == 0


class Reference:
    """A parameter that PyTorch's fused optimizer trains in float32.

    It is padded to whole vectors: PyTorch computes a remainder without fusing multiplications and additions.
    """

    def __init__(self, weight: torch.Tensor, decoupled: bool, corrected: bool = True, fused: bool = True) -> None:
        self.numel = weight.numel()
        self.weight = torch.nn.Parameter(self.padded(weight))
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.optimizer = cls([self.weight], **OPTIONS, fused=fused, foreach=False)
        self.corrected = corrected

    def step(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.weight.grad = self.padded(gradient)
        state = self.optimizer.state[self.weight]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(self.weight)
            state["step"] = torch.tensor(0.0)
        if not self.corrected:
            state["step"] = torch.tensor(float(LATE))
        self.optimizer.step()
        found = self.weight.detach(), state["exp_avg"], state["exp_avg_sq"]
        return tuple(tensor[: self.numel] for tensor in found)

    def begin(self, *values: torch.Tensor) -> None:
        """Go on from these: weight and moments."""
        self.weight.data[: self.numel] = values[0]
        state = self.optimizer.state[self.weight]
        if state:
            state["exp_avg"][: self.numel] = values[1]
            state["exp_avg_sq"][: self.numel] = values[2]

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor.detach().float(), (0, -self.numel % 64))


def gradients(numel: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Yield gradients of all sizes, some of them zeros."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        sizes = 10.0 ** torch.randint(-6, 2, (numel,), generator=generator)
        gradient = torch.randn(numel, generator=generator) * sizes
        yield gradient.masked_fill(torch.rand(numel, generator=generator) < 0.1, 0.0).to(dtype)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_a_step_has_the_bits_of_torch(adam: Callable[..., int], decoupled: bool, corrected: bool) -> None:
    weight = torch.randn(10_007)
    expected, m, v = Reference(weight, decoupled, corrected), torch.zeros(10_007), torch.zeros(10_007)
    for number, gradient in enumerate(gradients(10_007), start=1):
        wanted = expected.step(gradient)
        assert adam(decoupled, number, corrected, weight, gradient.clone(), m, v) == 0
        for found, of_torch in zip((weight, m, v), wanted, strict=True):
            assert torch.equal(found, of_torch)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_is_that_of_torch_without_fusing(adam: Callable[..., int], decoupled: bool) -> None:
    # See optim/test_numerics.py.
    weight = torch.randn(10_007)
    expected, m, v = Reference(weight, decoupled, fused=False), torch.zeros(10_007), torch.zeros(10_007)
    for number, gradient in enumerate(gradients(10_007), start=1):
        expected.begin(weight, m, v)
        before = weight.clone()
        wanted = expected.step(gradient)
        adam(decoupled, number, True, weight, gradient.clone(), m, v)
        assert torch.equal(m, wanted[1])
        assert torch.equal(v, wanted[2])
        ulps = 2 * torch.maximum(before.abs(), weight.abs()) + ROOT_ULPS * (weight - before).abs()
        assert ((weight - wanted[0]).abs() <= torch.finfo(torch.float32).eps * ulps).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_states", [torch.float32, None])
@pytest.mark.parametrize("contiguous", [True, False])
def test_half_precision_is_rounded_to_nearest(
    adam: Callable[..., int], dtype: torch.dtype, of_states: torch.dtype | None, contiguous: bool
) -> None:
    def tensor(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1001, dtype=dtype) if contiguous else torch.zeros(1001, 2, dtype=dtype)[:, 0]

    weight = tensor(dtype).copy_(torch.randn(1001))
    m, v = (tensor(of_states or dtype) for _ in range(2))
    expected = Reference(weight, True)
    for number, gradient in enumerate(gradients(1001, dtype), start=1):
        expected.begin(weight.float(), m.float(), v.float())
        wanted = expected.step(gradient)
        adam(True, number, True, weight, tensor(dtype).copy_(gradient), m, v)
        for found, of_torch in zip((weight, m, v), wanted, strict=True):
            # PyTorch rounds to the nearest.
            assert torch.equal(found, of_torch.to(found.dtype))


def test_large_tensors_in_half_precision_are_whole(adam: Callable[..., int]) -> None:
    from memascend.integrations.deepspeed import adam as kernels

    numel = 2 * kernels._CHUNK + 3
    weight, gradient = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    m, v = torch.zeros(numel), torch.zeros(numel)
    wanted = Reference(weight, True).step(gradient)
    adam(True, 1, True, weight, gradient, m, v)
    assert torch.equal(weight, wanted[0].bfloat16())
    assert torch.equal(m, wanted[1])
    assert torch.equal(v, wanted[2])


@pytest.mark.parametrize("corrected", [True, False])
def test_a_step_can_be_undone(adam: Callable[..., int], corrected: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, m, v = torch.randn(1001), torch.zeros(1001), torch.zeros(1001)
    for number in range(1, 4):
        before = [tensor.clone() for tensor in (weight, m, v)]
        gradient = torch.randn(1001, generator=generator)
        adam(True, number, corrected, weight, gradient, m, v)
        after = [tensor.clone() for tensor in (weight, m, v)]
        adam(True, number, corrected, weight, gradient, m, v, undo=True)
        for found, old, new in zip((weight, m, v), before, after, strict=True):
            torch.testing.assert_close(found, old, rtol=1e-5, atol=2e-6)
            assert not torch.allclose(found, new, rtol=1e-4, atol=1e-4)
        for tensor, new in zip((weight, m, v), after, strict=True):
            tensor.copy_(new)


def test_lists_of_tensors(deepspeed: types.ModuleType) -> None:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    operator = FusedAdamBuilder().load()
    weights = [torch.randn(numel) for numel in (1, 100, 1001)]
    grads, ms, vs = [torch.randn_like(w) for w in weights], *([torch.zeros_like(w) for w in weights] for _ in "mv")
    lr, betas, eps, decay = OPTIONS.values()
    for mode in (0, 1):
        wanted = []
        for weight, gradient, m, v in zip(weights, grads, ms, vs, strict=True):
            m.zero_()
            v.zero_()
            wanted.append(Reference(weight, mode == 1).step(gradient))
        operator.multi_tensor_adam(
            2048, torch.zeros(1), [grads, weights, ms, vs], lr, *betas, eps, 1, mode, True, decay
        )
        for number, tensors in enumerate(zip(weights, ms, vs, strict=True)):
            for found, of_torch in zip(tensors, wanted[number], strict=True):
                assert torch.equal(found, of_torch)
