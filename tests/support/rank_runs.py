"""The models that ranks train, and one rank's part of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
import torch.distributed as dist
from rank_models import Matrices
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, TOKENS, EXPERTS = 256, 1024, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 300)  # more than a block, and not a whole number of them
        self.down = nn.Linear(300, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """A layer of experts; a batch uses one of them, which depends on its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.gain * self.experts[expert](torch.relu(self.mix(self.norm(x))))


class Mixture(nn.Module):
    """Tied embeddings, layers of experts, a frozen layer."""

    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.opaque = opaque
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, int(tokens[0, number]) % EXPERTS)
        logits = self.head(self.norm(x + self.frozen(x)))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flip(1).flatten())
        return Opaque(loss) if self.opaque else {"loss": loss}


class Opaque:
    """An output in which PyTorch finds no tensors."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def __getitem__(self, _: str) -> torch.Tensor:
        return self.loss


class Shared(nn.Module):
    """A layer that is used twice, within two backward passes that lie in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.sum()


def build(dtype: str = "float32", seed: int = 0, opaque: bool = False, kind: str = "mixture") -> nn.Module:
    """Return a model.

    A `Mixture`, `Matrices`, or one of transformers: "t5", or "lora", a Llama in float32 with PEFT's adapters.
    """
    if kind not in ("mixture", "matrices"):
        return _adapted(seed) if kind == "lora" else tiny_models.build(kind, getattr(torch, dtype), seed)
    torch.manual_seed(seed)
    return (Mixture(opaque) if kind == "mixture" else Matrices()).to(getattr(torch, dtype)).train()


def _adapted(seed: int) -> nn.Module:
    peft = requirements.package("peft")
    # With this rank adapters have two blocks each, but for one of the values, which has one.
    config = peft.LoraConfig(r=300, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_models.build("llama", torch.float32, seed), config)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, TOKENS, (2, 8), generator=torch.Generator().manual_seed(100 + number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Return the loss of batch `number`."""
    config: Any = getattr(model, "config", None)
    return (model(batch(number)) if config is None else model(**tiny_models.batch(config.model_type, number)))["loss"]


OPTIONS: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable", "fused_loss": False}


def _optimizer(
    model: nn.Module, algorithm: str = "AdamW", projection: dict[str, Any] | None = None, **options: Any
) -> memascend.OffloadedOptimizer:
    """Return an optimizer of all trained parameters. `projection` has the options of APOLLO's matrices alone."""
    if algorithm.startswith("Apollo"):
        parameters: Any = memascend.apollo_groups(model, **projection or {})
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return getattr(memascend, algorithm)(parameters, lr=1e-2, **options)


class Run:
    """A training loop in which each step has `parts` batches, and this process takes the ones in `mine`.

    It takes the mean of those in the loss, or in the update.
    """

    def __init__(self, model: nn.Module, parts: int, mine: range, **options: Any) -> None:
        self.model, self.parts, self.mine = model, parts, mine
        self.scaled, self.max_norm = options.pop("scaled", False), options.pop("max_norm", 1.0)
        self.divides_in_update = options.pop("divides_in_update", False)
        self.optimizer = options.pop("optimizer", None) or _optimizer(model, **options)
        # Ranks divide by their number in the update and not in the loss: each gradient is the same with this.
        self.scaler = memascend.GradScaler(init_scale=64.0 * len(mine), enabled=self.scaled)
        self.losses: dict[int, float] = {}
        self.norms: list[float] = []

    def go(self, steps: int, first: int = 0) -> Run:
        for step in range(first, steps):
            for part in self.mine:
                number = step * self.parts + part
                loss = loss_of(self.model, number)
                # Ranks take the mean of their values.
                self.scaler.scale(loss if self.divides_in_update else loss / len(self.mine)).backward()
                self.losses[number] = loss.item()
            self.scaler.unscale_(self.optimizer)
            if self.divides_in_update:
                self.optimizer.unscale_in_step(1.0 / len(self.mine))
            if self.max_norm is not None:
                self.norms.append(self.optimizer.clip_grad_norm_(self.max_norm).item())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "weights": dict(memascend.parameters_of(self.model)),
        }


def offload(model: nn.Module, folder: Path, *, least: bool | str = False, **options: Any) -> nn.Module:
    """Offload with the budget of `OPTIONS`, or the least one; with `least="first"` the first rank has the least."""
    folder.mkdir(exist_ok=True)
    options = {"store": f"{folder}/store{{rank}}"} | OPTIONS | options
    if options.get("device_memory") in ("least", "least on the first"):
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.offload(model, **options | {"device_memory": 1})
        some = options["device_memory"] == "least" or dist.get_rank() == 0
        options["device_memory"] = too_small.value.smallest_bytes if some else "1GiB"
    if least:
        with pytest.raises(memascend.BudgetError) as too_small:
            memascend.offload(model, **options | {"host_memory": 1})
        if least != "first" or dist.get_rank() == 0:
            options["host_memory"] = too_small.value.smallest_bytes
    return memascend.offload(model, **options)
