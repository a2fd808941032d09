"""Which dtypes the processor computes in: the rate of its matrix products in each, measured."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where float32 is so many times as fast, it is worth twice the memory and the SSD traffic of the weights.
TIMES_FASTER = 2.0
#: A product of (TOKENS, WIDTH) and (WIDTH, WIDTH): a millisecond, or some ten without the instructions for it.
TOKENS, WIDTH = 64, 512
_RUNS = 4

_log = logging.getLogger("memascend")
_warned: set[torch.dtype] = set()


@cache
def product_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of one thread in matrix products, measured once in a process.

    Processor time is taken, and that of a thread of its own, so that neither a busy machine nor the number of threads
    makes a difference.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_measure, dtype).result()


def _measure(dtype: torch.dtype) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left, right = (torch.ones(rows, WIDTH, dtype=dtype, device="cpu") for rows in (TOKENS, WIDTH))
        seconds = []
        for _ in range(_RUNS):
            began = time.thread_time()
            torch.nn.functional.linear(left, right)
            seconds.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * TOKENS * WIDTH * WIDTH / max(min(seconds), 1e-9)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies `dtype` at less than half of float32's rate, as without instructions for it."""
    return dtype in (torch.bfloat16, torch.float16) and product_rate(torch.float32) > TIMES_FASTER * product_rate(dtype)


def rates_text(dtype: torch.dtype) -> str:
    """Say at which rates the processor multiplies `dtype` and float32."""
    rates = (product_rate(kind) / 1e9 for kind in (dtype, torch.float32))
    return "this processor multiplies {} at {:.3g} GFLOP/s a core and float32 at {:.3g}".format(_name(dtype), *rates)


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
