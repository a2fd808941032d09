"""What a run has saved stays: closing, refused resumes, states too large and copies of volumes take nothing away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from durable_run import LEAST, same
from torch import nn

import memascend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("products_in_float32")


class Small(nn.Module):
    """A model of two layers that is quick on every processor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def go(model: nn.Module, optimizer: Any, steps: range) -> dict[str, torch.Tensor]:
    """Take steps by number, and return the weights after them."""
    for number in steps:
        model(torch.full((4, 256), 0.1 * (number + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in memascend.parameters_of(model)}


def in_memory(steps: int) -> dict[str, torch.Tensor]:
    """The weights after `steps` steps in memory."""
    model = small()
    return go(model, memascend.AdamW(model.parameters(), lr=1e-2), range(steps))


def begun(store: Any) -> None:
    """Leave a run in `store` after three steps, with a checkpoint "two" of the first two."""
    model = memascend.offload(small(), store=store, host_memory="64MiB", keep_store=True, **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    go(model, optimizer, range(2, 3))
    memascend.close(model)


# ---- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("keep_store", [None, True, False])
def test_updates_in_place_leave_checkpoints(tmp_path: Path, keep_store: bool | None, failing: bool) -> None:
    begun(tmp_path / "s")
    resumed = memascend.resume(tmp_path / "s", model=small(), durability="none", keep_store=keep_store, **LEAST)
    go(resumed.model, resumed.optimizer, range(3, 4))
    memascend.flush(resumed.model)  # The third step is overwritten, and no generation is left but the checkpoint.
    assert memascend.stats(resumed.model)["generation"] == 0
    if failing:
        with pytest.raises(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            finally:
                memascend.close(resumed.model)
    else:
        memascend.close(resumed.model)
    if keep_store is False:
        assert not (tmp_path / "s" / "memascend.json").exists()
        return
    resumed = memascend.resume(tmp_path / "s", model=small(), tag="two", **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 4)), in_memory(4))
    memascend.close(resumed.model)


def test_a_store_that_stays_for_its_checkpoints_has_the_last_step(tmp_path: Path) -> None:
    model = memascend.offload(small(), store=tmp_path / "s", host_memory="64MiB", **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    model(torch.full((4, 256), 0.3)).backward()
    optimizer.step()
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "s", model=small(), **LEAST)
    assert resumed.steps == 3
    same(dict(memascend.parameters_of(resumed.model)), in_memory(3))
    memascend.close(resumed.model)


# ---- parameters without elements --------------------------------------------------------------------------------


class Hollow(Small):
    """A model with parameters that have no elements, as an adapter of rank 0 leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.hollow = nn.Parameter(torch.empty(0, 256))
        self.idle = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.hollow.sum()


def test_parameters_without_elements_do_not_keep_a_run_from_being_durable(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Hollow()
    reference = memascend.AdamW(model.parameters(), lr=1e-2)
    expected = go(model, reference, range(4))
    torch.manual_seed(0)
    model = memascend.offload(Hollow(), store=tmp_path / "s", host_memory="64MiB", durability="step", **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, range(2))
    memascend.save_checkpoint(model, "two")
    assert memascend.stats(model)["notices"] == []
    memascend.offload_of(model).close(failed=True)
    resumed = memascend.resume(tmp_path / "s", model=Hollow(), **LEAST)
    assert resumed.steps == 2
    same(go(resumed.model, resumed.optimizer, range(2, 4)), expected)
    states = resumed.optimizer.state_dict()
    assert states["param_groups"] == reference.state_dict()["param_groups"]
    for number, state in reference.state_dict()["state"].items():
        same(states["state"][number], state)
    memascend.close(resumed.model)
