"""Inputs of the overflow check, and PyTorch's verdicts on them."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


BLOCK = 65_536


SIZES = (0, 1, 2, 3, 7, 31, 33, 1023, 2048, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 129)


#: Factors whose products are exact, or rounded, or underflow.
FACTORS = (1.0, 2.0**-16, 1 / 3, 3.5)


def numbers(numel: int, dtype: torch.dtype, seed: int = 0, offset: int = 0) -> torch.Tensor:
    """Finite values over many magnitudes, `offset` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(numel + offset, generator=generator)
    wide *= 2.0 ** torch.randint(-20, 6, wide.shape, generator=generator)
    return wide.to(dtype)[offset:]


def squares(*tensors: torch.Tensor) -> float:
    """Return the reference: every square exact, added without rounding."""
    return math.fsum(square for tensor in tensors for square in (tensor.double() ** 2).flatten().tolist())


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return every bit pattern of a 16-bit type; of fp32 every exponent with awkward mantissas, and both signs."""
    if dtype != torch.float32:
        return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    mantissas = [0, 1, 0x400000, 0x3FFFFF, 0x7FFFFF, 0x7FE000, 0x001000, 0x555555]
    bits = [sign << 31 | exponent << 23 | low for sign in (0, 1) for exponent in range(256) for low in mantissas]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, a NaN to a NaN, and zeros by their sign."""
    numbers_of_a, numbers_of_b = (torch.where(t.isnan(), 0, t) for t in (a, b))
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(numbers_of_a, numbers_of_b)
        and torch.equal(numbers_of_a.signbit(), numbers_of_b.signbit())
    )


def unscaled_by_torch(tensors: list[torch.Tensor], factor: float) -> float:
    """Unscale in place as torch's gradient scaler does; return its verdict."""
    # PyTorch 2.11 has no kernel for bfloat16 on a device.
    where = torch.device("cpu") if tensors[0].dtype == torch.bfloat16 else tensors[0].device
    found = torch.zeros(1, device=where)
    there = [tensor.to(where) for tensor in tensors]
    torch._amp_foreach_non_finite_check_and_unscale_(there, found, torch.full((1,), factor, device=where))
    for tensor, unscaled in zip(tensors, there, strict=True):
        tensor.copy_(unscaled)
    return found.item()
