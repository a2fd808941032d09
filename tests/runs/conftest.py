"""A model and small drives for runs of the command."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab
import pytest
import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over bytes with 0.8M parameters: 12 MB of store."""
    return tiny.llama_directory(tmp_path_factory.mktemp("model"), hidden=128, layers=4, positions=64)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., lab.Mounted]]:
    """Mount small filesystems; they go after the processes that use them."""
    with contextlib.ExitStack() as cleanup:

        def mount(kind: str, size: int | None = None, **options: Any) -> lab.Mounted:
            size = size or lab.LEAST_BYTES.get(kind, 48 * lab.MIB)
            return cleanup.enter_context(lab.mounted(kind, size, tmp_path / f"{kind} drive", **options))

        yield mount
