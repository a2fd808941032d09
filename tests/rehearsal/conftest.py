"""Fixtures of the stand-in device (`make rehearse`): a model offloaded to a device, and closed after the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from rehearsed_runs import BUDGETS

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn


@pytest.fixture
def on_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Module]]:
    """Offload a model with the device as the place where it computes; each call has a store of its own."""
    # Inputs of every layer are kept, however small.
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    models: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        store = {"store": tmp_path / f"store{len(models)}"}
        models.append(memascend.offload(model, **store | BUDGETS | options))
        return models[-1]

    yield offload
    for model in models:
        memascend.close(model)
    torch.cuda.synchronize()
