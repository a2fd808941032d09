"""Tables on a device: rows and blocks are copied as they are used, bit for bit as in memory, and nothing races."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any
from unittest import mock

import bit_equality
import fake_cuda
import pytest
import tiny_models
import torch
from simulated_device import Accesses, SimulatedDevice, captured
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import memascend
from memascend.gradients.tables import add_from_device
from memascend.layout.units import partition
from memascend.memory_plan.device import make_device_plan
from memascend.memory_plan.host import smallest_plan
from memascend.streaming.device_tables import DeviceTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from memascend._memascend import CudaEvent
    from memascend.layout.units import Unit
    from memascend.streaming.blocks import BlockSource
    from memascend.streaming.device_buffers import Buffer

pytestmark = pytest.mark.usefixtures("small_tables")


def units_of(model: nn.Module, fused_loss: bool | str = "auto") -> list[Unit]:
    return partition(model, fused_loss=fused_loss, uploaded=True)


def least_budgets(model: nn.Module, **options: Any) -> dict[str, int]:
    """Return the least budgets of host and device memory."""
    units = units_of(model, **options)
    with pytest.raises(memascend.BudgetError) as refused:
        make_device_plan(units, 1, config=getattr(model, "config", None))
    return {"host_memory": smallest_plan(units).total, "device_memory": refused.value.smallest_bytes}


def by_blocks(model: nn.Module) -> list[str]:
    """Return the names of the tables without a buffer on the device."""
    streamer = memascend.offload_of(model).streamer
    return sorted(unit.name for unit in streamer.memory.by_blocks)


@pytest.mark.core
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma", "t5", "plain"])
def test_training_has_the_bits_of_memory(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, architecture: str
) -> None:
    fused = True if architecture == "plain" else "auto"
    built = tiny_models.build(architecture)
    model = on_device(built, fused_loss=fused, **least_budgets(built, fused_loss=fused))
    generate = architecture in ("llama", "gpt2")
    with Accesses(fake):
        trace = tiny_models.train(model, architecture, generate=generate)
    tiny_models.assert_same(
        trace,
        tiny_models.train(memascend.fuse_loss(tiny_models.build(architecture), fused), architecture, generate=generate),
    )
    assert by_blocks(model)


def small_decoder(kind: Any, config: Any, tied: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(config(**tiny_models.SMALL_DECODER | {"tie_word_embeddings": tied} | options)).train()


DECODERS: dict[str, Callable[[bool], nn.Module]] = {
    "llama": lambda tied: small_decoder(LlamaForCausalLM, LlamaConfig, tied).to(torch.bfloat16),
    "soft cap": lambda tied: small_decoder(
        Gemma2ForCausalLM, Gemma2Config, tied, head_dim=32, final_logit_softcapping=5.0
    ),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("activations", "seed", "lateness"), [("recompute", 0, 7), ("host", 1, 0), ("ssd", 4, 7)])
def test_tied_and_capped_heads_under_every_schedule(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    decoder: str,
    tied: bool,
    activations: str,
    seed: int,
    lateness: int,
) -> None:
    fake.set("seed", seed)
    fake.set("lateness", lateness)
    built = DECODERS[decoder](tied)
    model = on_device(built, activations=activations, **least_budgets(built))
    with Accesses(fake):
        trace = tiny_models.train(model, "mistral", accumulate=2)
    tiny_models.assert_same(
        trace, tiny_models.train(memascend.fuse_loss(DECODERS[decoder](tied)), "mistral", accumulate=2)
    )
    assert by_blocks(model) == (["model.embed_tokens"] if tied else ["lm_head", "model.embed_tokens"])


@pytest.mark.parametrize(
    ("host_memory", "device_memory"), [("least", "256MiB"), ("256MiB", "least"), ("256MiB", "256MiB")]
)
def test_wherever_the_budgets_have_room(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, host_memory: str, device_memory: str
) -> None:
    """A head has a buffer on the device, or in host memory, or in both; the bits are the same."""
    built = tiny_models.build("llama")
    least = least_budgets(built)
    wanted = {"host_memory": host_memory, "device_memory": device_memory}
    budgets = {name: least[name] if value == "least" else value for name, value in wanted.items()}
    model = on_device(built, **budgets)
    with Accesses(fake):
        trace = tiny_models.train(model, "llama", accumulate=2, generate=True)
    tiny_models.assert_same(
        trace, tiny_models.train(memascend.fuse_loss(tiny_models.build("llama")), "llama", accumulate=2, generate=True)
    )
    streamer = memascend.offload_of(model).streamer
    # An embedding that is looked up only gains nothing by a buffer on the device.
    assert by_blocks(model) == (
        ["lm_head", "model.embed_tokens"] if device_memory == "least" else ["model.embed_tokens"]
    )
    assert bool(streamer.cache.streamed) == (host_memory == "least")
    assert (captured(model).made_bytes >= 1 << 20) == (device_memory != "least")


# ---- exactness ------------------------------------------------------------------------------------------------


def without_waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a table during which the device is not told to wait for copies."""

    def call(self: DeviceTable, *args: Any) -> Any:
        with mock.patch.object(self._there.device, "wait", lambda *_: None):
            return original(self, *args)

    return call


