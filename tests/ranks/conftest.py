"""The reference for launched programs: this process, as one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def as_launched() -> Iterator[None]:
    """Compute with one thread, as launched processes do, and leave nothing of accelerate's state."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
