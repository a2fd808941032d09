"""A budget of device memory that changes during a run: the same bits, and the memory follows."""

from __future__ import annotations

import gc
import os
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import Run, build, same
from simulated_device import Accesses, SimulatedDevice, captured, inputs_aside

import memascend
from memascend import BudgetError, DeviceError, MemascendError
from memascend.autograd import recompute
from memascend.hardware import cuda
from memascend.hardware.cuda import ComputeDevice
from memascend.layout.units import partition
from memascend.memory_plan.device import make_device_plan
from memascend.report.figures import opening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import fake_cuda
    from torch import nn


#: How often the budgets change in the longest test.
CHANGES = int(os.environ.get("MEMASCEND_CHANGES", "24"))
MIB = 1 << 20
HOST_MOST = 192 * MIB
MOST = 256 * MIB


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


def in_force(model: nn.Module, device: SimulatedDevice) -> tuple[Any, ...]:
    """Return all that a budget of device memory decides."""
    session = memascend.offload_of(model)
    stats = memascend.stats(model)
    return (
        memascend.plan_of(model),
        stats["device_bytes_budget"],
        stats["device_bytes_planned"],
        captured(model).leaving.most_bytes,
        session.options.device_memory,
        device.limited,
        device.taken,
    )


def check_in_force(model: nn.Module, device: SimulatedDevice, budget: int) -> None:
    session = memascend.offload_of(model)
    activations = session.inputs.policy
    plan = make_device_plan(session.units, budget, config=model.config, activations=activations)
    assert in_force(model, device) == (
        memascend.plan_of(model),
        budget,
        plan.total,
        plan.in_flight_bytes,
        budget,
        budget,
        plan.weights_bytes,
    )
    assert plan.table() in memascend.plan_of(model)


def h2d_bytes(model: nn.Module) -> int:
    return memascend.stats(model)["device"]["h2d_bytes"]


# ---- changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "activations", "lateness"),
    [("llama", "recompute", 7), ("t5_dropout", "ssd", 0), ("gpt2", "host", 7)],
)
def test_random_changes_of_both_budgets_change_no_bit(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    device: SimulatedDevice,
    architecture: str,
    activations: str,
    lateness: int,
) -> None:
    """At any moment between passes: before a backward pass, before a step and after it, between accumulated batches."""
    chance = random.Random(f"{architecture} {os.environ.get('MEMASCEND_SEED', '0')}")
    fake.set("lateness", lateness)
    steps = -(-CHANGES // 4)
    expected = Run(build(architecture), architecture).go(steps)
    fresh = build(architecture)
    least = tiny_models.smallest_device_budget(fresh, activations=activations)
    model = on_device(
        fresh,
        device=device,
        device_memory=least,
        activations=activations,
        host_memory="32MiB",
        host_memory_max=HOST_MOST,
        durability=chance.choice(["step", "none"]),
    )
    host_least = memascend.offload_of(model).plan.smallest_bytes
    budgets = set()

    def at(_step: int, moment: str) -> None:
        if not moment.startswith("forward") and chance.random() < 0.5:
            memascend.set_host_memory(
                model, chance.choice([host_least, HOST_MOST, chance.randint(host_least, 2 * host_least)])
            )
        if chance.random() < 0.8:
            budget = chance.choice([least, MOST, chance.randint(least, MOST), chance.randint(least, 2 * least)])
            memascend.set_device_memory(model, budget)
            check_in_force(model, device, budget)
            budgets.add(budget)

    with Accesses(fake):
        run = Run(model, architecture, at=at).go(steps)
    assert len(budgets) > steps
    assert run.losses == expected.losses
    same(run.state(), expected.state())


def test_memory_follows_the_budget(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device: SimulatedDevice
) -> None:
    fresh = tiny_models.build("llama")
    least = tiny_models.smallest_device_budget(fresh)
    model = on_device(fresh, device=device, device_memory=least)
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)

    def copied() -> int:
        """Return the bytes that a forward pass copies to the device once all of it could be there."""
        with torch.no_grad():
            model(**tiny_models.batch("llama", 0))
            before = h2d_bytes(model)
            model(**tiny_models.batch("llama", 0))
        return h2d_bytes(model) - before

    with Accesses(fake):
        tiny_models.step(model, optimizer, "llama", 0)
        little, by_turns = device.taken, copied()
        assert by_turns > 0
        memascend.set_device_memory(model, "64MiB")
        check_in_force(model, device, 64 * MIB)
        weights = sum(place.nbytes for place in memascend.offload_of(model).places)
        assert device.taken >= weights > 2 * little
        assert copied() == 0
        planned = opening(model)["plan"]["device"]
        assert planned["total_bytes"] == memascend.stats(model)["device_bytes_planned"] <= planned["budget_bytes"]
        assert planned["budget_bytes"] == 64 * MIB
        memascend.set_device_memory(model, least)
        check_in_force(model, device, least)
        assert device.taken == little
        assert copied() == by_turns
    memascend.close(model)
    gc.collect()
    assert device.live == 0


