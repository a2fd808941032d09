"""Which dtypes the processor computes in: the rate of its matrix products in each, measured.

A processor is measured, not named: without instructions for bfloat16, PyTorch multiplies it 2.6 (AVX-512) to 31 (AVX2)
times slower than float32. `--dtype auto` goes by the measurement; a resumed run keeps its dtype.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where float32 is so many times as fast, the processor does not compute in the other dtype. It is 0.5 with the
#: instructions for bfloat16, 2.6 with AVX-512 alone, 4 to 31 with AVX2.
TIMES_FASTER = 1.5
#: A product of (TOKENS, WIDTH) and (WIDTH, WIDTH): a millisecond, or some ten without the instructions for it.
TOKENS, WIDTH = 64, 512
_RUNS = 5

_log = logging.getLogger("memascend")
_warned: set[torch.dtype] = set()


@cache
def product_rates(dtype: torch.dtype) -> tuple[float, float]:
    """Return the operations per second of one thread in matrix products of `dtype` and float32, measured once.

    Processor time is taken, of a thread of its own, and the two take turns, so that neither a busy machine nor the
    number of threads makes a difference.
    """
    with ThreadPoolExecutor(1) as executor:
        half, single = executor.submit(_measure, dtype, torch.float32).result()
    return half, single


def _measure(*dtypes: torch.dtype) -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        factors = [[torch.ones(rows, WIDTH, dtype=dtype, device="cpu") for rows in (TOKENS, WIDTH)] for dtype in dtypes]
        seconds = [[_seconds(left, right) for left, right in factors] for _ in range(_RUNS)]
    finally:
        torch.set_num_threads(threads)
    return [2 * TOKENS * WIDTH * WIDTH / max(min(runs), 1e-9) for runs in zip(*seconds, strict=True)]


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.thread_time()
    torch.nn.functional.linear(left, right)
    return time.thread_time() - began


def is_slow(dtype: torch.dtype) -> bool:
    """Return whether the processor multiplies float32 faster than `dtype`, as without instructions for it."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    half, single = product_rates(dtype)
    return single > TIMES_FASTER * half


def rates_text(dtype: torch.dtype) -> str:
    """Say at which rates the processor multiplies `dtype` and float32."""
    half, single = (rate / 1e9 for rate in product_rates(dtype))
    return f"this processor multiplies {_name(dtype)} at {half:.3g} GFLOP/s a core and float32 at {single:.3g}"


def warn_no_more() -> None:
    """Give no such warning in this process: a command that has no option for another dtype calls this."""
    _warned.update((torch.bfloat16, torch.float16))


def warn_of_slow(dtypes: Iterable[torch.dtype]) -> None:
    """Warn, once in a process for each, of the `dtypes` that a model on the CPU had better not compute in."""
    for dtype in sorted(set(dtypes) - _warned, key=str):
        if is_slow(dtype):
            _warned.add(dtype)
            _log.warning(
                "%s: with weights in float32 (dtype='float32', or model.float() before memascend.offload) a step is "
                "faster, and memascend.save_pretrained(model, out, dtype='%s') writes them in %s",
                rates_text(dtype),
                *[_name(dtype)] * 2,
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
