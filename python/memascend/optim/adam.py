"""Adam (Kingma and Ba 2015, arXiv 1412.6980), AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) and AMSGrad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend._memascend import StepScalars
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.options import check_betas, check_from_zero, check_learning_rate

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Adam(OffloadedOptimizer):
    """`torch.optim.Adam` with states on SSD or in memory; see `OffloadedOptimizer` for where and how they are kept.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in `torch.optim.Adam`.
        foreach, capturable, differentiable, fused: see `OffloadedOptimizer`.
        options: `states`, `master`, `seed`, `nonfinite`, `store`, `host_memory` and others of `OffloadedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        check_learning_rate(lr, foreach)
        check_from_zero("epsilon", "eps", eps)
        check_betas(betas, foreach)
        check_from_zero("weight_decay", "weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(float(beta) for beta in betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **options)

    def _algorithm(self, group: dict[str, Any]) -> str:
        return "adamw amsgrad" if group["amsgrad"] else "adamw"

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        beta1, beta2 = group["betas"]
        return StepScalars.adamw(
            float(group["lr"]),
            (float(beta1), float(beta2)),
            float(group["eps"]),
            float(group["weight_decay"]),
            step,
            decoupled=bool(group["decoupled_weight_decay"]),
            grad_scale=grad_scale,
            maximize=bool(group["maximize"]),
            seed=seed,
        )


class AdamW(Adam):
    """`torch.optim.AdamW` with states on SSD or in memory; see `OffloadedOptimizer` for where and how they are kept.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        foreach, capturable, differentiable, fused: see `OffloadedOptimizer`.
        options: `states`, `master`, `seed`, `nonfinite`, `store`, `host_memory` and others of `OffloadedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            **options,
        )

    # A loaded dictionary does not turn decoupled weight decay, and so AdamW, off.
    own_options = (*Adam.own_options, "decoupled_weight_decay")
