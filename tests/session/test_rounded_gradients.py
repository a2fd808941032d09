"""Gradients of float32 weights that are put aside in bfloat16: the bits of a model whose gradients a hook rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import Run, go_on, same
from simulated_device import SimulatedDevice
from torch import nn

import memascend
from memascend.layout.units import partition
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.recovery.resume import read_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDED = {"gradients": "bfloat16"}
#: Above the largest bfloat16 number by more than half a unit, and finite in float32.
TOO_LARGE = 3.4e38


def round_gradients(model: nn.Module) -> nn.Module:
    """Round the result of each backward pass: the new gradient, or its sum with the earlier one."""

    def round_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to(torch.bfloat16).float()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(round_gradient)
    return model


def least(architecture: str) -> int:
    """Return the least host memory with rounded gradients: most of them are spilled."""
    return smallest_plan(partition(tiny_models.build(architecture, torch.float32), gradients="bfloat16")).total


def check(
    offloaded: Callable[..., nn.Module], architecture: str, where: dict[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Train in memory with a hook and offloaded, and compare; return the model, still open."""
    expected = tiny_models.train(
        round_gradients(tiny_models.build(architecture, torch.float32)), architecture, **options
    )
    model = offloaded(tiny_models.build(architecture, torch.float32), **ROUNDED | (where or {}))
    tiny_models.assert_same(tiny_models.train(model, architecture, **options), expected)
    return model


# ---- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "mixtral", "t5", "plain"])
@pytest.mark.parametrize("spilled", [False, True])
def test_training_has_the_bits_of_rounded_gradients(
    offloaded: Callable[..., nn.Module], architecture: str, spilled: bool
) -> None:
    model = check(offloaded, architecture, {"host_memory": least(architecture)} if spilled else {})
    tensors = [tensor for unit in model._memascend.units for tensor in unit.tensors]
    assert any(tensor.packed for tensor in tensors) and not all(tensor.packed for tensor in tensors)


@pytest.mark.parametrize("architecture", ["llama", "plain"])
@pytest.mark.parametrize("spilled", [False, True])
def test_the_sum_of_passes_is_rounded_after_each(
    offloaded: Callable[..., nn.Module], architecture: str, spilled: bool
) -> None:
    where = {"host_memory": least(architecture)} if spilled else {}
    check(offloaded, architecture, where, accumulate=3, max_norm=0.05)


def test_rounding_changes_bits() -> None:
    """Else the tests of this file prove nothing."""
    plain, rounded = (tiny_models.build("llama", torch.float32) for _ in range(2))
    round_gradients(rounded)
    plain, rounded = tiny_models.train(plain, "llama"), tiny_models.train(rounded, "llama")
    assert any(not torch.equal(plain.weights[name], weight) for name, weight in rounded.weights.items())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.usefixtures("small_tables")
def test_tables(offloaded: Callable[..., nn.Module], architecture: str, accumulate: int) -> None:
    """Embeddings and heads whose gradients come block by block, tied and not."""
    in_memory = memascend.fuse_loss(round_gradients(tiny_models.build(architecture, torch.float32)))
    expected = tiny_models.train(in_memory, architecture, accumulate=accumulate)
    model = offloaded(tiny_models.build(architecture, torch.float32), host_memory=least(architecture), **ROUNDED)
    session = model._memascend
    assert any(session.streamer.is_streamed(unit) for unit in session.units), "no table is read by blocks"
    tiny_models.assert_same(tiny_models.train(model, architecture, accumulate=accumulate), expected)


@pytest.mark.parametrize("make", [memascend.Adam, memascend.Lion, memascend.SGD])
@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_other_optimizers(offloaded: Callable[..., nn.Module], make: Any, states: str) -> None:
    runs = []
    for place in (round_gradients, lambda model: offloaded(model, host_memory=least("llama"), **ROUNDED)):
        model = place(tiny_models.build("llama", torch.float32))
        optimizer = make(model.parameters(), lr=1e-3, states=states)
        runs.append(tiny_models.train(model, "llama", optimizer=optimizer))
    tiny_models.assert_same(runs[1], runs[0])


def test_weights_in_bfloat16_are_as_before(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"), **ROUNDED)
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))


def test_gradients_are_read_and_written_rounded(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama", torch.float32), **ROUNDED)
    model(**tiny_models.batch("llama", 0)).loss.backward()
    for parameter in (model.lm_head.weight, model.model.norm.weight):
        gradient = parameter.grad.clone()
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradient.bfloat16().float()) and gradient.any()
        parameter.grad.mul_(1.001)
        assert torch.equal(parameter.grad, (gradient * 1.001).bfloat16().float())


def test_a_gradient_that_is_filled_is_rounded(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **ROUNDED)
    model(torch.ones(1, 8)).sum().backward()
    gradient = model[0].bias.grad
    gradient.fill_(0.1)
    assert torch.equal(gradient.clone(), torch.full((8,), 0.1).bfloat16().float())
    assert not memascend.overflow.check([gradient])
    gradient.fill_(TOO_LARGE)
    assert memascend.overflow.check([gradient])


