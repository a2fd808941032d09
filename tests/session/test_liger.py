"""Losses fused with the head, as Liger-Kernel's: they read `lm_head.weight` outside of its module's forward."""

from __future__ import annotations

import sys
from types import MethodType
from typing import TYPE_CHECKING, Any

import float32_products
import pytest
import requirements
import tiny_models
import torch
from processes import run_file
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

#: Rows of the logits that are there at a time.
CHUNK = 7


class FusedLoss(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T`, summed in chunks, with the gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take [rows, width], [vocabulary, width] and [rows]; return the mean (0-dim float32)."""
        total = torch.zeros(())
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for rows, kept, wanted in zip(hidden.split(CHUNK), of_hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = (rows @ weight.t()).float()
            total += functional.cross_entropy(logits, wanted, reduction="sum") / len(targets)
            error = (logits.softmax(-1) - functional.one_hot(wanted, len(weight))) / len(targets)
            kept.copy_(error.to(weight.dtype) @ weight)
            of_weight += error.t() @ rows.float()
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * scale.to(of_hidden.dtype), of_weight * scale.to(of_weight.dtype), None


def fused_forward(self: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
    hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
    rows, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].reshape(-1)
    return CausalLMOutput(loss=FusedLoss.apply(rows, self.lm_head.weight, targets))


def run(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(3):
        loss = model(**tiny_models.batch("llama", step)).loss
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(memascend.parameters_of(model))


def check(offloaded: Callable[..., nn.Module], patch: Callable[[nn.Module], None], frozen: bool) -> None:
    def build() -> nn.Module:
        model = tiny_models.build("llama")
        patch(model)
        model.lm_head.requires_grad_(not frozen)
        return model

    losses, weights = run(build())
    model = build()
    offloaded(model, host_memory=tiny_models.smallest_budget(model))
    actual, kept = run(model)
    assert all(torch.equal(one, other) for one, other in zip(actual, losses, strict=True))
    tiny_models.assert_same_weights(kept, weights)
    changed = not torch.equal(weights["lm_head.weight"], tiny_models.build("llama").lm_head.weight)
    assert changed != frozen


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_fused_with_the_head(offloaded: Callable[..., nn.Module], frozen: bool) -> None:
    check(offloaded, lambda model: setattr(model, "forward", MethodType(fused_forward, model)), frozen)


def test_liger_kernel(store: Path) -> None:
    assert run_file(__file__, store, **requirements.liger_interpreted()).endswith("same\n")


def main(store: str) -> None:
    """Compare training with Liger-Kernel's loss in memory and offloaded."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    def patch(model: nn.Module) -> None:
        others = {"rope": False, "rms_norm": False, "swiglu": False, "cross_entropy": False}
        apply_liger_kernel_to_llama(**others, fused_linear_cross_entropy=True, model=model)
        assert "forward" in model.__dict__

    def offloaded(model: nn.Module, **options: Any) -> nn.Module:
        return memascend.offload(model, store=store, allocator="pageable", **options)

    torch.set_num_threads(1)
    float32_products.install()
    check(offloaded, patch, frozen=False)
    print("same")


if __name__ == "__main__":
    main(sys.argv[1])
