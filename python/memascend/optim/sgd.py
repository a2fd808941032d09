"""Stochastic gradient descent, with momentum and Nesterov's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend._memascend import StepScalars
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.options import check_from_zero, check_learning_rate

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT


class SGD(OffloadedOptimizer):
    """`torch.optim.SGD` with states on SSD or in memory; see `OffloadedOptimizer` for where and how they are kept.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        foreach, differentiable, fused: see `OffloadedOptimizer`.
        options: `states`, `master`, `seed`, `nonfinite`, `store`, `host_memory` and others of `OffloadedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        check_learning_rate(lr)
        check_from_zero("momentum", "momentum", momentum)
        check_from_zero("weight_decay", "weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, **options)

    def _algorithm(self, group: dict[str, Any]) -> str:
        return "sgd momentum" if group["momentum"] else "sgd"

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        return StepScalars.sgd(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
            1 if begins else step,  # the first momentum is the gradient, whenever it comes
            grad_scale=grad_scale,
            maximize=bool(group["maximize"]),
            seed=seed,
        )
