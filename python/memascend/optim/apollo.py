"""APOLLO and APOLLO-Mini (Zhu et al. 2024, arXiv 2412.05270): one learning rate for each channel of a matrix."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import StepScalars
from memascend.durability import exact_json
from memascend.errors import MemascendError
from memascend.layout.experts import fused_experts
from memascend.optim import apollo_experts, apollo_moments
from memascend.optim.apollo_moments import EXPERTS_NDIM
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.options import check_betas, check_from_zero, check_learning_rate
from memascend.optim.rules import rule_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn
    from torch.optim.optimizer import ParamsT

    from memascend._memascend import Projection, Rule
    from memascend.durability.protocols import SessionProtocol
    from memascend.optim.state_allocation import StateAllocation
    from memascend.optim.state_backend import StateBackend
    from memascend.streaming.updates import MeasuredGradient, Segment


#: The numbers of a parameter that a store's record has: the entry there, and the key in `Optimizer.state`.
_RECORDED = {"norms": "norm", "expert_steps": "steps"}
#: Options on which the factors of channels depend, beside the options of the step's constants.
_OF_FACTORS = ("betas", "eps", "rank", "scale", "scale_type", "scale_front", "update_proj_gap", "seed")


class Apollo(OffloadedOptimizer):
    """APOLLO: AdamW's step, with a learning rate for each channel of a matrix instead of one for each element.

    The learning rates come from a random projection of the gradient to `rank` numbers a channel, and only those have
    moments. A channel is a row or a column of the matrix, whichever there are more of.

    A group with a `rank` takes APOLLO, and holds matrices alone, or experts in one tensor, (experts, rows, columns):
    each is a matrix, as if it were a parameter of its own. A group without takes AdamW, as is usual for embeddings,
    head and norms: `memascend.apollo_groups(model)` makes the two. Parameters that are given without groups
    are a group with `rank`.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr, betas, eps, weight_decay: as in AdamW. Weights decay by themselves, after the step.
        rank: numbers that stand for a channel, for parameters that are given without groups.
        update_proj_gap: steps after which the random matrix is drawn anew. The moments stay.
        scale: the step is multiplied by its square root.
        scale_type: "channel", or "tensor" for one factor for the whole matrix.
        scale_front: whether the limit on the growth of a step's norm counts the square root of `scale`.
        proj, proj_type: "random" and "std" alone: a random matrix on the smaller side.
        maximize: follow the gradient upwards.
        options: `states` (of groups with AdamW), `master`, `seed`, `nonfinite`, `store`, `host_memory` and others of
            `OffloadedOptimizer`. Moments of projected gradients are float32; moments of ordinary parameters are in
            memory, also with `store`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        scale_front: bool = False,
        proj: str = "random",
        proj_type: str = "std",
        maximize: bool = False,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        check_learning_rate(lr)
        check_betas(betas)
        check_from_zero("epsilon", "eps", eps)
        check_from_zero("weight_decay", "weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(float(beta) for beta in betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": None,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "scale_type": scale_type,
            "scale_front": scale_front,
            "proj": proj,
            "proj_type": proj_type,
            "maximize": maximize,
        }
        super().__init__(_with_rank(params, rank), defaults, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in PyTorch. Raises ValueError for one with a `rank` and parameters that are no matrices."""
        _check_group(self.defaults | param_group)
        super().add_param_group(param_group)

    def _prepare(self, groups: Iterable[dict[str, Any]]) -> None:
        groups = list(groups)
        super()._prepare(groups)
        for group in groups:
            if group["rank"] is not None:
                apollo_moments.note_memory(
                    (self._backends.of(parameter) for parameter in group["params"]), int(group["rank"])
                )

    # ---- the algorithm ---------------------------------------------------------------------------

    def _algorithm(self, group: dict[str, Any]) -> str:
        return "adamw" if group["rank"] is None else "apollo"

    def rule_of(self, group: dict[str, Any], parameter: nn.Parameter) -> Rule:
        """Return the kernels and states of the parameter's next step, with the options of `group`."""
        if group["rank"] is None:
            return super().rule_of(group, parameter)
        # The moments of the projected gradient are no planes.
        return rule_for("apollo", "float32", parameter.dtype, 0, group["master"])

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
        if group["rank"] is not None:
            return StepScalars.apollo(lr, decay, step, grad_scale=grad_scale, maximize=maximize, seed=seed)
        beta1, beta2 = group["betas"]
        return StepScalars.adamw(
            lr,
            (float(beta1), float(beta2)),
            float(group["eps"]),
            decay,
            step,
            decoupled=True,
            grad_scale=grad_scale,
            maximize=maximize,
            seed=seed,
        )

    def _request(self, group: dict[str, Any], backend: StateBackend, room: StateAllocation) -> None:
        if group["rank"] is not None:
            apollo_moments.request(backend, int(group["rank"]), room)

    def _find_factors(self, group: dict[str, Any], backend: StateBackend, segment: Segment, grad_scale: float) -> None:
        if group["rank"] is None:
            return

        def scalars_of(step: int, seed: int) -> StepScalars:
            return self._scalars(group, step, step == 1, grad_scale, seed)

        with self._failing():
            if backend.parameter.ndim == EXPERTS_NDIM:
                apollo_experts.find_factors(group, backend, segment, grad_scale, scalars_of)
            else:
                apollo_moments.find_factors(group, backend, segment, grad_scale)

    def _find_joined_factors(self, work: Sequence[tuple[dict[str, Any], StateBackend, Segment, float]]) -> None:
        with self._failing():
            apollo_moments.find_joined_factors(work)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note an error: some moments are a step ahead of the others then, so that the step cannot be tried again."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _factor_options(self, group: dict[str, Any]) -> Any:
        return None if group["rank"] is None else tuple(group[name] for name in _OF_FACTORS)

    def projection_of(self, parameter: nn.Parameter) -> Projection | None:
        """Return how the gradient of the parameter's next step is projected as it is captured.

        None where it takes AdamW, and for experts, whose gradients are projected in the step.
        """
        group = self._group_of(parameter)
        if group["rank"] is None or parameter.ndim == EXPERTS_NDIM:
            return None
        return apollo_moments.projection_of(group, self._backends.of(parameter))

    def backward_segment(self, parameter: nn.Parameter, addresses: tuple[int, int] | None) -> Segment | None:
        """Return the parameter's next update; see `OffloadedOptimizer`.

        Experts whose gradient a device has wait for the step, which projects it.
        """
        if addresses is None and parameter.ndim == EXPERTS_NDIM and self._group_of(parameter)["rank"] is not None:
            return None
        return super().backward_segment(parameter, addresses)

    def measured_in_backward(
        self, parameter: nn.Parameter, projection: Projection, address: int
    ) -> MeasuredGradient | None:
        """Return the source of the factors of an update of `backward_segment`; see `OffloadedOptimizer`."""
        group = self._group_of(parameter)
        return apollo_moments.measured(group, self._backends.of(parameter), projection, address)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the group of a parameter; one without a rank for a parameter that is in none."""
        groups = (group for group in self.param_groups if any(p is parameter for p in group["params"]))
        return next(groups, {"rank": None})

    def _step(self) -> None:
        self._check_failed()
        super()._step()

    def _check_failed(self) -> None:
        if getattr(self, "_failed", False):
            raise MemascendError(
                f"a step of this {type(self).__name__} has failed half-way, so that its moments are not those of one "
                "step: memascend.resume goes on from the last durable step"
            )

    # ---- saved states ----------------------------------------------------------------------------

    def _read(self, group: dict[str, Any], backend: StateBackend) -> dict[str, Any]:
        states = super()._read(group, backend)
        return states if group["rank"] is None else states | apollo_moments.read(backend, int(group["rank"]))

    def _check_saved(self, group: dict[str, Any], parameter: nn.Parameter, saved: dict[str, Any]) -> None:
        if group["rank"] is None:
            super()._check_saved(group, parameter, saved)
            return
        rest = {name: value for name, value in saved.items() if name not in apollo_moments.NAMES}
        super()._check_saved(group, parameter, rest)
        apollo_moments.check_saved(parameter, int(group["rank"]), saved)

    def _load_states(
        self, group: dict[str, Any], backend: StateBackend, rule: Rule, saved: dict[str, Any], steps: int
    ) -> None:
        super()._load_states(group, backend, rule, saved, steps)
        if group["rank"] is not None:
            apollo_moments.load(backend, int(group["rank"]), saved)

    def describe(self, session: SessionProtocol) -> dict[str, Any]:
        """Return the optimizer's record for a store; see `OffloadedOptimizer.describe`."""
        self._check_failed()
        described = super().describe(session)
        for key, name in _RECORDED.items():
            numbers = {
                place.name: self.state[place.parameter][name]
                for place in session.places
                if name in self.state.get(place.parameter, {})
            }
            described[key] = exact_json.encode(numbers, f"the {key} of APOLLO")
        return described

    def restore(self, described: dict[str, Any]) -> None:
        """Go on as the optimizer that `describe` described; see `OffloadedOptimizer.restore`."""
        super().restore(described)
        for group, described_group in zip(self.param_groups, described["groups"], strict=True):
            for parameter, name in zip(group["params"], described_group["params"], strict=True):
                for key, number in _RECORDED.items():
                    if name in described.get(key, {}):
                        self.state[parameter][number] = described[key][name]
                if parameter.ndim == EXPERTS_NDIM and name in described["norms"]:
                    apollo_experts.check_restored(parameter, name, self.state[parameter])


class ApolloMini(Apollo):
    """APOLLO-Mini: APOLLO of rank 1 with one learning rate for each matrix, and hardly any states.

    Args:
        params: parameters or groups with options of their own; see `Apollo`.
        lr, betas, eps, weight_decay, update_proj_gap, scale_front, proj, proj_type, maximize: as in `Apollo`.
        rank, scale, scale_type: as in `Apollo`, with other defaults.
        options: as in `Apollo`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int = 1,
        scale: float = 128.0,
        scale_type: str = "tensor",
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        super().__init__(params, lr, betas, eps, weight_decay, rank=rank, scale=scale, scale_type=scale_type, **options)


def apollo_groups(model: nn.Module, rank: int = 256, *, experts: bool = True, **options: Any) -> list[dict[str, Any]]:
    """Return two parameter groups of a model for `Apollo` or `ApolloMini`: matrices with `rank`, and the others.

    The matrices are the weights of `torch.nn.Linear` modules, and of others of that name, but for the output layer; and
    with `experts` those experts that transformers keeps in one tensor. Embeddings, head, norms and biases are in the
    second group, which takes AdamW. A group without parameters is left out. `options` go with the first group: `scale`,
    `scale_type`, `update_proj_gap` and others.
    """
    matrices = _weights_of_linear(model) - _tables_of(model)
    if experts:
        matrices |= {id(parameter) for _, _, parameter in fused_experts(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if id(parameter) in matrices], "rank": rank, **options},
        {"params": [parameter for parameter in trained if id(parameter) not in matrices]},
    ]
    return [group for group in groups if group["params"]]


def _weights_of_linear(model: nn.Module) -> set[int]:
    """Return the identities of the weights of linear layers, by class or by name."""
    weights = (
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ in ("Linear", "Conv1D")
    )
    return {id(weight) for weight in weights if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2}


def _tables_of(model: nn.Module) -> set[int]:
    """Return the identities of the parameters of embeddings and of the output layer."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return tables if head is None else tables | {id(parameter) for parameter in head.parameters()}


def _with_rank(params: ParamsT, rank: int) -> ParamsT:
    """Have parameters that are given without groups be a group with a rank."""
    if isinstance(params, torch.Tensor):
        return params  # PyTorch refuses it.
    given: list[Any] = list(params)
    if not given or isinstance(given[0], dict):
        return given
    return [{"params": given, "rank": rank}]


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError unless APOLLO can take a group with these options."""
    if group["rank"] is None:
        return
    for name in ("rank", "update_proj_gap"):
        if int(group[name]) != group[name] or group[name] < 1:
            raise ValueError(f"Invalid {name} value: {group[name]} ({name} must be a whole number from 1 up)")
    if not group["scale"] > 0.0:
        raise ValueError(f"Invalid scale value: {group['scale']} (scale must be above 0)")
    for name, allowed in (("scale_type", ("channel", "tensor")), ("proj", ("random",)), ("proj_type", ("std",))):
        if group[name] not in allowed:
            raise ValueError(f"Invalid {name} value: {group[name]!r}: it is one of {', '.join(allowed)}")
    given = group["params"]
    parameters: Iterable[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    group["params"] = parameters
    for entry in parameters:
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(parameter, torch.Tensor) and (parameter.ndim not in (2, EXPERTS_NDIM) or parameter.numel() == 0):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is in a group with rank={group['rank']}, but APOLLO "
                "takes matrices, and experts (experts, rows, columns): put it in a group without rank, which takes "
                "AdamW; memascend.apollo_groups(model) makes the groups of a model"
            )