@contextmanager
def going_on_soon(fake: fake_cuda.Fake) -> Iterator[None]:
    """Have the simulated device go on while the block waits for it."""
    going_on = threading.Timer(0.2, fake.set, ("busy", 0))
    going_on.start()
    try:
        yield
    finally:
        going_on.join()


def test_copies_under_way_end_before_their_memory_goes(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device: SimulatedDevice
) -> None:
    model = on_device(tiny_models.build("llama"), device=device, device_memory="64MiB")
    session = memascend.offload_of(model)
    streamer: Any = session.streamer
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    tiny_models.step(model, optimizer, "llama", 0)
    for ticket in streamer.tickets():
        ticket.wait()
    fake.set("busy", 1)
    streamer.start_next_pass()  # Copies the first units of the pass, with which nothing is computed yet.
    uploads = list(streamer.memory.on_device.values())
    assert uploads and not any(buffer.arrived.is_done() for buffer in uploads)
    with going_on_soon(fake):
        memascend.set_device_memory(model, "32MiB")
    assert all(buffer.arrived.is_done() for buffer in uploads)

    captured(model).leaving.most_bytes = 64 * MIB  # A backward pass waits for none of its copies.
    loss = model(**tiny_models.batch("llama", 2)).loss
    fake.set("busy", 1)
    loss.backward()
    leaving = list(captured(model).leaving._copies)
    assert leaving
    with going_on_soon(fake):
        memascend.set_device_memory(model, "64MiB")
    assert not captured(model).leaving and all(capture.copied() for capture, *_ in leaving)


def test_inputs_that_were_copied_to_the_host_take_nothing_after_the_backward_pass(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = on_device(
        tiny_models.build("gpt2"),
        device=device,
        device_memory="64MiB",
        activations="host",
        host_memory="64MiB",
        host_memory_max=HOST_MOST,
    )
    session = memascend.offload_of(model)
    monkeypatch.setattr(recompute, "LEAVING_INPUTS", 64)  # A forward pass waits for none of its copies.
    fake.set("busy", 1)
    loss = model(**tiny_models.batch("gpt2", 0)).loss
    fake.set("busy", 0)
    loss.backward()
    assert inputs_aside(model)._leaving
    memascend.set_host_memory(model, session.plan.smallest_bytes)
    assert not inputs_aside(model)._leaving


def test_what_was_written_to_the_device_is_not_lost(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device: SimulatedDevice
) -> None:
    """Weights that the program has written, which the store does not have yet, and updates that wait for a pass."""

    def run(model: nn.Module, budgets: tuple[int | str, ...] = ()) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        shown, wanted = [], iter(budgets)

        def change() -> None:
            if budgets:
                memascend.set_device_memory(model, next(wanted))

        for number in range(3):
            model(**tiny_models.batch("llama", number)).loss.backward()
            change()
            optimizer.step()
            change()
            for parameter in model.parameters():
                parameter.data.mul_(0.99)
            change()
            with torch.no_grad():
                model.lm_head.weight[number].zero_()
                change()
                model.model.embed_tokens.weight.add_(0.01)
            change()
            optimizer.zero_grad()
            shown.append(torch.stack([parameter.detach().norm() for parameter in model.parameters()]))
        return shown + [parameter.detach().clone() for parameter in model.parameters()]

    fresh = tiny_models.build("llama")
    least = tiny_models.smallest_device_budget(fresh)
    model = on_device(fresh, device=device, device_memory=least, host_memory=tiny_models.smallest_budget(fresh))
    with Accesses(fake):
        shown = run(model, ("64MiB", least, "16MiB", "64MiB", least) * 3)
    assert all(map(torch.equal, shown, run(tiny_models.build("llama"))))


def test_addresses_of_former_buffers_are_no_weights(
    on_device: Callable[..., nn.Module], device: SimulatedDevice
) -> None:
    """Autograd saves a tensor at the address of a former buffer as itself."""
    model = on_device(tiny_models.build("llama"), device=device, device_memory="64MiB")
    model(**tiny_models.batch("llama", 0)).loss.backward()
    session = memascend.offload_of(model)
    streamer: Any = session.streamer
    pool = streamer.memory.pool
    memory, starts = pool._memory, [buffer.address for buffers in pool.buffers.values() for buffer in buffers]
    assert any(address in streamer.by_address for address in starts)
    memascend.set_device_memory(model, "32MiB")
    for address in starts:
        start = address - memory.data_ptr()
        x = memory[start : start + 32].view(torch.float32).copy_(torch.arange(8.0)).requires_grad_()
        with session.saving_names():
            y = x * x
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, 2 * torch.arange(8.0))


