"""Updates in the backward pass of a device (`update="backward"`): gradients are applied as they arrive."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import OPTIMIZERS, Run, build, same, traffic
from simulated_device import Accesses, SimulatedDevice
from torch import nn
from unusual_uses import USES, made, train

import memascend
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import fake_cuda


STEPS = 5


@cache
def reference(name: str, architecture: str = "llama") -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    run = Run(build(architecture), architecture, plain=True, **OPTIMIZERS[name]).go(STEPS)
    return run.losses, run.state()


def host_budget(keeps: str, architecture: str = "llama") -> int:
    """Return the least, one that keeps half of the states or so, and one that keeps everything."""
    model = build(architecture)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    least = smallest_plan(partition(model, fused_loss=None), update="backward", on_device=True).total
    return least + {"nothing": 0, "some": (4 << 20) + 7 * parameters, "all": (4 << 20) + 40 * parameters}[keeps]


def least_on_device(architecture: str = "llama") -> int:
    model = build(architecture)
    return tiny_models.smallest_device_budget(model)


#: Optimizer, resident share of states, durability, device memory, the seed of the streams, and how late they are.
RUNS = [
    ("adamw", "nothing", "step", "least", 0, 7),
    ("adamw", "nothing", "none", "ample", 1, 0),
    ("adamw", "some", "every:2", "least", 2, 20),
    ("adamw", "all", "step", "ample", 3, 7),
    ("8 bits", "nothing", "every:2", "ample", 4, 0),
    ("bf16 states, no master", "all", "none", "least", 5, 7),
    ("lion", "some", "step", "ample", 6, 0),
    ("amsgrad", "nothing", "step", "least", 7, 7),
]


@pytest.mark.core
@pytest.mark.parametrize(("name", "keeps", "durability", "device_memory", "seed", "lateness"), RUNS)
def test_the_bits_are_those_of_training_in_memory(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    name: str,
    keeps: str,
    durability: str,
    device_memory: str,
    seed: int,
    lateness: int,
) -> None:
    fake.set("seed", seed)
    fake.set("lateness", lateness)
    losses, state = reference(name)
    model = on_device(
        build("llama"),
        update="backward",
        host_memory=host_budget(keeps),
        device_memory=least_on_device() if device_memory == "least" else "1GiB",
        durability=durability,
    )
    with Accesses(fake):
        run = Run(model, "llama", plain=True, **OPTIMIZERS[name]).go(STEPS)
    assert run.losses == losses
    same(run.state(), state)


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, bool]]:
    """Note the weights that are updated in backward passes, and whether they are in host memory then."""
    streamer, taken = memascend.offload_of(model).streamer, {}
    updates = streamer.backward_updates
    update = updates.update_from_device

    def noted(change: Any, *given: Any) -> Any:
        taken[change.tensor.name] = streamer.cached_units[change.tensor.unit].lease is not None
        return update(change, *given)

    updates.update_from_device = noted
    try:
        yield taken
    finally:
        del updates.update_from_device


@pytest.mark.parametrize(
    ("device_memory", "keeps", "read_again"),
    # With all weights on the device, its backward pass asks for none, and the buffer has the weights of the turn.
    [("least", "nothing", set()), ("1GiB", "nothing", {"layers.0", "layers.1"}), ("1GiB", "all", set())],
)
def test_weights_change_where_they_are(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, device_memory: str, keeps: str, read_again: set[str]
) -> None:
    """The unit that the device computes with is in host memory as a rule, and is not read once more."""
    bytes_there = least_on_device() if device_memory == "least" else device_memory
    model = on_device(build("llama"), update="backward", host_memory=host_budget(keeps), device_memory=bytes_there)
    run = Run(model, "llama", plain=True).go(1)
    places = [place for place in memascend.offload_of(model).places if not place.tensor.packed]
    for step in (1, 2):
        with counting(model) as taken, Accesses(fake):
            run.go(step + 1, step)
        assert taken.keys() == {place.name for place in places}
        # The gradient of the embedding comes last.
        on_store = {name for name, in_memory in taken.items() if not in_memory and "embed" not in name}
        assert on_store == {place.name for place in places if any(layer in place.name for layer in read_again)}


@pytest.mark.parametrize("activations", ["recompute", "ssd", "keep"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_policies(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, dtype: torch.dtype, activations: str
) -> None:
    expected = Run(build("llama", dtype), "llama", plain=True).go(4)
    recompute = activations != "keep"
    model = on_device(
        build("llama", dtype),
        update="backward",
        host_memory="24MiB",
        device_memory=tiny_models.smallest_device_budget(build("llama", dtype), activations=activations),
        recompute=recompute,
        activations=activations if recompute else None,
    )
    run = Run(model, "llama", plain=True).go(2)
    with counting(model) as taken, Accesses(fake):
        run.go(4, 2)
    assert taken
    assert run.losses == expected.losses
    same(run.state(), expected.state())


@pytest.mark.parametrize("architecture", ["normed", "gpt2", "mixtral", "plain"])
def test_tied_frozen_and_unused_weights(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, architecture: str
) -> None:
    """Tied tables, frozen layers, buffers that a pass changes, experts without tokens, and parameters at the root."""
    losses, state = reference("adamw", architecture)
    least = smallest_plan(partition(build(architecture), fused_loss=None), update="backward", on_device=True).total
    model = on_device(
        build(architecture),
        update="backward",
        host_memory=least,
        device_memory=least_on_device(architecture),
        durability="step",
    )
    with counting(model), Accesses(fake):
        run = Run(model, architecture, plain=True).go(STEPS)
    assert run.losses == losses
    same(run.state(), state)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("use", USES)
def test_what_uses_weights_and_gradients_in_other_ways_has_them(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, use: str, recompute: bool
) -> None:
    """Units of nothing but a large weight, which no step touches beside its update in the backward pass."""
    expected = train(made(use), use)
    model = on_device(made(use), host_memory="64MiB", recompute=recompute, update="backward")
    with counting(model) as taken, Accesses(fake):
        weights = train(model, use)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert bool(taken) == (use != "own gradients")


def test_a_unit_that_comes_back_within_the_pass_has_its_updates(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake
) -> None:
    """The device has given the unit up, and host memory too, while its weights are being updated on the store."""
    use = "two optimizers"
    least = smallest_plan(partition(made(use), fused_loss=None), update="backward", on_device=True).total
    model = on_device(made(use), update="backward", host_memory=least)
    streamer, came = memascend.offload_of(model).streamer, []
    unit = next(unit for unit in streamer.cached_units if unit.name == "layers.1")

    def bring(_: nn.Parameter) -> None:
        if streamer.cached_units[unit].backward_tickets:
            came.append(streamer.cached_units[unit].lease is None)
            threading.Timer(0.2, fake.set, ("busy", 0)).start()
            streamer.memory.forget_copy(unit)
            streamer.storage(unit)
        fake.set("busy", 0)

    def delay(_: torch.Tensor) -> None:
        """Have the gradient not arrive before the unit is asked for. There is no room for two on their way."""
        memascend.offload_of(model).gradients.wait_copied()
        fake.set("busy", 1)

    model.layers[1].weight.register_hook(delay)
    model.layers[1].weight.register_post_accumulate_grad_hook(bring)
    with Accesses(fake):
        weights = train(model, use)
    assert any(came)
    assert all(torch.equal(one, other) for one, other in zip(weights, train(made(use), use), strict=True))


@pytest.mark.parametrize(("accumulate", "clipped"), [(2, False), (1, True)])
def test_gradients_that_are_clipped_or_added_up_wait_for_the_step(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, accumulate: int, clipped: bool
) -> None:
    options = {"accumulate": accumulate, "max_norm": 0.1 if clipped else None}
    expected = tiny_models.train(build("llama"), "llama", **options)
    model = on_device(build("llama"), update="backward")
    with counting(model) as taken, Accesses(fake):
        trace = tiny_models.train(model, "llama", **options)
    tiny_models.assert_same(trace, expected)
    assert not taken


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("make", [memascend.Apollo, memascend.ApolloMini])
def test_apollo(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    monkeypatch: pytest.MonkeyPatch,
    make: type[memascend.Apollo],
    compiles: bool,
) -> None:
    """The device projects a gradient before it leaves; where it cannot, matrices wait for the step."""

    def run(model: nn.Module, steps: int) -> Run:
        rank = 24 if make is memascend.Apollo else 1
        optimizer = make(memascend.apollo_groups(model, rank), lr=2e-3, update_proj_gap=2)
        return Run(model, "llama", optimizer, plain=True).go(steps)

    expected = run(build("llama"), STEPS)
    device = SimulatedDevice()
    if not compiles:
        monkeypatch.setattr(device, "projection", lambda *_: None)
    model = on_device(build("llama"), device=device, update="backward", host_memory=host_budget("nothing"))
    with Accesses(fake):
        found = run(model, 2)
        with counting(model) as taken:
            found.go(3, 2)
        found.go(STEPS, 3)
    assert any("mlp" in name for name in taken) == compiles and "lm_head.weight" in taken
    assert found.losses == expected.losses
    same(found.state(), expected.state())


def large(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]


def test_what_stands_between_backward_and_step_is_refused(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path
) -> None:
    model = on_device(build("llama"), update="backward", host_memory=host_budget("nothing"))
    with Accesses(fake):
        run = Run(model, "llama", plain=True).go(2)
        model(**tiny_models.batch("llama", 4)).loss.backward()
        weight, optimizer = large(model)[0], run.optimizer
        for use in (
            lambda: model(**tiny_models.batch("llama", 5)),
            lambda: weight.sum(),
            lambda: weight.detach().clone(),
            lambda: optimizer.state_dict(),
            lambda: memascend.save_checkpoint(model, "middle"),
            lambda: memascend.save_pretrained(model, tmp_path / "saved"),
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: weight.grad.sum(),
            lambda: optimizer.zero_grad(),
            lambda: memascend.set_device_memory(model, "512MiB"),
        ):
            with pytest.raises(
                memascend.MemascendError, match=r"already (updated|applied)|can change between passes only"
            ):
                use()
        optimizer.step()
        optimizer.zero_grad()
        run.scheduler.step()
        run.go(STEPS, 3)
    same(run.state(), reference("adamw")[1])


@pytest.mark.parametrize("durability", ["step", "every:2"])
def test_a_copy_taken_within_a_backward_pass_goes_on_to_the_same_bits(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path, store: Path, durability: str
) -> None:
    """A copy of the drive at some moment is as a killed process leaves it."""
    model = on_device(build("llama"), update="backward", host_memory=host_budget("nothing"), durability=durability)
    run = Run(model, "llama", plain=True)
    copies: list[tuple[int, Path]] = []
    step = 0

    def copy(_: nn.Parameter) -> None:
        if step in (2, 3):  # one of them durable with every:2
            copies.append((step, tmp_path / f"copy {len(copies)}"))
            shutil.copytree(store, copies[-1][1])

    weights = large(model)
    for weight in (weights[0], weights[-1]):
        weight.register_post_accumulate_grad_hook(copy)
    for step in range(STEPS):
        run.go(step + 1, step)
    memascend.close(model)
    for number, (taken, copied) in enumerate(copies):
        # The run goes on on the device, or on the CPU.
        where = {"device": SimulatedDevice()} if number % 2 == 0 else {"allocator": "pageable"}
        resumed = memascend.resume(copied, host_memory="64MiB", update="backward", keep_store=False, **where)
        try:
            assert resumed.steps == (taken if durability == "step" else taken // 2 * 2)
            again = Run(resumed.model, "llama", resumed.optimizer, plain=True).go(STEPS, resumed.steps)
            same(again.state(), reference("adamw")[1])
        finally:
            memascend.close(resumed.model)


def test_a_gradient_that_does_not_arrive_leaves_the_last_durable_step(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, store: Path
) -> None:
    model = on_device(
        build("llama"), update="backward", host_memory=host_budget("nothing"), durability="step", keep_store=True
    )
    run = Run(model, "llama", plain=True).go(3)
    loss = model(**tiny_models.batch("llama", 6)).loss
    # Copies of inputs and weights have begun: gradients on their way fail.
    for parameter in large(model)[-1:]:
        parameter.register_post_accumulate_grad_hook(lambda _: fake.fail("cudaMemcpyAsync", 719))
    with pytest.raises((memascend.MemascendError, OSError)):
        loss.backward()
        run.optimizer.step()
    fake.fail("cudaMemcpyAsync", 0)
    with pytest.raises(memascend.MemascendError):
        model(**tiny_models.batch("llama", 7))
    memascend.close(model)
    resumed = memascend.resume(store, host_memory="64MiB", update="backward", keep_store=False, allocator="pageable")
    try:
        assert resumed.steps == 3
        again = Run(resumed.model, "llama", resumed.optimizer, plain=True).go(STEPS, resumed.steps)
        same(again.state(), reference("adamw")[1])
    finally:
        memascend.close(resumed.model)


def test_budgets_may_change_between_steps(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    least = host_budget("nothing") + (1 << 20)
    model = on_device(
        build("llama"), update="backward", host_memory=host_budget("all"), host_memory_max=host_budget("all")
    )
    budgets = [least, host_budget("some"), host_budget("all"), least, host_budget("all")]
    with Accesses(fake):
        run = Run(model, "llama", plain=True)
        for step, budget in enumerate(budgets[:STEPS]):
            run.go(step + 1, step)
            memascend.set_host_memory(model, max(budget, memascend.offload_of(model).plan.smallest_bytes))
            memascend.set_device_memory(model, least_on_device() if step % 2 == 0 else "512MiB")
    same(run.state(), reference("adamw")[1])


def test_neither_memory_nor_the_ssd_holds_gradients(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path
) -> None:
    """The least budget is the one of updates in the forward pass, whose gradients go to the SSD."""
    found, plans = {}, {}
    for update in ("forward", "backward"):
        plans[update] = smallest_plan(partition(build("llama"), fused_loss=None), update=update, on_device=True)
        model = on_device(
            build("llama"), update=update, store=tmp_path / update, host_memory=plans[update].total, durability="step"
        )
        run = Run(model, "llama", plain=True).go(3)
        found[update] = traffic(model, lambda run=run: run.go(5, 3))
        parameters = sum(place.numel for place in memascend.offload_of(model).places if not place.tensor.packed)
        memascend.close(model)
    assert plans["forward"].total == plans["backward"].total
    assert plans["backward"].applied.count == 0
    # Two steps, with weights in bfloat16. The least budget keeps a part of the gradients in memory.
    assert found["forward"][1] - found["backward"][1] >= 2 * parameters
