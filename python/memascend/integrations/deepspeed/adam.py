"""DeepSpeed's `cpu_adam` and `fused_adam` operators over the kernels of memascend."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from memascend._memascend import Rule, StepScalars, step_host

if TYPE_CHECKING:
    from collections.abc import Sequence

Scalars: TypeAlias = StepScalars

#: A step number at which both bias corrections are 1 for every beta below 1.
_NO_CORRECTION = 1 << 52
#: Elements that are converted to float32 at a time.
_CHUNK = 1 << 20

#: Rules of float32 weights, by the dtype of the moments.
_RULES = {
    torch.float32: Rule("adamw", "float32", "float32", True),
    torch.bfloat16: Rule("adamw", "bfloat16", "float32", True),
}
#: Whether weight decay is decoupled, by the number that DeepSpeed has given the optimizer.
_decoupled: dict[int, bool] = {}


def create_adam(
    optimizer_id: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Note whether the optimizer of that number is AdamW (`adamw_mode`) or Adam; 0. The rest comes with each step."""
    _decoupled[optimizer_id] = adamw_mode
    return 0


def optimizers() -> dict[int, bool]:
    """Return which optimizers exist, by their number, and whether each is AdamW."""
    return dict(_decoupled)


def destroy_adam(optimizer_id: int) -> int:
    """Forget the optimizer of that number; 0."""
    _decoupled.pop(optimizer_id, None)
    return 0


@torch.no_grad()
def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """Do one step of Adam or AdamW in place, as `torch.optim` does; 0.

    Tensors are of one shape, on the CPU, each float32, bfloat16 or float16. Computed in float32; other dtypes are
    rounded to the nearest. `step` is 1 at the first step.
    """
    _update(
        _decoupled[optimizer_id],
        step,
        (lr, beta1, beta2, eps, weight_decay),
        bias_correction,
        (params, grads, exp_avg, exp_avg_sq),
    )
    return 0


@torch.no_grad()
def adam_rollback(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> int:
    """Undo step number `step`, up to rounding; 0. Tensors are float32, weight decay is AdamW's, as in DeepSpeed."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for p, g, m, v in _chunks((params, grads, exp_avg, exp_avg_sq)):
        update = lr * (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
        p.copy_(((p + update) / (1 - lr * weight_decay)).nan_to_num(0.0, 0.0, 0.0))
        m.sub_(g * (1 - beta1)).div_(beta1)
        v.sub_(g * g * (1 - beta2)).div_(beta2).clamp_(min=0.0)
    return 0


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    """Do one step of Adam (`mode` 0) or AdamW (1) on lists of gradients, weights and both moments, in place."""
    for g, p, m, v in zip(*tensor_lists, strict=True):
        _update(mode == 1, step, (lr, beta1, beta2, epsilon, weight_decay), bool(bias_correction), (p, g, m, v))


def scalars(
    decoupled: bool,
    step: int,
    options: tuple[float, float, float, float, float],
    bias_correction: bool,
    grad_scale: float = 1.0,
) -> Scalars:
    """Return the scalars of a step: AdamW if `decoupled`; lr, betas, eps and weight decay."""
    lr, beta1, beta2, eps, weight_decay = options
    return StepScalars.adamw(
        lr,
        (beta1, beta2),
        eps,
        weight_decay,
        step if bias_correction else _NO_CORRECTION,
        decoupled=decoupled,
        grad_scale=grad_scale,
        maximize=False,
        seed=0,
    )


def step_masters(with_scalars: Scalars, tensors: Sequence[torch.Tensor]) -> None:
    """Do a step on weight, gradient and moments: contiguous tensors in host memory, updated in place.

    Weight and gradient are float32, moments float32 or bfloat16.
    """
    p, g, m, v = tensors
    planes = [m.data_ptr(), v.data_ptr()]
    step_host(_RULES[m.dtype], p.numel(), p.data_ptr(), planes, g.data_ptr(), with_scalars, torch.get_num_threads())


def _update(
    decoupled: bool,
    step: int,
    options: tuple[float, float, float, float, float],
    bias_correction: bool,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    of_step = scalars(decoupled, step, options, bias_correction)
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        step_masters(of_step, tensors)
        return
    for parts in _chunks(tensors):
        p, g, m, v = (part.to(torch.float32).contiguous() for part in parts)
        step_masters(of_step, (p, g, m, v))
        for part, new in zip((parts[0], *parts[2:]), (p, m, v), strict=True):
            if part.data_ptr() != new.data_ptr():
                part.copy_(new)


def _chunks(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape into views of at most `_CHUNK` elements; those that cannot be flattened stay whole."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return [tuple(tensors)]
    return list(zip(*(tensor.reshape(-1).split(_CHUNK) for tensor in tensors), strict=True))
