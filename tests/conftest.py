"""Fixtures: offloaded models that are closed after the test, and what a host must offer for some tests."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

AMPLE = "256MiB"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def offloaded(store: Path) -> Iterator[Callable[..., nn.Module]]:
    """Offload a model, in pageable memory (limits on locking differ between hosts) and an ample budget by default."""
    models: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        models.append(model)
        return memascend.offload(model, **{"store": store, "host_memory": AMPLE, "allocator": "pageable"} | options)

    yield offload
    for model in models:
        memascend.close(model)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs root or a GPU where there is none, unless it was said to be required."""
    if item.get_closest_marker("root") and os.geteuid() != 0 and not os.environ.get("MEMASCEND_REQUIRE_ROOT"):
        pytest.skip("needs root")
    if item.get_closest_marker("gpu") and not _has_gpu():
        if os.environ.get("MEMASCEND_REQUIRE_GPU"):
            pytest.fail("needs a GPU, and MEMASCEND_REQUIRE_GPU is set", pytrace=False)
        pytest.skip("needs a GPU")


@cache
def _has_gpu() -> bool:
    with warnings.catch_warnings():
        # A driver too old for torch is told as a warning, and means that there is none to use.
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()
