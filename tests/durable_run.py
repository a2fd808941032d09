"""A training loop that can be begun at any step of a durable run, and how such a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tiny
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAST: dict[str, Any] = {"allocator": "pageable"}
STEPS = 4


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
        return tiny.build(architecture, dtype)
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
        **options: Any,
    ) -> None:
        self.model, self.architecture, self.at = model, architecture, at or (lambda _step, _moment: None)
        self.optimizer = optimizer or make([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses: dict[int, float] = {}
        torch.manual_seed(7)
        if "_memascend" in model.__dict__:
            memascend.track(model, scheduler=self.scheduler)

    def go(self, steps: int, first: int = 0) -> Run:
        for step in range(first, steps):
            for micro in range(2):
                loss = self.model(**tiny.batch(self.architecture, 2 * step + micro)).loss
                self.at(step, f"forward {micro}")
                loss.backward()
                self.losses[2 * step + micro] = loss.item()
                self.at(step, f"backward {micro}")
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.at(step, "step")
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, states and buffers."""
        found = dict(memascend.parameters_of(self.model))
        for key, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{name}": value for name, value in states.items()}
        return found | {f"buffer {name}": value.clone() for name, value in self.model.named_buffers()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def given(architecture: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module | None:
    """The module for `resume`, with other weights, where it needs one."""
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
