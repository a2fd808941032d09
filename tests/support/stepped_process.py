"""A model in a process of its own, which runs commands a step at a time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import tiny_models
import torch

import memascend

if TYPE_CHECKING:
    from torch import nn


def step(model: nn.Module, optimizer: memascend.AdamW, number: int) -> None:
    model(**tiny_models.batch("llama", number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def expected_weights(steps: int) -> dict[str, torch.Tensor]:
    model = tiny_models.build("llama")
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        step(model, optimizer, number)
    return dict(memascend.parameters_of(model))


def weights_equal(model: nn.Module, steps: int) -> bool:
    expected = expected_weights(steps)
    actual = dict(memascend.parameters_of(model))
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def by_steps(pipe: Any, store: Path, engine: str = "auto", host_memory: str | None = None) -> None:
    """Execute the commands of the pipe on an offloaded model, and answer (errno or None, message) of each."""
    # A processor that does not compute in bfloat16 has a warning of its own, which `ends` does not look for.
    logging.getLogger("memascend").setLevel(logging.ERROR)
    model = tiny_models.build("llama")
    options = {"engine": engine, "allocator": "pageable"}
    state: dict[str, Any] = {"step": 0}

    def offload() -> None:
        budget = host_memory or tiny_models.smallest_budget(model)
        memascend.offload(model, store=store, host_memory=budget, **options)

    def optimizer() -> None:
        state["optimizer"] = memascend.AdamW(model.parameters(), lr=1e-2)

    def forward(rows: int = 2) -> None:
        columns = 16 if rows == 2 else 64
        state["loss"] = model(**tiny_models.batch("llama", state["step"], rows=rows, columns=columns)).loss

    def backward() -> None:
        state["loss"].backward()

    def step() -> None:
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    def update() -> None:
        step()
        state["optimizer"].flush()
        state["step"] += 1

    def forget() -> None:
        state["loss"] = None
        model.zero_grad()

    def a_step(rows: int = 2) -> None:
        forward(rows)
        backward()
        update()

    def weights(steps: int) -> None:
        assert weights_equal(model, steps)

    def close() -> None:
        memascend.close(model)

    known = locals()
    for name, *words in iter(pipe.recv, None):
        try:
            known[name](*words)
            pipe.send((None, ""))
        except memascend.StoreError as error:
            pipe.send((error.errno or 0, str(error)))
        except memascend.MemascendError as error:
            pipe.send((0, f"{type(error).__name__}: {error}"))


#: Rows of a batch whose layers' inputs are too large for the staging buffers.
LARGE = 16


class Stepper(faults.Child):
    """A process that runs `by_steps`."""

    def does(self, *asked: Any) -> tuple[int | None, str]:
        self.pipe.send(asked)
        return self.receive()

    def must(self, *asked: Any) -> None:
        assert self.does(*asked) == (None, "")

    def ends(self) -> None:
        """Close the model and end the process, in peace."""
        self.must("close")
        self.pipe.send(None)
        ended = self.wait()
        assert ended.code == 0, ended.err
        assert ended.err == "", ended.err
