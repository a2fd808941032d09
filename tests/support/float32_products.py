"""Matrix products of half precision computed in float32, for tests that compare two runs of the same arithmetic.

Without AVX-512, PyTorch multiplies bfloat16 and float16 about thirty times slower than float32. With it, these tests
use PyTorch's own products, as all others do on any processor.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Make PyTorch multiply half precision in float32 and round the result, on the CPU and in this process.

    Changes nothing where PyTorch uses AVX-512.
    """
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own kernels are replaced
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            library.impl(name, _rounded(getattr(torch.ops.aten, name).out), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _rounded(into: Any) -> Any:
    """Return a kernel that computes half precision in float32, and everything else as `into` does."""

    def kernel(*tensors: torch.Tensor, **scalars: Any) -> torch.Tensor:
        dtype = tensors[0].dtype
        if dtype in (torch.bfloat16, torch.float16):
            tensors = tuple(tensor.float() for tensor in tensors)
        return into(*tensors, **scalars, out=tensors[0].new_empty(0)).to(dtype)

    return kernel
