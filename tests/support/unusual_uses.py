"""Programs that use weights and gradients in ways that an update in the backward pass has to leave alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memascend


class Unusual(nn.Module):
    """Layers that use their weight where no gradient comes from, before they use it where one does."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192, bias=False) for _ in range(4))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight = layer.weight.detach()
            if self.use == "detached":
                x = nn.functional.linear(x, weight)
            else:
                x = Kept.apply(x, weight)
            x = layer(torch.tanh(x))
        return x.float().square().mean()


class Kept(torch.autograd.Function):
    """A product whose backward has the weight as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.weight, None


def hooked(use: str, model: nn.Module) -> None:
    """Have hooks use weights within each backward pass."""
    last = model.layers[3].weight

    def after(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            if use == "a hook writes":
                parameter.mul_(0.9)
            if use == "a hook reads":
                model.seen.append(parameter.detach().clone())

    last.register_post_accumulate_grad_hook(after)
    if use == "a module hook reads":
        model.layers[0].register_full_backward_pre_hook(lambda *_: model.seen.append(last.detach().clone()))


USES = ("detached", "kept", "a hook writes", "a hook reads", "a module hook reads", "own gradients", "two optimizers")


def made(use: str) -> nn.Module:
    """Return the model of one of `USES`."""
    torch.manual_seed(1)
    return Unusual(use if use == "detached" else "kept").to(torch.bfloat16)


def train(model: nn.Module, use: str) -> list[torch.Tensor]:
    """Train a model of `made` with one of `USES`; returns its weights, and the values that the program has seen."""
    model.seen = []
    hooked(use, model)
    halves = list(model.layers[:2].parameters()), list(model.layers[2:].parameters())
    trained = halves if use == "two optimizers" else [list(model.parameters())]
    optimizers = [memascend.AdamW(parameters, lr=1e-2) for parameters in trained]
    buffers = [torch.zeros(192, 192, dtype=torch.bfloat16) for _ in range(4)]
    for step in range(4):
        if use == "own gradients":
            for parameter, buffer in zip(model.parameters(), buffers, strict=True):
                parameter.grad = buffer
        torch.manual_seed(step)
        model(torch.randn(8, 192, dtype=torch.bfloat16)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for buffer in buffers:
            buffer.zero_()
    return [*dict(memascend.parameters_of(model)).values(), *model.seen]
