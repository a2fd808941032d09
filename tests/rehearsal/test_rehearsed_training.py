"""Ways to train on a device: scaling, optimizers, compiled layers, budgets that change, other streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import rehearsed_runs
import tiny_models
import torch
from rehearsed_runs import Result, assert_same, batch, train
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Offload = Callable[..., nn.Module]

pytestmark = pytest.mark.rehearsal


def llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return tiny_models.build("llama", dtype)


def test_fp16_with_scaled_losses(on_device: Offload) -> None:
    def scaled(model: nn.Module) -> Result:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        # The first steps overflow, and are skipped.
        scaler, result = memascend.GradScaler("cuda", init_scale=2.0**24, growth_interval=2), Result()
        scales = []
        for number in range(12):
            loss = model(**batch("llama", number)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            result.losses.append(loss.detach().cpu())
        assert min(scales) < 2.0**24 and scales.count(min(scales)) < len(scales)
        result.norms = [torch.tensor(scale) for scale in scales]
        return result.of(model)

    expected = scaled(llama(torch.float16).cuda())
    assert_same(scaled(on_device(llama(torch.float16))), expected)


def test_autocast_over_float32(on_device: Offload) -> None:
    # A context for each pass: within one, PyTorch goes on with the rounded weights of the first pass.
    def autocast() -> Any:
        return torch.autocast("cuda", dtype=torch.bfloat16)

    expected = train(llama(torch.float32).cuda(), "llama", context=autocast)
    assert_same(train(on_device(llama(torch.float32)), "llama", context=autocast), expected)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": lambda model: memascend.Adam(model.parameters(), lr=1e-3),
    "SGD": lambda model: memascend.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "Lion": lambda model: memascend.Lion(model.parameters(), lr=1e-3),
    "8-bit states": lambda model: memascend.AdamW(model.parameters(), lr=1e-3, states="8bit"),
    "bfloat16 states": lambda model: memascend.AdamW(model.parameters(), lr=1e-3, states="bfloat16"),
    "skipping": lambda model: memascend.AdamW(model.parameters(), lr=1e-3, nonfinite="skip"),
    "APOLLO": lambda model: memascend.Apollo(memascend.apollo_groups(model, rank=16, every=2), lr=1e-2),
    "APOLLO-Mini": lambda model: memascend.ApolloMini(memascend.apollo_groups(model, rank=1), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(on_device: Offload, name: str) -> None:
    resident = llama().cuda()
    expected = train(resident, "llama", optimizer=OPTIMIZERS[name](resident))
    model = on_device(llama())
    assert_same(train(model, "llama", optimizer=OPTIMIZERS[name](model)), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_that_are_compiled(on_device: Offload, backend: str) -> None:
    # The resident model as it is: these backends compile it to the same operators.
    expected = train(llama().cuda(), "llama")
    model = on_device(llama())
    for layer in model.model.layers:
        layer.compile(backend=backend)
    assert_same(train(model, "llama"), expected)
    torch._dynamo.reset()


def test_budgets_of_the_device_that_change(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama", steps=5)
    model = on_device(llama(), batch_tokens=64)
    budgets = ["512MiB", "300MiB", "700MiB", "200MiB", "512MiB"]
    changed = train(model, "llama", steps=5, before=lambda step: memascend.set_device_memory(model, budgets[step]))
    assert_same(changed, expected)


def test_budgets_of_the_host_that_change(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama", steps=5)
    model = on_device(llama(), host_memory="64MiB", host_memory_max="256MiB")
    budgets = ["64MiB", "128MiB", "250MiB", "60MiB", "256MiB"]
    changed = train(model, "llama", steps=5, before=lambda step: memascend.set_host_memory(model, budgets[step]))
    assert_same(changed, expected)


def test_a_budget_that_follows_the_machine(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama")
    assert_same(train(on_device(llama(), host_memory="auto"), "llama"), expected)


def test_checkpointing_by_transformers(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama")
    model = on_device(llama())
    tiny_models.enable_checkpointing(model)
    assert_same(train(model, "llama"), expected)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*stream:UserWarning")
def test_a_stream_beside_the_default_one(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama")
    model, stream = on_device(llama()), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = train(model, "llama")
    stream.synchronize()
    assert_same(result, expected)


def test_a_model_that_was_on_the_device(on_device: Offload) -> None:
    expected = train(llama().cuda(), "llama")
    assert_same(train(on_device(llama().cuda()), "llama"), expected)


def test_parameters_of_the_device_that_are_not_offloaded(tmp_path: Path) -> None:
    expected = train(llama().cuda(), "llama")
    model = llama().cuda()
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3, store=tmp_path / "states")
    assert_same(train(model, "llama", optimizer=optimizer), expected)
    optimizer.close()


#: A tensor beyond the piece that copies go through, one that is not contiguous, one without elements, and small ones.
SHAPES = [(700,), (64, 33), (0, 4), (), *[(129,)] * 60, (300, 300)]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("store", [False, True], ids=["in memory", "on a store"])
def test_a_step_waits_a_few_times_for_many_small_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: bool, nonfinite: str
) -> None:
    """Adapters are such parameters. A copy that blocks for each would have the host wait hundreds of times."""
    rehearsed_runs.runtime()
    monkeypatch.setattr("memascend.optim.host_copies.PIECE_BYTES", 100_000)
    waits: list[str] = []

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *args: (waits.append(name), original(self, *args))[1])

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(shape: tuple[int, ...]) -> torch.Tensor:
            tensor = torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
            return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor

        parameters = [nn.Parameter(random(shape)) for shape in SHAPES]
        states = {"store": tmp_path / device} if store else {}
        optimizer = memascend.AdamW(parameters, lr=1e-2, nonfinite=nonfinite, **states)
        norms = []
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = random(tuple(parameter.shape))
            waits.clear()
            norms.append(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
            told.append(len(waits))
        if store:
            optimizer.close()
        return [*norms, *(parameter.detach().cpu() for parameter in parameters)]

    told: list[int] = []
    expected = run("cpu")
    counted(torch.Tensor, "cpu")
    counted(torch.Tensor, "item")
    counted(torch.cuda.Event, "synchronize")
    told.clear()
    assert all(map(torch.equal, run("cuda"), expected))
    # Of the norm, the check of a policy and the update; a tensor beyond the piece is copied alone.
    assert max(told) <= 16, told


def test_memory_beyond_the_budget_is_refused(on_device: Offload) -> None:
    on_device(llama(), device_memory="160MiB")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


# ---- the rehearsal can fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["skip_wait", "skip_copy"])
@pytest.mark.provokes_races
def test_it_shows_waits_and_copies_that_are_left_out(on_device: Offload, fault: str) -> None:
    """All waits of streams, or the 20th copy of the three steps: the result differs."""
    fake = rehearsed_runs.runtime()
    expected = train(llama().cuda(), "llama")
    model = on_device(llama(), activations="host")
    fake.set(fault, 2**64 - 1 if fault == "skip_wait" else 20)
    try:
        result = train(model, "llama")
    finally:
        fake.set(fault, 0)
    with pytest.raises(AssertionError, match=r"is not|differ"):
        assert_same(result, expected)
