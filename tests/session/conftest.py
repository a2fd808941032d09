"""Fixtures: a model in memory beside the same one offloaded, and room for stores in memory."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_net import Net

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory in memory, where the system has such: some tests open stores by the thousand."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., tuple[nn.Module, nn.Module]]]:
    """Return a model in memory and the same one offloaded, with one buffer for the blocks; it is closed at the end."""
    opened: list[nn.Module] = []

    def make(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        model = Net() if model is None else model
        offloaded = copy.deepcopy(model)
        options = {"host_memory": "14.9MiB", "keep_store": False} | options
        opened.append(memascend.offload(offloaded, store=tmp_path / "store", **options))
        return model, offloaded

    yield make
    for model in opened:
        memascend.close(model)