def over_what_is_used(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DeviceTable._copy` that copies a block without regard to computation with the one before."""
    first: dict[int, dict[int, CudaEvent]] = {}

    def copy(self: DeviceTable, source: BlockSource, buffer: Buffer) -> Any:
        used, buffer.last_uses = buffer.last_uses, first.setdefault(buffer.address, dict(buffer.last_uses))
        try:
            return original(self, source, buffer)
        finally:
            buffer.last_uses = used

    return copy


MUTANTS = {
    "a block is used before it is there": ("_values", without_waiting),
    "a block is copied over one in use": ("_copy", over_what_is_used),
    "rows are used before they are there": ("look_up", without_waiting),
}


@pytest.mark.parametrize("hosted", [False, True], ids=["from the store", "from host memory"])
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_every_wait_is_needed(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str | None, hosted: bool
) -> None:
    monkeypatch.setenv(fake_cuda.VARIABLE, str(shutil.copy(library, tmp_path)))
    fake = fake_cuda.Fake()
    # Copies at once: one that nothing orders could write to memory that has another owner by then.
    fake.set("lazy", int(mutant is None))
    fake.set("lateness", 1000)
    if mutant is not None:
        name, change = MUTANTS[mutant]
        monkeypatch.setattr(DeviceTable, name, change(getattr(DeviceTable, name)))
    built = tiny_models.build("llama")
    budgets = least_budgets(built) | ({"host_memory": 256 << 20} if hosted else {})
    model = memascend.offload(built, store=tmp_path / "store", device=SimulatedDevice(), **budgets)
    try:
        with Accesses(fake):
            model(**tiny_models.batch("llama", 0)).loss.backward()
    finally:
        memascend.close(model)
    assert (fake.get("races") > 0) == (mutant is not None), fake.text("race")


def test_a_gradient_is_kept_once_it_is_there(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An addition to the stored gradient was copied from the device by then."""
    fake.set("lateness", 1000)
    model = on_device(tiny_models.build("llama"), **least_budgets(tiny_models.build("llama")))
    model(**tiny_models.batch("llama", 0)).loss.backward()
    link = memascend.offload_of(model).device.link

    class Early:
        """A link to the device that says at once that copies are done."""

        def download(self, parts: Any, after: CudaEvent) -> CudaEvent:
            link.download(parts, after)
            return after

        def __getattr__(self, name: str) -> Any:
            return getattr(link, name)

    def gradients() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        model(**tiny_models.batch("llama", 0)).loss.backward()
        return dict(tiny_models.gradients_of(model))

    held = []

    def add(ranges: Any, blocks: Any, *where: Any) -> None:
        made = list(blocks)
        held.extend(made)  # Late copies would read a buffer that has another owner by then.
        add_from_device(ranges, made, *where)

    whole = gradients()
    monkeypatch.setattr("memascend.gradients.device_capture.add_from_device", add)
    assert not bit_equality.differing(gradients(), whole)
    held.clear()
    monkeypatch.setattr(memascend.offload_of(model).device, "link", Early())
    assert bit_equality.differing(gradients(), whole)
    memascend.close(model)  # while the sources of copies are there


# ---- places -------------------------------------------------------------------------------------------------------


def test_a_lookup_copies_rows_and_not_the_table(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    built = tiny_models.build("llama", torch.float32)
    model = on_device(built, **least_budgets(built))
    weight = dict(memascend.parameters_of(model))["model.embed_tokens.weight"]
    ids = torch.tensor([[3, 900, 3, 17]])
    before = memascend.stats(model)["device"]["h2d_bytes"]
    with torch.no_grad():
        assert torch.equal(model.model.embed_tokens(ids), torch.nn.functional.embedding(ids, weight))
    assert memascend.stats(model)["device"]["h2d_bytes"] - before == 3 * weight[0].nbytes


def test_a_function_of_another_kind_gets_the_whole_table(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the plan, for as long as it is in use; its writes are kept."""
    built = tiny_models.build("llama")
    device, budgets = SimulatedDevice(), least_budgets(built)
    model = on_device(built, device=device, **budgets)
    # The plan's room for PyTorch, which has no allocator here, would do.
    device.limited = device.live + built.lm_head.weight.nbytes // 2
    with pytest.raises(memascend.MemascendError, match="lm_head is used as a whole"):
        model.lm_head.weight.norm()
    device.limited = budgets["device_memory"] + built.lm_head.weight.nbytes
    live, weight = device.live, model.lm_head.weight
    expected = dict(memascend.parameters_of(model))["lm_head.weight"].clone()
    with Accesses(fake):
        norm = weight.norm()
        with torch.no_grad():
            weight.mul_(0.5)
        assert torch.equal(weight.detach().clone(), expected * 0.5)
        model(**tiny_models.batch("llama", 0)).loss.backward()
    assert torch.equal(norm, expected.norm())
    assert device.live == live
    assert "lm_head is used as a whole" in caplog.text


def test_budgets_that_change(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    """A head gets a buffer on the device, or in host memory, and loses it again."""
    built = tiny_models.build("llama")
    least = least_budgets(built)
    model = on_device(built, **least | {"host_memory": "24MiB", "host_memory_max": "256MiB"})
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    seen, losses = [], []
    budgets = [("256MiB", "24MiB"), (least["device_memory"], "256MiB"), ("256MiB", "256MiB"), ("1MiB", "24MiB")]
    for number, (device_memory, host_memory) in enumerate(budgets):
        with Accesses(fake):
            losses.append(tiny_models.step(model, optimizer, "llama", number))
        if number == 3:
            break
        memascend.set_device_memory(model, device_memory)
        memascend.set_host_memory(model, host_memory)
        streamer = memascend.offload_of(model).streamer
        seen.append((len(streamer.memory.by_blocks), bool(streamer.cache.streamed)))
    assert seen == [(1, True), (2, False), (1, False)]
    reference = memascend.fuse_loss(tiny_models.build("llama"))
    other = memascend.AdamW(reference.parameters(), lr=3e-3)
    for number, _ in enumerate(budgets):
        tiny_models.step(reference, other, "llama", number)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(reference.named_parameters()))


@pytest.mark.parametrize("frozen", ["embed_tokens", "lm_head", "embed_tokens lm_head"])
def test_frozen_tables(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, frozen: str) -> None:
    """They are not updated, and nothing of them comes back."""

    def freeze(model: nn.Module) -> nn.Module:
        for name in frozen.split():
            (weight,) = (p for key, p in model.named_parameters() if name in key)
            weight.requires_grad_(False)
        return model

    built = freeze(tiny_models.build("llama"))
    model = on_device(built, **least_budgets(built))
    with Accesses(fake):
        trace = tiny_models.train(model, "llama")
    tiny_models.assert_same(trace, tiny_models.train(memascend.fuse_loss(freeze(tiny_models.build("llama"))), "llama"))
    assert by_blocks(model) == ["lm_head", "model.embed_tokens"]


def test_float16_with_a_scaled_loss(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        scaler, scales = memascend.GradScaler("cpu", init_scale=2.0**24, growth_interval=1), []
        for number in range(4):
            scaler.scale(model(**tiny_models.batch("llama", number)).loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(torch.tensor(scaler.get_scale()))
        return [*scales, *(weights.clone() for _, weights in memascend.parameters_of(model))]

    built = tiny_models.build("llama", torch.float16)
    model = on_device(built, **least_budgets(built))
    with Accesses(fake):
        found = run(model)
    expected = run(memascend.fuse_loss(tiny_models.build("llama", torch.float16)))
    assert expected[0] < 2.0**24, "no gradient has overflowed"
    assert all(map(torch.equal, found, expected))


def test_what_is_saved_and_resumed(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, store: Path, tmp_path: Path
) -> None:
    """On a device first, and on the CPU after that: the same bits as all in memory."""
    built, reference = tiny_models.build("llama"), memascend.fuse_loss(tiny_models.build("llama"))
    least = least_budgets(built)
    model = on_device(built, keep_store=True, durability="step", **least)
    optimizers = [memascend.AdamW(one.parameters(), lr=3e-3) for one in (model, reference)]
    for one, optimizer in zip((model, reference), optimizers, strict=True):
        tiny_models.step(one, optimizer, "llama", 0)
    memascend.save_pretrained(model, tmp_path / "out")
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tiny_models.assert_same_weights(dict(saved.named_parameters()), dict(reference.named_parameters()))
    memascend.close(model)
    run = memascend.resume(store, host_memory="64MiB")
    for one, optimizer in ((run.model, run.optimizer), (reference, optimizers[1])):
        tiny_models.step(one, optimizer, "llama", 1)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(run.model)), dict(reference.named_parameters()))
    memascend.close(run.model)
