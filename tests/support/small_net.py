"""A small net of several kinds of parameters, how it trains, and programs that write to its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, TOKENS = 160, 64


class Net(nn.Module):
    """An embedding, blocks, a parameter of one element and a head; every block is a unit of its own."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, max_norm=max_norm)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)  # (sequences, length, width)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden) * self.scale


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(0, TOKENS, (4, 9), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    loss = loss_of(model, seed)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def values_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return all parameters, gradients and buffers, read as a program reads them."""
    return {
        **{name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        **{f"gradient of {name}": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def assert_same(in_memory: nn.Module, offloaded: nn.Module) -> None:
    """Compare all parameters, gradients and buffers, bit for bit."""
    found = bit_equality.difference(values_of(offloaded), values_of(in_memory))
    assert found is None, found


#: Programs that write to parameters.
WRITING: dict[str, Callable[[Net, Any], Any]] = {}


def writing(program: Callable[[Net, Any], Any]) -> Callable[[Net, Any], Any]:
    """List a program that writes to parameters."""
    WRITING[program.__name__] = program
    return program


@writing
def multiply_data(model: Net, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


@writing
def write_through_views(model: Net, _: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] = 7
    row = model.head.weight.data[3]
    row.zero_()
    return row.clone()


@writing
def initialise(model: Net, _: Any) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    nn.init.normal_(model.embed.weight)


@writing
def load_a_part(model: Net, _: Any) -> Any:
    state = model.layers.state_dict()
    values = [tensor.clone() for tensor in state.values()]
    model.layers.load_state_dict({name: tensor * 0.5 for name, tensor in state.items()})
    return values
