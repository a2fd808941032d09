"""Moments of projected gradients, and the factors that APOLLO finds with them.

Moments are a tensor of the store (`OptimizerState.moments`) and no planes, because they have another number of elements
than the weights, and no piece of an update needs them. They are written to the slots of the next generation, so a step
that is abandoned leaves the moments of the step before. A step reads the moments of two matrices at a time, so that one
moves while another is computed. A step that fails halfway cannot be tried again, and says so.

A gradient is projected when it is captured, as accumulated gradients are summed: the values that are stored are
projected. The result belongs to a projection (rank, seed, redraw), which the step compares with its own. Where they
differ, in the first step, for a pack, or for a sum of several passes on a device, the step reads the gradient again and
comes to the same bits. So a captured projection that the step cannot use costs time, not correctness.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import PAGE_BYTES, FactorOptions, Projection
from memascend.common.sizes import format_size
from memascend.errors import MemascendError
from memascend.layout.registry import ranks_of
from memascend.layout.shards import channels_of
from memascend.layout.units import DTYPE_NAMES, round_up
from memascend.optim import apollo_ranks
from memascend.optim.offloaded_state import OffloadedState
from memascend.optim.step import FACTORS_AT_ONCE
from memascend.streaming.updates import MeasuredGradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memascend._memascend import ProjectedGradient
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import StateBackend
    from memascend.session.session import Session
    from memascend.streaming.updates import Segment

#: The moments in a state dictionary, and the norm of the last step; of experts the number of each one's steps, too.
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = (*MOMENTS, "norm", "steps")


#: The dimensions of a parameter that holds experts, a matrix each.
EXPERTS_NDIM = 3
#: The most memory beside the plan that projecting a gradient takes without a notice.
NOTED_BYTES = 4 << 20


def moments_shape(backend: StateBackend, rank: int) -> tuple[int, ...]:
    """Return the shape of both moments as they are kept here: (2, channels, rank), of this rank's channels.

    A parameter with experts has (experts, 2, channels, rank).
    """
    *experts, _, _ = backend.parameter.shape
    return *experts, len(MOMENTS), _own_channels(backend)[1], rank


def projected_shape(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the shape of the projected gradient of a parameter: (m, rank) or (rank, n), for each of its experts."""
    *experts, rows, columns = shape
    return (*experts, rows, rank) if rows >= columns else (*experts, rank, columns)


def expert_numel(shape: Sequence[int], rank: int) -> int:
    """Return how many float32 the moments of an expert take in the store: whole pages."""
    nbytes = len(MOMENTS) * max(shape[-2:]) * rank * torch.float32.itemsize
    return round_up(nbytes, PAGE_BYTES) // torch.float32.itemsize


def _stored_numel(backend: StateBackend, rank: int) -> int:
    """Return the float32 of the moments of a parameter in its store."""
    shape = backend.parameter.shape
    if len(shape) == EXPERTS_NDIM:
        return int(shape[0]) * expert_numel(shape, rank)
    return math.prod(moments_shape(backend, rank))


def _own_channels(backend: StateBackend) -> tuple[int, int]:
    """Return the first channel whose moments are kept here, and how many are."""
    shape = backend.parameter.shape[-2:]
    if isinstance(backend, OffloadedState):
        return channels_of(shape, backend.place.start, backend.place.tensor.shard)
    return 0, max(shape)


def request(backend: StateBackend, rank: int, room: StateAllocation) -> None:
    """Ask for the room of the moments of a parameter.

    Raises MemascendError if there are moments of another rank, and for experts of a model that is divided over ranks.
    """
    numel = math.prod(moments_shape(backend, rank))
    if isinstance(backend, OffloadedState):
        _check_not_divided(backend)
        numel, moments = _stored_numel(backend, rank), backend.place.states.moments
        if moments is None:
            if numel:
                room.add_moments(backend.session, backend.place, numel)
            return
        there = moments.numel
        if not moments.written:
            there = numel
            if moments.numel != there:
                backend.session.runtime.store.remove_tensor(moments.id)
                backend.place.states.moments = None
                room.add_moments(backend.session, backend.place, there)
    else:
        there = 2 * backend.state["exp_avg"].numel() if "exp_avg" in backend.state else numel
    if there != numel:
        raise MemascendError(
            f"rank={rank} of {backend.name} is another one than that of its steps so far: make a new optimizer, or set "
            "rank as it was"
        )