# ---- values that are not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [TOO_LARGE, float("inf"), float("nan")])
@pytest.mark.parametrize("which", ["lm_head.weight", "model.norm.weight"])
def test_what_is_not_finite_once_rounded_is_an_overflow(
    offloaded: Callable[..., nn.Module], value: float, which: str
) -> None:
    """A step is skipped by the rounded gradient, and the norm is the rounded gradient's."""
    model = offloaded(tiny_models.build("llama", torch.float32), host_memory=least("llama"), **ROUNDED)
    before = {name: weight.clone() for name, weight in memascend.parameters_of(model)}
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2, nonfinite="skip")
    model(**tiny_models.batch("llama", 0)).loss.backward()
    parameter = model.get_parameter(which)
    gradient = torch.zeros(parameter.shape)
    gradient.view(-1)[-1] = value
    parameter.grad = gradient
    norm = optimizer.clip_grad_norm_(1.0)
    assert not torch.isfinite(norm)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), before)


def test_a_sum_that_overflows_is_noticed(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), **ROUNDED)
    optimizer = memascend.AdamW(model.parameters(), nonfinite="raise")
    for _ in range(2):
        (model[1].bias.sum() * 2e38).backward()
    with pytest.raises(memascend.MemascendError, match="not finite"):
        optimizer.step()


# ---- room ---------------------------------------------------------------------------------------------------


def test_half_as_much_is_spilled(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    written, kept = [], []
    for number, gradients in enumerate(("auto", "bfloat16")):
        units = partition(tiny_models.build("llama", torch.float32), gradients=gradients)
        plan = smallest_plan(units)
        model = offloaded(
            tiny_models.build("llama", torch.float32),
            host_memory=plan.total,
            gradients=gradients,
            activations="recompute",
            store=tmp_path / str(number),
        )
        loss = model(**tiny_models.batch("llama", 0)).loss
        before = memascend.stats(model)["ssd_bytes_written"]
        loss.backward()
        model._memascend.streamer.release_all()
        for unit in model._memascend.units:
            model._memascend.runtime.units.wait_unit(unit.index)
        written.append(memascend.stats(model)["ssd_bytes_written"] - before)
        kept.append(plan.staging_cache.count)
    assert kept[0] == kept[1] and 0 < written[1] == written[0] // 2


def test_the_plan_holds_half_as_much() -> None:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    plain, rounded = (make_plan(partition(model, gradients=which), 256 << 20) for which in ("auto", "bfloat16"))
    assert plain.chunk_elements == rounded.chunk_elements
    assert rounded.staging.nbytes * 2 == plain.staging.nbytes
    assert sum(line.total for line in rounded.packs) * 2 == sum(line.total for line in plain.packs) > 0
    assert rounded.slots.total == plain.slots.total, "the update computes in float32"
    assert smallest_plan(partition(model, gradients="bfloat16")).total < tiny_models.smallest_budget(model)


def test_a_budget_that_is_too_small_still_names_smaller_weights() -> None:
    with pytest.raises(memascend.BudgetError, match="weights in bfloat16"):
        make_plan(partition(tiny_models.build("llama", torch.float32), gradients="bfloat16"), 1 << 20)


# ---- resuming, and where it does not apply ------------------------------------------------------------------


def test_a_resumed_run_goes_on_as_it_was(store: Path) -> None:
    expected = Run(round_gradients(tiny_models.build("llama", torch.float32)), "llama").go(4).state()
    model = tiny_models.build("llama", torch.float32)
    memascend.offload(model, store=store, host_memory="64MiB", keep_store=True, durability="step", **ROUNDED)
    Run(model, "llama").go(2)
    memascend.close(model)
    assert read_record([store])["gradients"] == "bfloat16"
    durable, _, state = go_on(store, "llama", dtype=torch.float32, host_memory="64MiB")
    assert durable == 2
    same(state, expected)


def test_a_run_on_the_cpu_is_not_resumed_on_a_device(store: Path, fake: Any) -> None:
    model = tiny_models.build("llama", torch.float32)
    memascend.offload(model, store=store, host_memory="64MiB", keep_store=True, durability="step", **ROUNDED)
    memascend.close(model)
    with pytest.raises(ValueError, match="on the CPU"):
        memascend.resume(store, host_memory="64MiB", device=SimulatedDevice(), device_memory="1GiB")


@pytest.mark.parametrize(
    ("dtype", "options", "told"),
    [
        (torch.float32, {"gradients": "float16"}, "gradients='float16' is not one of 'auto', 'bfloat16'"),
        (torch.float16, ROUNDED, "model.embed_tokens.weight is in float16"),
        (torch.float32, ROUNDED | {"device": SimulatedDevice}, "a device's gradients are put aside as they are made"),
    ],
)
def test_where_it_does_not_apply_it_is_refused(
    store: Path, fake: Any, dtype: torch.dtype, options: dict[str, Any], told: str
) -> None:
    if "device" in options:
        options = options | {"device": options["device"]()}
    with pytest.raises(ValueError, match=told):
        memascend.offload(tiny_models.build("llama", dtype), store=store, host_memory="64MiB", **options)
    assert not store.exists()


def test_frozen_weights_in_float16_are_no_obstacle(offloaded: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 8))
    offloaded(model, **ROUNDED)
    model[1](torch.ones(1, 8) / 3).sum().backward()
    assert torch.equal(model[1].weight.grad, (torch.ones(8, 8) / 3).bfloat16().float())
