"""Nothing is committed that is not a step: a run that is stopped anywhere goes on with the bits of memory."""

from __future__ import annotations

import gc
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import forked
import pytest
import torch
from durable_run import LEAST, same
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, LAST = 128, 7
#: Steps that are whole when the run is stopped in the next one.
WHOLE = 3
MOMENTS = ("data", "forward", "after forward", "second forward", "after backward", "options", "skipped")


class Net(nn.Module):
    """Batch normalisation, dropout, and a counter that the program sets after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps_seen", torch.zeros(()))
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1)
        x = self.norm(x)
        if self.stops:
            raise KeyboardInterrupt
        return self.head(x).square().mean()


def build() -> Net:
    torch.manual_seed(0)
    return Net().train()


class Data:
    """Batches by number; each draws random numbers."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.rand(8, WIDTH) + self.position / 100

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Seen(Data):
    """A counter of the program: an object of its own that belongs to each step."""


class Program:
    """A training loop of two batches a step, which can be stopped within one."""

    def __init__(self, model: Net, optimizer: memascend.AdamW | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or memascend.AdamW(model.parameters(), lr=1e-2, nonfinite="skip")
        self.data, self.seen = Data(), Seen()
        torch.manual_seed(7)
        if "_memascend" in model.__dict__:
            memascend.track(model, data=self.data, seen=self.seen)

    def stop_at(self, moment: str, now: str, last: bool) -> None:
        if last and moment == now:
            raise KeyboardInterrupt

    def step(self, stop: str = "") -> None:
        for micro in range(2):
            last = micro == 1 if stop in ("second forward", "after backward") else True
            batch = self.data.next()
            self.stop_at("data", stop, last)
            self.model.stops = last and stop in ("forward", "second forward")
            loss = self.model(batch)
            self.seen.position += 10
            self.stop_at("after forward", stop, last)
            (loss * float("nan") if stop == "skipped" else loss).backward()
            self.stop_at("after backward", stop, last)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.stop_at("options", stop, True)
        self.optimizer.step()
        self.stop_at("skipped", stop, True)
        self.optimizer.zero_grad()
        self.model.steps_seen += 1
        self.seen.position += 1

    def go(self, first: int, last: int = LAST) -> Program:
        for _ in range(first, last):
            self.step()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: value.detach().clone() for name, value in memascend.parameters_of(self.model)}
        for key, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{name}": torch.as_tensor(value) for name, value in states.items()}
        found |= {f"buffer {name}": value.clone() for name, value in self.model.named_buffers()}
        counts = [self.data.position, self.seen.position, self.optimizer.param_groups[0]["lr"]]
        return found | {"counts": torch.tensor(counts), "random": torch.get_rng_state()}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return Program(build()).go(0).state()


def goes_on(store: Path, expected: dict[str, torch.Tensor], whole: int = WHOLE) -> None:
    resumed = memascend.resume(store, model=build(), **LEAST)
    assert resumed.steps == whole
    same(Program(resumed.model, resumed.optimizer).go(whole).state(), expected)
    memascend.close(resumed.model)


def closed(program: Program) -> None:
    memascend.close(program.model)


def dropped(program: Program) -> None:
    program.__dict__.clear()
    gc.collect()


def flushed(program: Program) -> None:
    memascend.flush(program.model)
    closed(program)


def kept(program: Program) -> None:
    if memascend.offload_of(program.model).commit_log.period == 0:
        closed(program)
        return
    memascend.save_checkpoint(program.model, "half")
    memascend.offload_of(program.model).close(failed=True)


@pytest.mark.parametrize(
    ("moment", "durability", "end"),
    [
        pytest.param(
            moment, durability, end, marks=() if end is closed or moment == "after backward" else pytest.mark.soak
        )
        for moment in MOMENTS
        for durability in ("step", "every:2", "none")
        for end in (closed, dropped, flushed, kept)
    ],
)
def test_a_run_that_is_stopped_within_a_step(
    tmp_path: Path,
    expected: dict[str, torch.Tensor],
    moment: str,
    durability: str,
    end: Callable[[Program], None],
) -> None:
    model = memascend.offload(
        build(), store=tmp_path / "s", host_memory="64MiB", durability=durability, keep_store=True, **LEAST
    )
    program = Program(model).go(0, WHOLE)
    with suppress(KeyboardInterrupt):
        program.step(stop=moment)
    del model
    end(program)
    goes_on(tmp_path / "s", expected)


@pytest.mark.parametrize("whole", [0, WHOLE])
@pytest.mark.parametrize("moment", ["after forward", "skipped"])
def test_a_run_that_is_stopped_in_its_first_step_or_the_first_after_it_was_resumed(
    tmp_path: Path, expected: dict[str, torch.Tensor], moment: str, whole: int
) -> None:
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    program = Program(model).go(0, whole)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            program.step(stop=moment)
        memascend.close(program.model)
        if whole == 0:
            break
        resumed = memascend.resume(tmp_path / "s", model=build(), keep_store=True, **LEAST)
        program = Program(resumed.model, resumed.optimizer)
    else:
        memascend.close(program.model)
    if whole:
        goes_on(tmp_path / "s", expected)
        return
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    assert resumed.steps == 0
    same(dict(resumed.model.named_buffers()), dict(build().named_buffers()))
    memascend.track(resumed.model, data=(data := Data()))
    assert data.position == 0, "no batch was trained on"
    memascend.close(resumed.model)