def test_a_checkpoint_is_restored_within_the_present_budget(
    on_device: Callable[..., nn.Module], device: SimulatedDevice
) -> None:
    model = on_device(tiny_models.build("llama"), device=device, device_memory="64MiB", durability="step")
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    tiny_models.step(model, optimizer, "llama", 0)
    memascend.set_device_memory(model, "24MiB")
    memascend.save_checkpoint(model, "one")
    memascend.restore_checkpoint(model, "one")
    check_in_force(model, device, 24 * MIB)


# ---- refusals -------------------------------------------------------------------------------------------------


def test_a_change_that_cannot_be_is_refused_and_nothing_changes(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device: SimulatedDevice
) -> None:
    model = on_device(build("llama"), device=device, device_memory="24MiB")
    run = Run(model, "llama")
    seen: list[str] = []

    def refuse(kind: type[Exception], says: str, budget: int | str) -> Any:
        before = in_force(model, device)
        with pytest.raises(kind, match=says) as refused:
            memascend.set_device_memory(model, budget)
        assert in_force(model, device) == before
        seen.append(says)
        return refused.value

    def in_use(*_: Any) -> None:
        refuse(MemascendError, "device memory can change between passes only, but model.layers.1 is in use", "64MiB")

    def between_layers(*_: Any) -> None:
        refuse(MemascendError, "device memory can change between passes only, but the model is in use", "64MiB")

    layer = model.model.layers[1]
    with Accesses(fake):
        run.go(1)
        too_small = refuse(BudgetError, r"\(device_memory\) of 1.0 MiB is too small: the least is", "1MiB")
        refuse(BudgetError, "device_memory is 2.0 GiB, but cpu has only 1.0 GiB free of 1.0 GiB", "2GiB")
        device.others = 1000 * MIB
        assert (
            refuse(BudgetError, r"only 24\.0 MiB free of .*\(the least is [\d.]+MiB", "32MiB").smallest_bytes
            == too_small.smallest_bytes
        )
        # All that it holds now counts as free.
        memascend.set_device_memory(model, "24MiB")
        device.others = 0

        handles = [layer.mlp.register_forward_pre_hook(in_use), layer.register_forward_pre_hook(between_layers)]
        run.go(2, 1)
        handles.append(layer.register_full_backward_hook(between_layers))
        run.go(3, 2)
        for handle in handles:
            handle.remove()

        kept: list[torch.Tensor] = []
        handle = layer.mlp.up_proj.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
        with torch.no_grad():
            model(**tiny_models.batch("llama", 0))
        handle.remove()
        refuse(MemascendError, r"refer to weights there, of model.layers.1: drop them, or keep copies", "64MiB")
        kept.clear()
        memascend.set_device_memory(model, too_small.smallest_bytes)
        check_in_force(model, device, too_small.smallest_bytes)
        run.go(4, 3)
    assert len(set(seen)) == 6
    expected = Run(build("llama"), "llama").go(4)
    assert run.losses == expected.losses
    same(run.state(), expected.state())


def test_a_model_without_a_device(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("plain"))
    with pytest.raises(MemascendError, match=r"computes on the CPU .*set_host_memory"):
        memascend.set_device_memory(model, "1GiB")
    memascend.close(model)
    with pytest.raises(MemascendError, match="was closed"):
        memascend.set_device_memory(model, "1GiB")


