"""The simulated CUDA runtime, compiled once for each file of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_cuda
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.build(tmp_path_factory.mktemp("cudart"), "FAKE_DEVICES=2")
