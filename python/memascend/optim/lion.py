"""Lion (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend._memascend import StepScalars
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.options import check_betas, check_from_zero, check_learning_rate

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT


class Lion(OffloadedOptimizer):
    """Lion: the sign of an average of gradients, with one state and decoupled weight decay.

    Its learning rate is usually a third to a tenth of AdamW's, and its weight decay as many times larger.

    Args:
        params: parameters or groups with options of their own, as for any `torch.optim.Optimizer`.
        lr: the distance that every weight moves in a step.
        betas: decay of the average whose sign is the direction, and of the average kept as the state.
        weight_decay: as in AdamW.
        maximize: follow the gradient upwards.
        options: `states`, `master`, `seed`, `nonfinite`, `store`, `host_memory` and others of `OffloadedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        """Make room for the states of every parameter."""
        check_learning_rate(lr)
        check_betas(betas)
        check_from_zero("weight_decay", "weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(float(beta) for beta in betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **options)

    def _algorithm(self, group: dict[str, Any]) -> str:
        return "lion"

    def _scalars(self, group: dict[str, Any], step: int, begins: bool, grad_scale: float, seed: int) -> StepScalars:
        beta1, beta2 = group["betas"]
        return StepScalars.lion(
            float(group["lr"]),
            (float(beta1), float(beta2)),
            float(group["weight_decay"]),
            step,
            grad_scale=grad_scale,
            maximize=bool(group["maximize"]),
            seed=seed,
        )