def test_memory_that_another_process_takes_in_the_midst_of_a_change(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = build("llama")
    least = tiny_models.smallest_device_budget(fresh)
    model = on_device(fresh, device=device, device_memory=least)
    run = Run(model, "llama")
    before = in_force(model, device)
    taken = device.taken

    def take(leaves: int) -> None:
        """Have others take all but so much once the buffers of before are given back."""

        def empty_cache(self: SimulatedDevice) -> None:
            assert self.live == 0
            self.cached, self.others = 0, self.total - leaves

        monkeypatch.setattr(SimulatedDevice, "empty_cache", empty_cache)

    with Accesses(fake):
        run.go(1)
        # Enough for the first of the new lines, and not for all.
        wanted = make_device_plan(memascend.offload_of(model).units, 64 * MIB, config=model.config)
        assert taken <= wanted.units[0].total < wanted.weights_bytes
        take(leaves=wanted.units[0].total)
        with pytest.raises(DeviceError, match=r"has no room for the buffers of weights.*another process"):
            memascend.set_device_memory(model, "64MiB")
        assert in_force(model, device) == before
        device.others = 0
        run.go(2, 1)

        take(leaves=taken - 1)
        with pytest.raises(DeviceError, match="has no room for the buffers of weights"):
            memascend.set_device_memory(model, "64MiB")
        assert device.live == 0
        with pytest.raises(DeviceError, match="has no room for the buffers of weights"), torch.no_grad():
            model(**tiny_models.batch("llama", 0))
        device.others = 0
        run.go(3, 2)
        assert in_force(model, device) == before

        monkeypatch.undo()
        memascend.set_device_memory(model, "64MiB")
        check_in_force(model, device, 64 * MIB)
        run.go(4, 3)
    expected = Run(build("llama"), "llama").go(4)
    assert run.losses == expected.losses
    same(run.state(), expected.state())


def test_what_only_an_abandoned_pass_holds_is_dropped(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device: SimulatedDevice
) -> None:
    """Recomputed tensors of a backward pass that failed, and views of weights that only the collector finds."""
    model = on_device(tiny_models.build("llama"), device=device, device_memory="64MiB")
    pool = memascend.offload_of(model).streamer.memory.pool
    layer = model.model.layers[1].mlp

    def fail(*_: Any) -> None:
        raise ValueError("no more")

    def keep(module: nn.Module, *_: Any) -> None:
        cycle: dict[str, Any] = {"weight": module.weight.data}
        cycle["self"] = cycle

    with Accesses(fake):
        handle = layer.register_full_backward_hook(fail)
        loss = model(**tiny_models.batch("llama", 0)).loss
        with pytest.raises(ValueError, match="no more"):
            loss.backward()
        handle.remove()
        assert pool.in_use
        memascend.set_device_memory(model, "32MiB")
        del loss

        gc.collect()
        gc.disable()
        try:
            pool = memascend.offload_of(model).streamer.memory.pool
            handle = layer.up_proj.register_forward_hook(keep)
            with torch.no_grad():
                model(**tiny_models.batch("llama", 0))
            handle.remove()
            assert pool.in_use
            memascend.set_device_memory(model, "64MiB")
        finally:
            gc.enable()
    check_in_force(model, device, 64 * MIB)


# ---- PyTorch's limit ------------------------------------------------------------------------------------------


def test_the_limit_of_pytorch_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models on a device of 1 GiB, on which 100 MiB were in use before."""
    limits: list[float] = []
    monkeypatch.setattr(cuda, "_held", {})
    monkeypatch.setattr(cuda, "_beside", {})
    monkeypatch.setattr(cuda, "_observed", [True])
    monkeypatch.setattr(cuda.launcher, "compiles", lambda _: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = type("Properties", (), {"total_memory": 1024 * MIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: limits.append(share * 1024))
    units = partition(tiny_models.build("llama"))
    plans = [make_device_plan(units, budget * MIB) for budget in (64, 128, 32)]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * MIB)
    one, other = (ComputeDevice(torch.device("cuda", 0)) for _ in range(2))
    one.hold(plans[0])
    other.hold(plans[0])
    one.hold(plans[1])
    one.hold(plans[2])
    other.release()
    one.release()
    assert limits == [164, 228, 292, 196, 132, 1024]


@pytest.mark.parametrize(
    ("nbytes", "whole"), [(4096, 4096), (9 * MIB, 9 * MIB), (11 * MIB, 12 * MIB), (12 * MIB, 12 * MIB)]
)
def test_large_buffers_leave_no_rest_of_a_segment(nbytes: int, whole: int) -> None:
    memory = ComputeDevice(torch.device("cpu")).reserve(nbytes)
    assert memory.nbytes == nbytes and memory.untyped_storage().nbytes() == whole
