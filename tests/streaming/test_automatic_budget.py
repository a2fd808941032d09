"""A budget that follows the free memory of a machine: the same bits, without a call by the user."""

from __future__ import annotations

import logging
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import processes
import pytest
import tiny_models
import torch
import torch.utils.data
from durable_run import LEAST, Run, build, same

import memascend
from memascend import HostMemoryError
from memascend.hardware.memory_limits import Bound
from memascend.memory_plan.monitor import growth_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn


MIB = 1 << 20
#: Room for a model of these tests with everything in memory, malloc's blocks included; and for little beyond the least.
ALL, LITTLE = 512 * MIB, 20 * MIB


class Machine:
    """The free memory of a machine: `whole` bytes for the offloaded model, and a reserve."""

    def __init__(self) -> None:
        self.whole, self.reserve = 2 * LITTLE, 0
        self.model: nn.Module | None = None

    def bounds(self) -> list[Bound]:
        session = None if self.model is None else memascend.find_offload(self.model)
        held = 0 if session is None or session.runtime.closed else session.plan.total
        return [Bound(self.whole - held, self.reserve, "the test's machine")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()
    # Tests in other processes grow, too.
    monkeypatch.setattr("memascend.memory_plan.monitor._LOCKED", str(tmp_path))
    for module in ("hardware.memory_limits", "memory_plan.monitor"):
        monkeypatch.setattr(f"memascend.{module}.memory_bounds", machine.bounds)
    # Each pass is looked at, however short, and takes nothing that depends on other programs here.
    monkeypatch.setattr("memascend.memory_plan.monitor.LOOK_SHARE", 0)
    monkeypatch.setattr("memascend.hardware.memory_pressure.Growth.bytes", lambda growth: 0)
    monkeypatch.setattr("memascend.hardware.memory_pressure.Stalls.share", lambda stalls: 0.0)
    return machine


@pytest.fixture
def offload(tmp_path: Path, machine: Machine) -> Iterator[Any]:
    opened: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        chosen = {"store": tmp_path / f"store{len(opened)}", "host_memory": "auto", "keep_store": False}
        opened.append(memascend.offload(model, **LEAST | chosen | options))
        machine.model = opened[-1]
        return opened[-1]

    yield offload
    for model in opened:
        memascend.close(model)


def planned(model: nn.Module) -> int:
    return int(memascend.stats(model)["host_bytes_planned"])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5_dropout"])
@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_machine_that_gives_and_takes_changes_no_bit(
    offload: Any, machine: Machine, architecture: str, durability: str, small_tables: None
) -> None:
    chance = random.Random(f"{architecture} {durability} {os.environ.get('MEMASCEND_SEED', '0')}")
    steps = 12
    expected = Run(memascend.fuse_loss(build(architecture)), architecture).go(steps)
    model = offload(build(architecture), durability=durability)
    plan = memascend.offload_of(model).plan
    assert plan.most is not None
    smallest, most = plan.smallest_bytes, plan.most.total
    sizes = set()

    def at(_step: int, _moment: str) -> None:
        # Also between a forward pass and its backward pass, where nothing can follow.
        sizes.add(planned(model))
        if chance.random() < 0.5:
            machine.whole = chance.choice([0, smallest, chance.randint(smallest, most), ALL])

    run = Run(model, architecture, at=at).go(steps)
    assert len(sizes) > 2 and min(sizes) == smallest
    assert run.losses == expected.losses
    same(run.state(), expected.state())
    assert memascend.stats(model)["host_memory_auto"]


def test_it_follows_within_a_step_and_says_so_once(
    offload: Any, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    model = offload(build("llama"))
    most = memascend.offload_of(model).plan.most
    assert most is not None and planned(model) < most.total
    machine.whole = ALL
    run = Run(model, "llama").go(4)
    assert planned(model) == most.total, "all that the model can use"
    caplog.set_level(logging.INFO, logger="memascend")
    caplog.clear()  # A command that ran in this process before may have set the level already.
    machine.whole = LITTLE
    run.go(5, 4)
    assert planned(model) <= LITTLE == memascend.stats(model)["host_bytes_budget"]
    machine.whole = ALL
    run.go(9, 5)
    assert planned(model) == most.total
    size = memascend.format_size
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 2
    assert told[0].startswith(f"host memory {size(most.total)} -> ") and "(the test's machine: 0 B left)" in told[0]
    assert f" -> {size(most.total)} (the test's machine: " in told[1]


def test_below_the_least_it_warns_once(offload: Any, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    model = offload(build("llama"))
    run = Run(model, "llama").go(2)
    machine.whole = MIB
    run.go(6, 2)
    plan = memascend.offload_of(model).plan
    assert plan.total == plan.smallest_bytes
    told = [text for record in caplog.records if "at the least that works" in (text := record.getMessage())]
    assert len(told) == 1 and "lower the batch size" in told[0]


def test_a_pass_without_gradients_is_looked_at_too(offload: Any, machine: Machine) -> None:
    model = offload(build("llama"))
    machine.whole = ALL
    batch = tiny_models.batch("llama", 0)
    with torch.no_grad():
        for _ in range(4):
            model(**batch)
        before = planned(model)
        machine.whole = LITTLE
        model(**batch)
    assert planned(model) <= LITTLE < before


def test_inputs_that_wait_for_a_backward_pass_postpone_it(
    offload: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    model = offload(build("llama"))
    machine.whole = ALL
    with torch.no_grad():
        for _ in range(4):
            model(**tiny_models.batch("llama", 1))
    batch = {name: value.repeat(32, 8) for name, value in tiny_models.batch("llama", 0).items()}
    # The first pass with gradients begins with half of all.
    machine.whole = 2 * ALL
    before = planned(model)
    loss = model(**batch).loss
    machine.whole = 18 * MIB
    with torch.no_grad():
        model(**tiny_models.batch("llama", 1))
    assert planned(model) == before
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    del loss
    model(**tiny_models.batch("llama", 1)).loss.backward()
    assert planned(model) <= 18 * MIB
    expected = memascend.fuse_loss(build("llama"))
    expected(**batch).loss.backward()
    same(ours, {name: parameter.grad for name, parameter in expected.named_parameters()})


def test_memory_that_the_system_refuses_leaves_the_budget_as_it_is(
    offload: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="memascend")
    model = offload(build("llama"))
    run = Run(model, "llama").go(2)
    before, refusals = planned(model), 0
    budget = memascend.offload_of(model).host_budget
    runtime = budget._runtime

    class Refusing:
        """A runtime whose system gives no more memory."""

        @property
        def memory(self) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime.memory if hasattr(runtime.memory, name) else runtime, name)

        def resize(self, units: Any, chunks: int, states: int) -> None:
            nonlocal refusals
            if budget.plan.total > before:
                refusals += 1
                raise HostMemoryError("host memory cannot be locked")
            runtime.memory.resize(units, chunks, states)

    budget._runtime = Refusing()  # type: ignore[assignment]
    machine.whole = ALL
    run.go(10, 2)
    budget._runtime = runtime
    assert refusals == 1 and planned(model) == before
    told = [record.getMessage() for record in caplog.records if "cannot be locked" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("host memory stays at ")
    same(run.state(), Run(memascend.fuse_loss(build("llama")), "llama").go(10).state())


def test_one_process_at_a_time_grows(offload: Any, machine: Machine) -> None:
    model = offload(build("llama"))
    run = Run(model, "llama").go(2)
    before, machine.whole = planned(model), ALL
    with growth_lock() as alone:
        assert alone
        with growth_lock() as second:
            assert not second
        run.go(10, 2)
        assert planned(model) == before
        machine.whole = 18 * MIB
        run.go(11, 10)
        assert planned(model) <= 18 * MIB, "giving back waits for no other"
    machine.whole = ALL
    run.go(30, 11)
    assert planned(model) > before


def test_a_size_ends_it_and_auto_begins_it(offload: Any, machine: Machine) -> None:
    model = offload(build("llama"))
    machine.whole = ALL
    run = Run(model, "llama").go(4)
    memascend.set_host_memory(model, LITTLE)
    assert not memascend.stats(model)["host_memory_auto"]
    fixed = planned(model)
    run.go(8, 4)
    assert planned(model) == fixed
    memascend.set_host_memory(model, "auto")
    run.go(14, 8)
    assert planned(model) > fixed
    unchanging = offload(build("llama"), host_memory="64MiB")
    with pytest.raises(memascend.MemascendError, match="fixed budget: give host_memory_max"):
        memascend.set_host_memory(unchanging, "auto")


def test_resumed_and_restored_runs_follow_too(offload: Any, machine: Machine, tmp_path: Path) -> None:
    expected = Run(memascend.fuse_loss(build("llama")), "llama").go(8)
    model = offload(build("llama"), keep_store=True, store=tmp_path / "kept", durability="step")
    run = Run(model, "llama").go(2)
    memascend.save_checkpoint(model, "two")
    run.go(3, 2)
    restored = memascend.restore_checkpoint(model, "two")
    assert memascend.stats(model)["host_memory_auto"]
    Run(model, "llama", restored.optimizer).go(4, 2)
    memascend.close(model)
    machine.whole = 2 * LITTLE
    resumed = memascend.resume(tmp_path / "kept", host_memory="auto", keep_store=False, **LEAST)
    machine.model = resumed.model
    try:
        run = Run(resumed.model, "llama", resumed.optimizer).go(5, 4)
        before, machine.whole = planned(resumed.model), ALL
        run.go(8, 5)
        assert planned(resumed.model) > before
        same(run.state(), expected.state())
    finally:
        memascend.close(resumed.model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell has begun the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_change_is_complete_before_an_interrupt(offload: Any, machine: Machine) -> None:
    model = offload(build("llama"), durability="none")
    machine.whole = ALL
    run = Run(model, "llama").go(4)
    host_budget = memascend.offload_of(model).host_budget
    resize, machine.whole = host_budget._resize, LITTLE

    def interrupted(plan: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        resize(plan)

    host_budget._resize = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.go(5, 4)
    del host_budget._resize
    assert planned(model) <= LITTLE == memascend.stats(model)["host_bytes_budget"]
    same(run.go(6, 4).state(), Run(memascend.fuse_loss(build("llama")), "llama").go(6).state())


def test_workers_of_a_data_loader_leave_it_alone(offload: Any, machine: Machine) -> None:
    model = offload(build("llama"))
    run, machine.whole = Run(model, "llama").go(1), ALL
    before = planned(model)
    for index, _ in enumerate(torch.utils.data.DataLoader(list(range(4)), num_workers=2)):
        run.go(index + 2, index + 1)
    assert planned(model) > before


def test_its_thread_ends_with_the_model(offload: Any) -> None:
    model = offload(build("llama"))
    watch = memascend.offload_of(model).host_budget._watch
    assert watch is not None and not watch._growth.ended(0)
    memascend.close(model)
    assert watch._growth.ended(10) and processes.native_threads_end()
