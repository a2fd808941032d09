"""Which kernels and states a parameter is optimized with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memascend._memascend import Rule
from memascend.layout.units import DTYPE_NAMES, PACK_BELOW_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from memascend._memascend import StepScalars
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import StateBackend
    from memascend.streaming.updates import Segment


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The arithmetic of an optimizer, which depends on the options of a parameter's group."""

    #: `rule(group, parameter)`: the kernels and states of an update.
    rule: Callable[[dict[str, Any], nn.Parameter], Rule]
    #: `scalars(group, step, begins, grad_scale, seed)`: the constants of step number `step`.
    scalars: Callable[[dict[str, Any], int, bool, float, int], StepScalars]
    #: `ask(group, backend, room)`: ask for room for the algorithm's states beside the rule's planes.
    request: Callable[[dict[str, Any], StateBackend, StateAllocation], None]
    #: `find_factors(group, backend, segment, grad_scale)`: give an update its factors, which depend on the whole
    #: gradient.
    find_factors: Callable[[dict[str, Any], StateBackend, Segment, float], None]
    #: `find_joined_factors(work)`: the same for several parameters of a store that is divided over ranks.
    find_joined_factors: Callable[[Sequence[tuple[dict[str, Any], StateBackend, Segment, float]]], None]
    #: `factor_options(group)`: the options that `find_factors` reads.
    factor_options: Callable[[dict[str, Any]], Any]


@lru_cache
def rule_for(algorithm: str, states: str, dtype: torch.dtype, nbytes: int, master: bool) -> Rule:
    """Return the rule of a parameter of `nbytes` bytes; see `memascend._memascend.Rule`.

    Parameters small enough to be packed keep fp32 states instead of 8-bit ones, as in Dettmers et al. 2022 (arXiv
    2110.02861): their states take little room, and these parameters are often the most sensitive.
    """
    if states == "8bit" and nbytes < PACK_BELOW_BYTES:
        states = "float32"
    return Rule(algorithm, states, DTYPE_NAMES[dtype], master)
