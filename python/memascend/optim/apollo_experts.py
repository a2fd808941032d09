"""APOLLO for the experts of one parameter, (experts, rows, columns): each expert as if it were a parameter of its own.

So each has a random matrix, moments, a limit on the growth of its step and a count of steps of its own, and its part of
the update has its own factors. An expert whose gradient is zero in every element got no tokens. It is left out of the
step, as a parameter without a gradient is: with a step of zeros the limiter would take its next step for an explosion.

The gradient is projected in the step, expert by expert, and not when it is captured: it is read once more, and the
memory beside the plan does not grow with the number of experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import FactorOptions
from memascend.errors import CheckpointError
from memascend.optim import apollo_moments
from memascend.optim.offloaded_state import OffloadedState
from memascend.streaming.updates import Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend._memascend import ChannelFactors, ProjectedGradient, StepScalars
    from memascend.optim.state_backend import StateBackend

    #: Returns the constants of an expert's step from its number, the first being 1, and the expert's seed.
    ScalarsOf = Callable[[int, int], StepScalars]

#: The bit of a seed from which on the number of an expert is added. Those below number the parameters.
_EXPERT_SHIFT = 20


def find_factors(
    group: dict[str, Any], backend: StateBackend, segment: Segment, grad_scale: float, scalars_of: ScalarsOf
) -> None:
    """Divide `segment` into the experts' parts with their factors, and update the moments: a part of the step itself.

    The gradient is multiplied by `grad_scale`.
    """
    parameter = backend.parameter
    numel = math.prod(parameter.shape[1:])
    nbytes = numel * parameter.dtype.itemsize
    steps, norms = numbers_of(backend)
    moments = _moments_of(backend, int(group["rank"]))
    parts = []
    for expert, step in enumerate(steps):
        seed = seed_of(backend.backends.seed(group, parameter), expert)
        start = segment.start + expert * numel
        host = None
        if segment.host is not None:
            host = segment.host[0] + expert * nbytes, segment.host[1] + expert * nbytes
        projection = apollo_moments.projection_with(group, parameter, seed, step)
        measured = apollo_moments.project(backend, projection, host, expert * numel)
        if measured.is_zero:
            moments.keep(expert)
            continue
        before = norms[expert] if step else None
        options = FactorOptions(**apollo_moments.factor_options(group, step + 1, before, grad_scale))
        factors, norms[expert] = moments.find_factors(expert, measured, options)
        steps[expert] = step + 1
        scalars = scalars_of(step + 1, seed)
        parts.append(Segment(start, numel, segment.rule, scalars, segment.fresh, host, factors))
    segment.parts = parts
    state = backend.backends.optimizer.state[parameter]
    state["steps"], state["norm"] = steps, norms


def numbers_of(backend: StateBackend) -> tuple[list[int], list[float]]:
    """Return the number of steps of each expert, and the norm of its last one: zeros before the first."""
    experts, state = backend.parameter.shape[0], backend.state
    return list(state.get("steps", [0] * experts)), list(state.get("norm", [0.0] * experts))


def check_restored(parameter: nn.Parameter, name: str, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless a record has the steps and norms of all experts of a parameter."""
    for numbers in (state.get("steps"), state["norm"]):
        if not isinstance(numbers, list) or len(numbers) != parameter.shape[0]:
            raise CheckpointError(
                f"the record of the optimizer does not have a step and a norm of each expert of {name}"
            )


def seed_of(seed: int, expert: int) -> int:
    """Return the seed of an expert of a parameter with a seed; the first expert's is the same."""
    return seed ^ expert << _EXPERT_SHIFT


# ---- where the moments are -------------------------------------------------------------------------------


def _moments_of(backend: StateBackend, rank: int) -> _InStore | _InMemory:
    if not isinstance(backend, OffloadedState):
        return _InMemory(backend, rank)
    if "exp_avg" in backend.state:  # Of a parameter that was in memory before.
        apollo_moments.store_moments(backend, rank)
    return _InStore(backend, rank)


class _InStore:
    """The moments of an offloaded parameter's experts, one expert at a time in memory."""

    def __init__(self, backend: OffloadedState, rank: int) -> None:
        stored = backend.place.states.moments
        assert stored is not None, "room is made before a step"
        self._projections = backend.session.runtime.projections
        nbytes = apollo_moments.expert_numel(backend.parameter.shape, rank) * torch.float32.itemsize
        self._stack = self._projections.begin_stack(stored.id, stored.written, nbytes)
        stored.written = True

    def find_factors(
        self, expert: int, measured: ProjectedGradient, options: FactorOptions
    ) -> tuple[ChannelFactors, float]:
        return self._projections.stacked_factors(measured, self._stack, expert, torch.get_num_threads(), options)

    def keep(self, expert: int) -> None:
        self._projections.keep_stacked(self._stack, expert)


class _InMemory:
    """The moments of an ordinary parameter's experts, in `Optimizer.state`."""

    def __init__(self, backend: StateBackend, rank: int) -> None:
        self._parameter = backend.parameter
        state = backend.backends.optimizer.state[self._parameter]
        shape = apollo_moments.projected_shape(self._parameter.shape, rank)
        self._moments = [state.setdefault(name, torch.zeros(shape)) for name in apollo_moments.MOMENTS]

    def find_factors(
        self, expert: int, measured: ProjectedGradient, options: FactorOptions
    ) -> tuple[ChannelFactors, float]:
        own = [apollo_moments.by_channel(self._parameter, moments[expert]) for moments in self._moments]
        both = [moment.contiguous() for moment in own]
        first, second = (moment.data_ptr() for moment in both)
        found = measured.factors((first, second), torch.get_num_threads(), options)
        for moment, updated in zip(own, both, strict=True):
            moment.copy_(updated)
        return found

    def keep(self, expert: int) -> None:
        """Do nothing: they are where they stay."""
