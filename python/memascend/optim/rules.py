"""Which kernels and states a parameter is optimized with."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memascend._memascend import Rule
from memascend.layout.units import DTYPE_NAMES, PACK_BELOW_BYTES

if TYPE_CHECKING:
    import torch


@lru_cache
def rule_for(algorithm: str, states: str, dtype: torch.dtype, nbytes: int, master: bool) -> Rule:
    """Return the rule of a parameter of `nbytes` bytes; see `memascend._memascend.Rule`.

    Parameters small enough to be packed keep fp32 states instead of 8-bit ones, as in Dettmers et al. 2022 (arXiv
    2110.02861): their states take little room, and these parameters are often the most sensitive.
    """
    if states == "8bit" and nbytes < PACK_BELOW_BYTES:
        states = "float32"
    return Rule(algorithm, states, DTYPE_NAMES[dtype], master)
