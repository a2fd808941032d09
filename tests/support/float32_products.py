"""Matrix products of half precision computed in float32, where PyTorch is slow at them.

Without AVX-512, PyTorch multiplies bfloat16 and float16 about thirty times slower than float32. Tests compare two runs
of the same arithmetic, which may be either. With AVX-512 all is PyTorch's own, and so it is on any processor in modules
that are marked `own_products` and in programs that are not forked (MEMASCEND_FRESH makes all programs such).
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.hardware.matmul_rates import product_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HALF = (torch.bfloat16, torch.float16)
#: The kernels that are replaced now.
_library: torch.library.Library | None = None


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Have PyTorch multiply half precision in float32 and round the result, on the CPU and in this process."""
    with _changed(install):
        yield


@contextlib.contextmanager
def as_pytorch() -> Iterator[None]:
    """Have PyTorch multiply as it does by itself."""
    with _changed(remove):
        yield


def install() -> None:
    """Replace the kernels from now on, unless they are quick or programs that are compared have PyTorch's own."""
    import forked  # Not at the top: forked programs import this module.

    global _library
    # PyTorch is not asked: it would not look at ATEN_CPU_CAPABILITY again, which forked programs may set.
    quick = "avx512bw" in Path("/proc/cpuinfo").read_text()
    if quick or forked.fresh() or _library is not None:
        return
    for dtype in _HALF:
        product_rates(dtype)  # measured once in a process: the choice of a dtype is by PyTorch's own products
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own kernels are replaced
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            _library.impl(name, _rounded(getattr(torch.ops.aten, name).out), "CPU")


def remove() -> None:
    """Put PyTorch's own kernels back."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


@contextlib.contextmanager
def _changed(change: Callable[[], None]) -> Iterator[None]:
    before = _library is not None
    change()
    try:
        yield
    finally:
        (install if before else remove)()


def _rounded(into: Any) -> Any:
    """Return a kernel that computes half precision in float32, and everything else as `into` does."""

    def kernel(*tensors: torch.Tensor, **scalars: Any) -> torch.Tensor:
        dtype = tensors[0].dtype
        if dtype in _HALF:
            tensors = tuple(tensor.float() for tensor in tensors)
        return into(*tensors, **scalars, out=tensors[0].new_empty(0)).to(dtype)

    return kernel
