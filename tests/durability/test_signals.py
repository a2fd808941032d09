"""Exceptions of signals' handlers anywhere in a step: each commit is a whole step, with the bits of memory."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from durable_run import LEAST, same
from test_whole_steps import Data, Net, build

import memascend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

PACKAGE = str(Path(memascend.__file__).parent)
#: Steps that are whole when the signal comes in the next one, and the last one.
WHOLE, LAST = 2, 5
#: How many lines of a step a case tries, drawn from all that the step runs.
LINES = 4


class Alarm(Exception):
    """An exception of a signal's handler, as pytest-timeout and scripts of batch systems raise."""


@pytest.fixture
def raising() -> Iterator[None]:
    """A handler that raises."""

    def handle(number: int, _: FrameType | None) -> None:
        raise Alarm(number)

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    assert signal.signal(signal.SIGUSR1, before) is handle, "the handlers were put back"


class SignalAt:
    """Sends the signal before line number `at`, counted over all that this thread runs of the package; 0 for none."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __enter__(self) -> SignalAt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, *_: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        if event == "line" and self.lines == self.at:
            self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGUSR1)
        return self._line


def step(model: Net, optimizer: memascend.AdamW, data: Data) -> None:
    model(data.next()).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def state(model: Net, optimizer: memascend.AdamW, data: Data) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in memascend.parameters_of(model)}
    for key, states in optimizer.state_dict()["state"].items():
        found |= {f"{key}.{name}": torch.as_tensor(value) for name, value in states.items()}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return found | {"position": torch.tensor(data.position), "random": torch.get_rng_state()}


def begin(model: Net, optimizer: memascend.AdamW | None = None) -> tuple[Net, memascend.AdamW, Data]:
    run = model, optimizer or memascend.AdamW(model.parameters(), lr=1e-2), Data()
    torch.manual_seed(7)
    if "_memascend" in model.__dict__:
        memascend.track(model, data=run[2])
    return run


def offload(store: Path, **options: Any) -> Net:
    return memascend.offload(build(), store=store, **{"host_memory": "64MiB", "keep_store": True} | options, **LEAST)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    run = begin(build())
    for _ in range(LAST):
        step(*run)
    return state(*run)


def lines_of_a_step(store: Path, **options: Any) -> int:
    run = begin(offload(store, **options))
    for _ in range(WHOLE):
        step(*run)
    with SignalAt() as trace:
        step(*run)
    memascend.close(run[0])
    return trace.lines


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 25))])
@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize("failed", [True, False])
def test_a_handler_that_raises_in_a_step(
    tmp_path: Path, raising: None, expected: dict[str, torch.Tensor], failed: bool, update: str, seed: int
) -> None:
    options = {"update": update}
    lines = lines_of_a_step(tmp_path / "counted", **options)
    draw = random.Random(f"{failed} {update} {seed}")
    for at in sorted(draw.sample(range(1, lines), LINES)):
        run = begin(offload(tmp_path / f"{at}", **options))
        for _ in range(WHOLE):
            step(*run)
        with pytest.raises(Alarm), SignalAt(at) as trace:
            step(*run)
        memascend.offload_of(run[0]).close(failed=failed)
        resumed = memascend.resume(tmp_path / f"{at}", model=build(), **LEAST)
        # After an error nothing is committed: the step before may be the last durable one.
        assert WHOLE - failed <= resumed.steps <= WHOLE + 1, trace.where
        goes_on = begin(resumed.model, resumed.optimizer)
        for _ in range(resumed.steps, LAST):
            step(*goes_on)
        try:
            same(state(*goes_on), expected)
        except AssertionError as error:
            raise AssertionError(f"after a signal at line {at}, {trace.where}") from error
        memascend.close(resumed.model)
