"""Programs that reset `Optimizer.state`: parameters begin anew as in memory, and ineffective resets are refused."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_net import Net, assert_same, step
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.core


def _clear(optimizer: Any, model: Net) -> None:
    optimizer.state.clear()


def _replace(optimizer: Any, model: Net) -> None:
    optimizer.state = defaultdict(dict)


def _delete(optimizer: Any, model: Net) -> None:
    del optimizer.state[model.head.weight]
    optimizer.state.pop(model.scale)


def _empty(optimizer: Any, model: Net) -> None:
    optimizer.state[model.head.weight].clear()
    optimizer.state[model.layers[0][0].weight] = {}


def _step_alone(optimizer: Any, model: Net) -> None:
    del optimizer.state[model.head.weight]["step"]


RESETS = [_clear, _replace, _delete, _empty, _step_alone]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda model, **k: memascend.AdamW(model.parameters(), lr=0.05, **k),
    "8bit": lambda model, **k: memascend.AdamW(model.parameters(), lr=0.05, states="8bit", **k),
    "SGD": lambda model, **k: memascend.SGD(model.parameters(), lr=0.05, momentum=0.9, **k),
    "APOLLO": lambda model, **k: memascend.Apollo(memascend.apollo_groups(model, 8), lr=0.05, **k),
}


def _steps(model: Net, optimizer: Any, reset: Callable[[Any, Net], None]) -> None:
    for number in range(3):
        step(model, optimizer, number)
    reset(optimizer, model)
    for number in range(3):
        step(model, optimizer, 3 + number)


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("where", ["a model's store", "its own store"])
def test_parameters_begin_anew_as_in_memory(
    offloaded: Callable[..., nn.Module], tmp_path: Path, kind: str, reset: Callable[[Any, Net], None], where: str
) -> None:
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {}
    if where == "a model's store":
        offloaded(model)
    else:
        options = {"store": tmp_path / "states"}
    optimizer = OPTIMIZERS[kind](model, **options)
    _steps(model, optimizer, reset)
    _steps(twin, OPTIMIZERS[kind](twin), reset)
    assert_same(twin, model)
    if options:
        optimizer.close()


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_run_is_resumed_after_a_reset(offloaded: Callable[..., nn.Module], tmp_path: Path, update: str) -> None:
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    offloaded(model, update=update, durability="step", keep_store=True)
    optimizer, other = (memascend.AdamW(one.parameters(), lr=0.05) for one in (model, twin))
    for one, its in ((model, optimizer), (twin, other)):
        for number in range(3):
            step(one, its, number)
        its.state.clear()
        step(one, its, 3)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", host_memory="256MiB", allocator="pageable", model=Net())
    for number in (4, 5):
        step(resumed.model, resumed.optimizer, number)
        step(twin, other, number)
    assert_same(twin, resumed.model)
    memascend.close(resumed.model)


ASSIGNED: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "read": lambda optimizer, p: optimizer.state[p]["exp_avg"].zero_(),
    "assign": lambda optimizer, p: optimizer.state[p].__setitem__("exp_avg", torch.zeros(p.shape)),
    "update": lambda optimizer, p: optimizer.state[p].update(exp_avg=torch.zeros(p.shape)),
    "default": lambda optimizer, p: optimizer.state[p].setdefault("exp_avg", torch.zeros(p.shape)),
}


@pytest.mark.parametrize("act", ASSIGNED)
def test_states_in_memory_that_would_be_ignored_are_refused(offloaded: Callable[..., nn.Module], act: str) -> None:
    model = offloaded(Net())
    optimizer = memascend.AdamW(model.parameters(), lr=0.05)
    step(model, optimizer)
    with pytest.raises(memascend.MemascendError, match=r"exp_avg of head\.weight is on the store.*load_state_dict"):
        ASSIGNED[act](optimizer, model.head.weight)
    assert optimizer.state[model.head.weight] == {"step": 1}
    step(model, optimizer, 1)


@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_an_entry_of_the_program_is_refused(offloaded: Callable[..., nn.Module], when: str) -> None:
    model = offloaded(Net())
    optimizer = memascend.AdamW(model.parameters(), lr=0.05)
    if when == "later":
        step(model, optimizer)
    weight = model.head.weight
    zeros = torch.zeros(weight.shape)
    optimizer.state[weight] = {"step": torch.tensor(7.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    with pytest.raises(memascend.MemascendError, match=r"state of head\.weight was assigned.*load_state_dict"):
        step(model, optimizer, 1)


def test_a_count_of_steps_is_taken_as_in_memory(offloaded: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    offloaded(model)
    for one in (model, twin):
        optimizer = memascend.AdamW(one.parameters(), lr=0.05)
        step(one, optimizer)
        for parameter in one.parameters():
            optimizer.state[parameter]["step"] = torch.tensor(50.0)
        step(one, optimizer, 1)
    assert_same(twin, model)
