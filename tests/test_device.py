"""The CUDA path without a device: simulated streams, late wherever CUDA may be late, under everything else that runs.

Computing is done at once by the CPU; copies run only when somebody waits for them, and every two accesses that nothing
orders are told. So a run here fails where one on a device might compute with the wrong bytes once in a thousand steps.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import fake_cuda
import pytest
import tiny
import torch
from simulated_device import Accesses, SimulatedDevice

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

SCHEDULES = [(0, 0), (1, 0), (2, 7)]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.build(tmp_path_factory.mktemp("cudart"))


@pytest.fixture
def fake(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Fake:
    """A CUDA runtime of this test's own, whose streams are queues."""
    own = tmp_path / "cudart"
    own.mkdir()
    monkeypatch.setenv(fake_cuda.VARIABLE, str(shutil.copy(library, own)))
    # Inputs of every layer, however small.
    monkeypatch.setattr("memascend.activations.STASH_FROM_BYTES", 1)
    fake = fake_cuda.Fake()
    fake.set("lazy", 1)
    return fake


@pytest.fixture
def on_device(fake: fake_cuda.Fake, store: Path) -> Iterator[Callable[..., nn.Module]]:
    """Offload a model to a simulated device, with ample budgets by default; in the end nothing is left there."""
    models: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        models.append(model)
        usual = {"store": store, "host_memory": "256MiB", "device": SimulatedDevice(), "device_memory": "1GiB"}
        return memascend.offload(model, **usual | options)

    yield offload
    for model in models:
        memascend.close(model)
    fake.assert_clean()


@cache
def reference(architecture: str, **options: Any) -> tiny.Trace:
    return tiny.train(tiny.build(architecture), architecture, **options)


def smallest_device_budget(model: nn.Module, **options: Any) -> int:
    from memascend.device_plan import make_device_plan
    from memascend.units import partition

    with pytest.raises(memascend.BudgetError) as refused:
        make_device_plan(partition(model), 1, **options)
    return refused.value.smallest_bytes


# ---- exactness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_architecture(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, architecture: str) -> None:
    model = on_device(tiny.build(architecture))
    with Accesses(fake):
        trace = tiny.train(model, architecture)
    tiny.assert_same(trace, reference(architecture))


@pytest.mark.parametrize("activations", ["recompute", "host", "ssd"])
@pytest.mark.parametrize(("seed", "lateness"), SCHEDULES)
def test_every_policy_and_schedule(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, activations: str, seed: int, lateness: int
) -> None:
    fake.set("seed", seed)
    fake.set("lateness", lateness)
    model = on_device(tiny.build("t5_dropout"), activations=activations)
    with Accesses(fake):
        trace = tiny.train(model, "t5_dropout", accumulate=2)
    tiny.assert_same(trace, reference("t5_dropout", accumulate=2))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("activations", ["recompute", "ssd"])
def test_the_smallest_budgets(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, recompute: bool, activations: str
) -> None:
    if not recompute and activations != "recompute":
        pytest.skip("nothing is put aside")
    fresh = tiny.build("llama")
    budgets = {
        "host_memory": tiny.smallest_budget(fresh),
        "device_memory": smallest_device_budget(fresh, activations=activations if recompute else "keep"),
    }
    model = on_device(fresh, recompute=recompute, activations=activations, **budgets)
    with Accesses(fake):
        trace = tiny.train(model, "llama")
    tiny.assert_same(trace, reference("llama"))


def test_without_clipping_and_with_frozen_layers(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." not in name and "embed" not in name)
        return model

    expected = tiny.train(freeze(tiny.build("qwen2")), "qwen2", max_norm=None)
    model = on_device(freeze(tiny.build("qwen2")))
    with Accesses(fake):
        trace = tiny.train(model, "qwen2", max_norm=None)
    tiny.assert_same(trace, expected)


def test_gradients_measured_by_the_cpu_are_the_same(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedDevice, "block_sums", lambda *_: None)
    model = on_device(tiny.build("llama"))
    with Accesses(fake):
        trace = tiny.train(model, "llama")
    tiny.assert_same(trace, reference("llama"))


def test_a_run_goes_on_elsewhere(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, store: Path) -> None:
    """On the CPU first, then on a device, and back: the same bits as all in memory."""
    expected = tiny.train(tiny.build("qwen3"), "qwen3", steps=3, evaluate=False)
    losses, model = [], None
    for step, device in enumerate([None, SimulatedDevice(), None]):
        if step == 0:
            model = memascend.offload(tiny.build("qwen3"), store=store, host_memory="256MiB", keep_store=True)
            optimizer: Any = memascend.AdamW(model.parameters(), lr=3e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            memascend.track(model, scheduler=scheduler)
        else:
            run = memascend.resume(store, host_memory="256MiB", device=device, keep_store=True)
            model, optimizer = run.model, run.optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            memascend.track(model, scheduler=scheduler)
        with Accesses(fake):
            loss = model(**tiny.batch("qwen3", step)).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            weights = dict(memascend.parameters_of(model))
        memascend.close(model)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected.losses, strict=True))
    tiny.assert_same_weights(weights, expected.weights)
    fake.assert_clean()


def test_what_is_saved_is_what_was_trained(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path
) -> None:
    model = on_device(tiny.build("qwen2"))
    with Accesses(fake):
        trace = tiny.train(model, "qwen2", steps=1)
        memascend.save_pretrained(model, tmp_path / "out")
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tiny.assert_same_weights(dict(saved.named_parameters()), trace.weights)


# ---- what keeps it exact --------------------------------------------------------------------------------------


def run_apart(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> fake_cuda.Fake:
    """Train a little in the smallest budgets, on a runtime of its own that leaves a wait out; return its books."""
    folder.mkdir()
    monkeypatch.setenv(fake_cuda.VARIABLE, str(shutil.copy(library, folder)))
    fake = fake_cuda.Fake()
    for name, value in settings.items():
        fake.set(name, value)
    fresh = tiny.build("qwen3")
    model = memascend.offload(
        fresh,
        store=folder / "store",
        host_memory=tiny.smallest_budget(fresh),
        device=SimulatedDevice(),
        device_memory=smallest_device_budget(fresh, activations="ssd"),
        activations="ssd",
    )
    try:
        with Accesses(fake):
            optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
            for step in range(2):
                model(**tiny.batch("qwen3", step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        memascend.close(model)
    return fake


def test_every_wait_is_needed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do not wait for each other where they should are found out, whichever wait is left out."""
    monkeypatch.setattr("memascend.activations.STASH_FROM_BYTES", 1)
    clean = run_apart(library, tmp_path / "clean", monkeypatch, lazy=1, lateness=1000)
    assert clean.get("races") == 0, clean.text("race")
    waits = clean.get("waits")
    needed = [number for number in range(1, waits + 1) if clean.wait_was_used(number)]
    assert len(needed) > 20, f"only {len(needed)} of {waits} waits order anything"

    def is_noticed(number: int, attempt: int) -> bool:
        # Copies at once: one that nothing orders could write to memory that is somebody else's by then.
        folder = tmp_path / f"{number}-{attempt}"
        without = run_apart(library, folder, monkeypatch, lateness=1000, skip_wait=number)
        return without.get("races") > 0 or without.wait_was_redundant(number)

    # Threads put copies into streams in an order that differs by one or two: a wait may be another's.
    unseen = [number for number in needed[::3] if not any(is_noticed(number, attempt) for attempt in range(3))]
    assert not unseen, f"nobody noticed that waits {unseen} of {waits} were left out"
