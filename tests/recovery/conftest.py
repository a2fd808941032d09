"""A model and small drives for runs of the command."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over bytes with 0.8M parameters: 12 MB of store."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=128, layers=4, positions=64)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., faults.Mounted]]:
    """Mount small filesystems; they go after the processes that use them."""
    with contextlib.ExitStack() as cleanup:

        def mount(kind: str, size: int | None = None, **options: Any) -> faults.Mounted:
            size = size or faults.LEAST_BYTES.get(kind, 48 * faults.MIB)
            return cleanup.enter_context(faults.mounted(kind, size, tmp_path / f"{kind} drive", **options))

        yield mount
