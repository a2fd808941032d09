"""A training loop that can be begun at any step of a durable run, and how such a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAST: dict[str, Any] = {"allocator": "pageable"}
STEPS = 4
#: Optimizers' options, by their labels in a test's name.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "8 bits": {"states": "8bit"},
    "bf16 states, no master": {"states": "bfloat16", "master": False},
    "lion": {"make": memascend.Lion},
    "amsgrad": {"amsgrad": True},
}
DURABILITIES = ("step", "every:2", "none")
#: Share of the states that a budget keeps in memory.
KEEPS = ("nothing", "some", "all")
#: Optimizer, durability and resident share. All of them for AdamW; `make soak` runs the other optimizers with all too.
COMBINATIONS = [
    pytest.param(
        *(name, durability, keeps), marks=() if name == "adamw" or (of + at + kept) % 3 == 0 else pytest.mark.soak
    )
    for of, name in enumerate(OPTIMIZERS)
    for at, durability in enumerate(DURABILITIES)
    for kept, keeps in enumerate(KEEPS)
]


class Normed(nn.Module):
    """A model with buffers that a forward pass changes, dropout, frozen parameters and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128)) for _ in range(3))
        self.frozen = nn.Linear(128, 256)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(128, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids.flatten() % 512)
        for layer in self.layers:
            x = nn.functional.dropout(x + layer(x), 0.1)
        x = x + 0.01 * self.frozen(x)[:, :128]
        loss = nn.functional.cross_entropy(self.head(x), labels.flatten() % 512)
        return type("Output", (), {"loss": loss})


def build(architecture: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    if architecture != "normed":
        return tiny_models.build(architecture, dtype)
    torch.manual_seed(0)
    return Normed().to(dtype).train()


class Run:
    """A training loop that can be begun at any step: batches by number, a scheduler, clipping, accumulation."""

    def __init__(
        self,
        model: nn.Module,
        architecture: str,
        optimizer: memascend.AdamW | None = None,
        make: Callable[..., Any] = memascend.AdamW,
        at: Callable[[int, str], None] | None = None,
        *,
        plain: bool = False,
        **options: Any,
    ) -> None:
        self.model, self.architecture, self.at = model, architecture, at or (lambda _step, _moment: None)
        #: One backward pass a step, whose gradients nothing but the step uses.
        self.plain = plain
        self.optimizer = optimizer or make([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses: dict[int, float] = {}
        torch.manual_seed(7)
        if "_memascend" in model.__dict__:
            memascend.track(model, scheduler=self.scheduler)

    def go(self, steps: int, first: int = 0) -> Run:
        for step in range(first, steps):
            for micro in range(1 if self.plain else 2):
                loss = self.model(**tiny_models.batch(self.architecture, 2 * step + micro)).loss
                self.at(step, f"forward {micro}")
                loss.backward()
                self.losses[2 * step + micro] = loss.item()
                self.at(step, f"backward {micro}")
            if not self.plain:
                self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.at(step, "step")
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        """Return the weights, states and buffers."""
        found = dict(memascend.parameters_of(self.model))
        for key, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{name}": value for name, value in states.items()}
        return found | {f"buffer {name}": value.clone() for name, value in self.model.named_buffers()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def moved(model: nn.Module) -> tuple[int, int]:
    """Return the bytes that the drives have read and written once everything under way is there."""
    memascend.flush(model)
    stats = memascend.stats(model)
    return stats["ssd_bytes_read"], stats["ssd_bytes_written"]


def traffic(model: nn.Module, go: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that the drives read and write in the course of `go`."""
    before = moved(model)
    go()
    read, written = (now - then for now, then in zip(moved(model), before, strict=True))
    return read, written


def given(architecture: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module | None:
    """Return the module for `resume`, with other weights, where it needs one."""
    if architecture in ("plain", "normed"):
        model = build(architecture, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
            for buffer in model.buffers():
                buffer.fill_(3)
        return model
    return None


def go_on(
    store: Path, architecture: str, steps: int = STEPS, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[int, Run, dict[str, torch.Tensor]]:
    """Resume and go to the end; returns the step that was durable, the run, and its state."""
    torch.manual_seed(12345)  # whatever the program did before
    resumed = memascend.resume(store, model=given(architecture, dtype), **LEAST | options)
    try:
        run = Run(resumed.model, architecture, resumed.optimizer)
        run.go(steps, resumed.steps)
        return resumed.steps, run, run.state()
    finally:
        memascend.close(resumed.model)