def test_a_program_that_catches_the_interrupt_and_exits(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    code = f"""
        import sys, memascend
        from test_whole_steps import LEAST, WHOLE, Program, build
        options = dict(store={str(tmp_path / "s")!r}, host_memory="64MiB", keep_store=True)
        program = Program(memascend.offload(build(), **options, **LEAST)).go(0, WHOLE)
        try:
            program.step(stop="after backward")
        except KeyboardInterrupt:
            sys.exit()
    """
    forked.run(["-P", "-c", textwrap.dedent(code)], timeout=120)
    goes_on(tmp_path / "s", expected)


def test_a_loop_over_parts_that_is_stopped(tmp_path: Path) -> None:
    """No pass of the whole model begins: each part that runs may be the first after a step."""

    def go(model: Net, optimizer: memascend.AdamW, first: int, last: int, stop: bool = False) -> None:
        for number in range(first, last):
            x = torch.full((8, WIDTH), 0.1 * (number + 1)) + torch.arange(8).view(8, 1)
            model.norm(model.layers[0](x)).square().sum().backward()
            if stop:
                return
            optimizer.step()
            optimizer.zero_grad()

    expected = build()
    go(expected, memascend.AdamW(expected.parameters(), lr=1e-2), 0, 5)
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    go(model, optimizer, 0, 3)
    go(model, optimizer, 3, 4, stop=True)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    assert resumed.steps == 3
    go(resumed.model, resumed.optimizer, 3, 5)
    same(dict(memascend.parameters_of(resumed.model)), dict(expected.named_parameters()))
    same(dict(resumed.model.named_buffers()), dict(expected.named_buffers()))
    memascend.close(resumed.model)


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_run_that_is_stopped_between_the_steps_of_two_optimizers(tmp_path: Path, is_caught: bool) -> None:
    """Each optimizer has a step of its own: a program that catches the interrupt has, as in memory, the first alone."""

    def go(model: Net, both: list[memascend.AdamW], first: int, last: int, stops: bool = False) -> None:
        for number in range(first, last):
            torch.manual_seed(number)
            model(torch.rand(8, WIDTH)).backward()
            for optimizer in both:
                optimizer.step()
                if stops:
                    raise KeyboardInterrupt
                optimizer.zero_grad()

    def optimizers(model: Net) -> list[memascend.AdamW]:
        return [memascend.AdamW(part.parameters(), lr=1e-2) for part in (model.layers, model.head)]

    reference = build()
    of_reference = optimizers(reference)
    go(reference, of_reference, 0, WHOLE)
    if is_caught:
        with suppress(KeyboardInterrupt):
            go(reference, of_reference, WHOLE, WHOLE + 1, stops=True)
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    both = optimizers(model)
    go(model, both, 0, WHOLE)
    with suppress(KeyboardInterrupt):
        try:
            go(model, both, WHOLE, WHOLE + 1, stops=True)
        except KeyboardInterrupt:
            if not is_caught:
                memascend.close(model)
                raise
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    assert resumed.steps == WHOLE + is_caught
    same(dict(memascend.parameters_of(resumed.model)), dict(reference.named_parameters()))
    same(dict(resumed.model.named_buffers()), dict(reference.named_buffers()))
    memascend.close(resumed.model)


# ---- weights that the program writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["step", "none"])
def test_weights_that_were_changed_for_a_part_of_a_step_are_not_committed(
    tmp_path: Path, expected: dict[str, torch.Tensor], durability: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Sharpness-aware minimisation climbs between two passes of a step, and goes back before it."""
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    program = Program(model).go(0, WHOLE)
    memascend.save_checkpoint(model, "whole")
    if durability == "none":
        memascend.close(model)
        options = {"durability": "none", "keep_store": True}
        resumed = memascend.resume(tmp_path / "s", model=build(), **options, **LEAST)
        model, program = resumed.model, Program(resumed.model, resumed.optimizer).go(WHOLE, WHOLE + 1)
        memascend.flush(model)
    with suppress(KeyboardInterrupt):
        program.step(stop="after backward")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    memascend.close(model)
    # Resident values leave the generation before whole, even where updates are in place.
    assert "in the state of no step: the store keeps step 3" in caplog.text
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    assert resumed.steps == WHOLE
    same(Program(resumed.model, resumed.optimizer).go(WHOLE).state(), expected)
    memascend.close(resumed.model)


@pytest.mark.parametrize("flushes", [False, True])
def test_weights_that_the_program_leaves_are_committed(tmp_path: Path, flushes: bool) -> None:
    """Written after a step, or asked for by `flush`, the weights are intended, and the buffers with them."""
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    program = Program(model).go(0, WHOLE)
    if flushes:
        with suppress(KeyboardInterrupt):
            program.step(stop="after forward")
    best = {name: torch.full_like(value, 2) for name, value in build().state_dict().items()}
    model.load_state_dict(best)
    if flushes:
        memascend.flush(model)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    found = dict(memascend.parameters_of(resumed.model)) | dict(resumed.model.named_buffers())
    same(found, best)
    memascend.close(resumed.model)


def test_buffers_of_a_pass_without_a_step_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = memascend.offload(build(), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    Program(model).go(0, WHOLE)
    with torch.no_grad():
        model(torch.ones(8, WIDTH))  # Without gradients, the program's writes to buffers are intended.
    memascend.flush(model)
    assert "no optimizer step has followed" not in caplog.text
    wanted = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.ones(8, WIDTH))
    memascend.close(model)
    assert "no optimizer step has followed" in caplog.text
    resumed = memascend.resume(tmp_path / "s", model=build(), **LEAST)
    same(dict(resumed.model.named_buffers()), wanted)
    memascend.close(resumed.model)