def _check_not_divided(backend: OffloadedState) -> None:
    if backend.place.tensor.shard is not None and len(backend.place.shape) == EXPERTS_NDIM:
        raise MemascendError(
            f"{backend.name} has experts in one tensor, and the store is divided over ranks, where APOLLO takes "
            "matrices alone: put it in a group without rank, which takes AdamW "
            "(memascend.apollo_groups(model, experts=False) makes such groups)"
        )


def scratch_bytes(projection: Projection, rank: int) -> int:
    """Return the bytes that projections like this take while they are made, and while factors are found with them.

    Beside the projector: both moments.
    """
    return FACTORS_AT_ONCE * (projection.bytes + 2 * projection.channels * rank * torch.float32.itemsize)


def note_memory(backends: Iterable[StateBackend], rank: int) -> None:
    """Note in the models the host memory that projecting a gradient takes beside the plan, if it is much."""
    most: dict[Session, int] = {}
    for backend in backends:
        if isinstance(backend, OffloadedState):
            rows, columns = backend.place.shape[-2:]
            projection, shard = Projection(rows, columns, rank, 0, 0), backend.place.tensor.shard
            nbytes = scratch_bytes(projection, rank)
            if shard is not None:
                nbytes = apollo_ranks.Division(projection, backend.place.start, shard).memory_bytes(shard.rank)
            most[backend.session] = max(nbytes, most.get(backend.session, 0))
    for session, nbytes in most.items():
        if nbytes >= NOTED_BYTES:
            session.notices.append(
                f"projections of rank {rank} take up to {format_size(nbytes)} of host memory at a time, beside the "
                "plan (memascend plan --optimizer counts it): leave as much, or choose a smaller rank"
            )


def find_factors(group: dict[str, Any], backend: StateBackend, segment: Segment, grad_scale: float) -> None:
    """Give `segment` the factors of the parameter's channels, and update the moments: a part of the step itself.

    The gradient is multiplied by `grad_scale`.
    """
    parameter, state = backend.parameter, backend.state
    measured, threads = _measure(group, backend, segment), torch.get_num_threads()
    options = FactorOptions(**_factor_options(group, backend, grad_scale))
    if isinstance(backend, OffloadedState) and "exp_avg" not in state:
        stored = backend.place.states.moments
        assert stored is not None, "room is made before a step"
        segment.factors, norm = backend.session.runtime.projections.stored_factors(
            measured, stored.id, stored.written, threads, options
        )
        stored.written = True
    else:
        moments = _load(backend, int(group["rank"]))
        first, second = (moment.data_ptr() for moment in moments)
        segment.factors, norm = measured.factors((first, second), threads, options)
        _keep(backend, moments)
    backend.backends.optimizer.state[parameter]["norm"] = norm


def measured(
    group: dict[str, Any], backend: StateBackend, projection: Projection, address: int
) -> MeasuredGradient | None:
    """Return the source of the factors of a parameter's next step; None where `request` has not made its moments."""
    assert isinstance(backend, OffloadedState), "other parameters are not updated in the backward pass"
    moments = backend.place.states.moments
    if moments is None or moments.numel != _stored_numel(backend, projection.rank):
        return None
    options = FactorOptions(**_factor_options(group, backend, 1.0))
    return MeasuredGradient(projection, address, moments.id, moments.written, torch.get_num_threads(), options)


def find_joined_factors(work: Sequence[tuple[dict[str, Any], StateBackend, Segment, float]]) -> None:
    """Find the factors of several updates together, where the store is divided over ranks; see `find_factors`."""
    matrices, ranks = [], ranks_of(backend.parameter for _, backend, _, _ in work)
    assert ranks is not None, "ranks divide the model"
    for group, backend, segment, grad_scale in work:
        assert isinstance(backend, OffloadedState) and backend.place.tensor.shard is not None, (
            "the tensors of a group are divided"
        )
        shard = backend.place.tensor.shard
        division = apollo_ranks.Division(projection_of(group, backend), backend.place.start, shard)
        options = _factor_options(group, backend, grad_scale)
        matrices.append(apollo_ranks.Matrix(backend.session.runtime, backend.place, division, segment, options))
    apollo_ranks.find_factors(ranks, matrices)
    for (_, backend, _, _), matrix in zip(work, matrices, strict=True):
        backend.backends.optimizer.state[backend.parameter]["norm"] = matrix.norm


