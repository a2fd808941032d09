"""Quantising to NF4 and to 8 bits, with the bits of bitsandbytes (0.50) on the CPU of an x86-64 machine.

NF4 repeats bitsandbytes' operations in PyTorch: the nearest number of the code, found by its midpoints. 8 bits, and the
scales of NF4 that are quantised once more, repeat its function in C++: the number is looked up by one of 65,536 equal
parts of -1 .. 1, into which the quotient falls by a fused multiply and add.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from memascend.layout.bits import BLOCK, NESTED_BLOCK

#: The numbers of NF4.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: Parts of -1 .. 1 by which a number of the code for bytes is looked up.
_PARTS = 65536
#: No scale is taken for less, which would divide by zero.
_LEAST = 1e-38


class NestedScales(NamedTuple):
    """Scales that are quantised too: `numbers[scales] * factors + offset`, a factor for each `NESTED_BLOCK`."""

    scales: torch.Tensor
    factors: torch.Tensor
    offset: float


def to_four_bits(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise an even number of elements, from the beginning of a block on.

    Returns the numbers, two in a byte, the first one in the higher bits; and the scale of each block, float32. Raises
    ValueError for elements that are not finite.
    """
    flat, block = values.float(), BLOCK[4]
    whole = len(flat) - len(flat) % block
    blocks = flat[:whole].view(-1, block)
    scales = _finite(blocks.abs().amax(-1))
    scaled = (blocks * (1.0 / scales.clamp(min=_LEAST).view(-1, 1))).clamp_(-1, 1).view(-1)
    if whole < len(flat):
        last = _finite(flat[whole:].abs().amax(-1, keepdim=True)).clamp(min=_LEAST)
        scales = torch.cat([scales, last])
        scaled = torch.cat([scaled, (flat[whole:] / last).clamp_(-1, 1)])
    code = torch.tensor(NF4)
    numbers = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8)
    return (numbers[::2] << 4) | numbers[1::2], scales


def to_bytes(values: torch.Tensor, block: int = BLOCK[8]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise elements, from the beginning of a block on: the bytes, and the scale of each block, float32.

    Raises ValueError for elements that are not finite.
    """
    flat = values.float()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = _finite(padded.abs().amax(-1, keepdim=True))
    scaled = (padded * torch.where(scales == 0, 0.0, 1.0 / scales)).clamp_(-1, 1)
    # In float64 the product and the sum are exact, and rounded to float32 once, as by a fused operation.
    at = (scaled + 1).mul_(0.5).double().mul_(_PARTS - 1).add_(0.5).float().int().clamp_(min=0)
    numbers = torch.where(scales == 0, 0, _parts()[at])
    return numbers.view(-1)[: len(flat)], scales.view(-1)


def quantise_scales(scales: torch.Tensor) -> NestedScales:
    """Quantise the scales of all blocks of a weight in four bits."""
    offset = scales.mean()
    numbers, factors = to_bytes(scales - offset, NESTED_BLOCK)
    return NestedScales(numbers, factors, float(offset))


def _finite(scales: torch.Tensor) -> torch.Tensor:
    if not scales.isfinite().all():
        raise ValueError("values that are infinite or NaN")
    return scales


@cache
def dynamic_code() -> torch.Tensor:
    """Return the 256 numbers that bytes stand for: float32, ascending, in -1 .. 1, dense about zero."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2.0)
        numbers += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32)


@cache
def _parts() -> torch.Tensor:
    """Return the byte of each of the parts that -1 .. 1 is divided into: it names the nearest number."""
    code = dynamic_code()
    at = 2.0 * torch.arange(_PARTS, dtype=torch.float32) / (_PARTS - 1) - 1.0
    return torch.bucketize(at, 0.5 * (code[:-1] + code[1:]), out_int32=True).to(torch.uint8)
