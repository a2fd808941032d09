"""DeepSpeed in this process, for the tests of its operators and of installing."""

from __future__ import annotations

import types
import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[types.ModuleType]:
    """DeepSpeed in this process, on its processor, with memascend behind it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.delenv("MEMASCEND_DEEPSPEED_TIERS", raising=False)
        import deepspeed
        from deepspeed.runtime.zero import stage3  # noqa: F401

        import memascend.deepspeed

        memascend.deepspeed.install()  # the import does it once in a process
        yield deepspeed
        memascend.deepspeed.uninstall()


@pytest.fixture
def handle(deepspeed: types.ModuleType) -> Any:
    from memascend.integrations.deepspeed.files import AioHandle

    return AioHandle()