def _factor_options(group: dict[str, Any], backend: StateBackend, grad_scale: float) -> dict[str, Any]:
    """Return the arguments of `FactorOptions` for the parameter's next step."""
    return factor_options(group, backend.next_step, backend.state.get("norm"), grad_scale)


def factor_options(group: dict[str, Any], step: int, norm_before: float | None, grad_scale: float) -> dict[str, Any]:
    """Return the arguments of `FactorOptions` for step number `step` of a matrix, the first being 1."""
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "betas": (float(beta1), float(beta2)),
        "eps": float(group["eps"]),
        "scale": float(group["scale"]),
        "whole": group["scale_type"] == "tensor",
        "scale_front": bool(group["scale_front"]),
        "step": step,
        "grad_scale": -grad_scale if group["maximize"] else grad_scale,
        "norm_before": norm_before,
    }


def projection_of(group: dict[str, Any], backend: StateBackend) -> Projection:
    """Return how the gradient of a parameter's next step is projected."""
    seed = backend.backends.seed(group, backend.parameter)
    return projection_with(group, backend.parameter, seed, backend.state.get("step", 0))


def projection_with(group: dict[str, Any], parameter: nn.Parameter, seed: int, steps: int) -> Projection:
    """Return how a gradient of a matrix of `parameter` is projected after so many steps."""
    rows, columns = parameter.shape[-2:]
    return Projection(rows, columns, int(group["rank"]), seed, steps // int(group["update_proj_gap"]))


def _measure(group: dict[str, Any], backend: StateBackend, segment: Segment) -> ProjectedGradient:
    """Project the gradient of a segment, unless that was done when it was captured."""
    projection = projection_of(group, backend)
    if isinstance(backend, OffloadedState) and segment.host is None:
        projected = backend.session.gradients.take_projected(backend.place, projection)
        if projected is not None:
            return backend.session.runtime.projections.take_projected(projection, projected)
    return project(backend, projection, segment.host, 0)


def project(
    backend: StateBackend, projection: Projection, host: tuple[int, int] | None, start: int
) -> ProjectedGradient:
    """Project the part of a parameter's gradient that begins at element `start` of it.

    With `host` it lies in host memory, at the second address; otherwise it is in the store's keeping.
    """
    threads = torch.get_num_threads()
    if host is not None:
        return projection.of(DTYPE_NAMES[backend.parameter.dtype], host[1], threads)
    assert isinstance(backend, OffloadedState), "other parameters give addresses"
    runtime, place = backend.session.runtime, backend.place
    assert place.tensor.gradient is not None, "a step takes a gradient that was captured"
    start += place.start if place.tensor.packed else 0
    return runtime.projections.project_gradient(place.tensor.gradient, start, projection, threads)


# ---- where the moments are -------------------------------------------------------------------------------


def _load(backend: StateBackend, rank: int) -> torch.Tensor:
    """Return both moments of the channels that are kept here, of `moments_shape`: zeros where there are none yet."""
    parameter, state = backend.parameter, backend.state
    if "exp_avg" in state:
        moments = torch.empty(moments_shape(backend, rank))
        for moment, name in zip(_each(moments), MOMENTS, strict=True):
            moment.copy_(by_channel(parameter, state[name]))
        return moments
    if isinstance(backend, OffloadedState):
        stored = backend.place.states.moments
        if stored is not None and stored.written:
            whole = torch.empty(stored.numel)
            backend.session.runtime.store.read(stored.id, whole.data_ptr(), whole.nbytes)
            return _without_padding(backend, whole, rank)
    return torch.zeros(moments_shape(backend, rank))


def store_moments(backend: OffloadedState, rank: int) -> None:
    """Write the moments of a parameter to its store that were in memory before it was offloaded."""
    _keep(backend, _load(backend, rank))


def _keep(backend: StateBackend, moments: torch.Tensor) -> None:
    """Keep both moments, of `moments_shape`, in the parameter's backend."""
    state = backend.backends.optimizer.state[backend.parameter]
    if isinstance(backend, OffloadedState):
        stored = backend.place.states.moments
        if not moments.numel():
            return  # None of the channels is this rank's.
        assert stored is not None, "room is made before a step"
        whole = torch.zeros(stored.numel)
        _without_padding(backend, whole, moments.shape[-1]).copy_(moments)
        backend.session.runtime.store.write(stored.id, whole.data_ptr(), whole.nbytes)
        stored.written = True
        for name in MOMENTS:
            state.pop(name, None)  # Of a parameter that was in memory before.
        return
    for moment, name in zip(_each(moments), MOMENTS, strict=True):
        state[name] = _as_projected(backend.parameter, moment)


def _without_padding(backend: OffloadedState, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a view of moments as the store has them, flat, in their shape."""
    shape = moments_shape(backend, rank)
    if backend.parameter.ndim != EXPERTS_NDIM:
        return whole.view(shape)
    return whole.view(shape[0], -1)[:, : math.prod(shape[1:])].view(shape)


def _each(moments: torch.Tensor) -> torch.Tensor:
    """Return the first moments and the second ones, of all experts where there are several."""
    return moments.movedim(-3, 0)


def _gathered(backend: StateBackend, rank: int) -> torch.Tensor:
    """Return both moments of all channels, which several ranks may keep; as `_load` does of one process."""
    moments, ranks = _load(backend, rank), ranks_of([backend.parameter])
    if ranks is None:
        return moments
    assert isinstance(backend, OffloadedState), "ranks divide a model"
    place = backend.place
    counts = [channels_of(place.shape, place.start, place.tensor.shard, other)[1] for other in range(ranks.size)]
    every = torch.zeros(ranks.size, len(MOMENTS), max(counts), rank)
    every[ranks.rank, :, : counts[ranks.rank]] = moments
    ranks.gather(f"gather the moments of {place.name}", [every.view(-1).view(torch.uint8)])
    return torch.cat([of_rank[:, :count] for of_rank, count in zip(every, counts, strict=True)], dim=1)


def _as_projected(parameter: nn.Parameter, moment: torch.Tensor) -> torch.Tensor:
    """Return a moment, (channels, rank), in the shape of the projected gradient: (m, rank) or (rank, n)."""
    return by_channel(parameter, moment).clone(memory_format=torch.contiguous_format)


def by_channel(parameter: nn.Parameter, moment: torch.Tensor) -> torch.Tensor:
    """Return the moment, (channels, rank), from the shape of `_as_projected`, or the other way around."""
    rows, columns = parameter.shape[-2:]
    return moment if rows >= columns else moment.mT


# ---- state dictionaries ----------------------------------------------------------------------------------


def read(backend: StateBackend, rank: int) -> dict[str, Any]:
    """Return the moments as `state_dict` shows them, and the norm of the last step; of experts each one's steps too."""
    shown = {
        name: _as_projected(backend.parameter, moment)
        for name, moment in zip(MOMENTS, _each(_gathered(backend, rank)), strict=True)
    }
    if "steps" in backend.state:
        shown["steps"] = torch.tensor(backend.state["steps"])
    norm = backend.state.get("norm")
    return shown if norm is None else shown | {"norm": torch.tensor(norm, dtype=torch.float64)}


def check_saved(parameter: nn.Parameter, rank: int, saved: dict[str, Any]) -> None:
    """Raise ValueError unless the moments among a parameter's saved states can be loaded."""
    expected = projected_shape(parameter.shape, rank)
    experts = expected[:-2]
    shapes = dict.fromkeys(MOMENTS, expected) | ({"norm": experts, "steps": experts} if experts else {})
    for name, shape in shapes.items():
        value = saved.get(name)
        if value is not None and (not isinstance(value, torch.Tensor) or tuple(value.shape) != shape):
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"{name} has shape {given}, and that of a projection of rank {rank} of a parameter "
                f"{tuple(parameter.shape)} is {shape}"
            )
    if experts and saved.get("exp_avg") is not None and (saved.get("steps") is None or saved.get("norm") is None):
        raise ValueError(f"the states of experts {tuple(parameter.shape)} lack steps or norm, of each expert")


def load(backend: StateBackend, rank: int, saved: dict[str, Any]) -> None:
    """Take over saved moments and the norm of the last step; others begin anew."""
    parameter = backend.parameter
    moments = torch.zeros(moments_shape(backend, rank))
    first, count = _own_channels(backend)
    for moment, name in zip(_each(moments), MOMENTS, strict=True):
        if saved.get(name) is not None:
            moment.copy_(by_channel(parameter, saved[name])[..., first : first + count, :])
    _keep(backend, moments)
    state = backend.backends.optimizer.state[parameter]
    if saved.get("norm") is None:
        return
    if parameter.ndim == EXPERTS_NDIM:
        state["norm"], state["steps"] = saved["norm"].tolist(), saved["steps"].tolist()
    else:
        state["norm"] = float(saved["norm"])
