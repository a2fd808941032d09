"""The CUDA path without a device: simulated streams, late wherever CUDA may be late, under everything else that runs.

Computing is done at once by the CPU; copies run only when they are waited for, and every two accesses that nothing
orders are told. So a run here fails where one on a device might compute with the wrong bytes once in a thousand steps.
"""

from __future__ import annotations

import gc
import shutil
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import bit_equality
import fake_cuda
import pytest
import requirements
import tiny_models
import torch
from simulated_device import Accesses, SimulatedDevice, captured
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import memascend
from memascend.autograd.recompute import LeavingInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


#: Where inputs are put aside, the seed of the streams' order, and how many questions a copy survives.
RUNS = [("recompute", 0, 7), ("host", 1, 0), ("host", 2, 7), ("ssd", 3, 0), ("ssd", 4, 7)]


@cache
def reference(architecture: str, **options: Any) -> tiny_models.Trace:
    return tiny_models.train(tiny_models.build(architecture), architecture, **options)


# ---- exactness ----------------------------------------------------------------------------------------------


# Of the others, those that tie weights, save their own outputs, or have parameters at the root; T5 is below.
@pytest.mark.core
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "mixtral", "plain"])
def test_architectures(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, architecture: str) -> None:
    model = on_device(tiny_models.build(architecture))
    with Accesses(fake):
        trace = tiny_models.train(model, architecture)
    tiny_models.assert_same(trace, reference(architecture))


def test_what_a_program_reads_and_writes(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    """Weights and gradients between passes; copies to the device and back keep their order."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        shown = []
        for number in range(3):
            model(**tiny_models.batch("llama", number)).loss.backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            shown.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.mul_(0.99)
            with torch.no_grad():
                model.lm_head.weight[number].zero_()
            shown.append(torch.stack([parameter.detach().norm() for parameter in model.parameters()]))
        return shown + [parameter.detach().clone() for parameter in model.parameters()]

    model = on_device(tiny_models.build("llama"))
    with Accesses(fake):
        shown = run(model)
    assert all(map(torch.equal, shown, run(tiny_models.build("llama"))))


@pytest.mark.parametrize(("activations", "seed", "lateness"), RUNS)
def test_every_policy_and_schedule(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, activations: str, seed: int, lateness: int
) -> None:
    fake.set("seed", seed)
    fake.set("lateness", lateness)
    model = on_device(tiny_models.build("t5_dropout"), activations=activations)
    with Accesses(fake):
        trace = tiny_models.train(model, "t5_dropout", accumulate=2)
    tiny_models.assert_same(trace, reference("t5_dropout", accumulate=2))


@pytest.mark.parametrize(("activations", "seed", "lateness"), RUNS[::2])
def test_layers_on_slices(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, activations: str, seed: int, lateness: int
) -> None:
    fake.set("seed", seed)
    fake.set("lateness", lateness)
    in_memory = memascend.run_in_slices(tiny_models.build("t5_dropout"), 1)
    model = on_device(
        tiny_models.build("t5_dropout"), activations=activations, micro_batch_size=1, batch_tokens=(2, 16)
    )
    with Accesses(fake):
        trace = tiny_models.train(model, "t5_dropout", accumulate=2)
    tiny_models.assert_same(trace, tiny_models.train(in_memory, "t5_dropout", accumulate=2))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("activations", ["recompute", "ssd"])
def test_the_smallest_budgets(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, recompute: bool, activations: str
) -> None:
    if not recompute and activations != "recompute":
        pytest.skip("nothing is put aside")
    fresh = tiny_models.build("llama")
    budgets = {
        "host_memory": tiny_models.smallest_budget(fresh),
        "device_memory": tiny_models.smallest_device_budget(fresh, activations=activations if recompute else "keep"),
    }
    model = on_device(fresh, recompute=recompute, activations=activations, **budgets)
    with Accesses(fake):
        trace = tiny_models.train(model, "llama")
    tiny_models.assert_same(trace, reference("llama"))


def test_without_clipping_and_with_frozen_layers(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." not in name and "embed" not in name)
        return model

    expected = tiny_models.train(freeze(tiny_models.build("qwen2")), "qwen2", max_norm=None)
    model = on_device(freeze(tiny_models.build("qwen2")))
    with Accesses(fake):
        trace = tiny_models.train(model, "qwen2", max_norm=None)
    tiny_models.assert_same(trace, expected)


def test_gradients_measured_by_the_cpu_are_the_same(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedDevice, "block_sums", lambda *_: None)
    model = on_device(tiny_models.build("llama"))
    with Accesses(fake):
        trace = tiny_models.train(model, "llama")
    tiny_models.assert_same(trace, reference("llama"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compiles", [True, False])
def test_apollo_projects_gradients_where_they_are(
    on_device: Callable[..., nn.Module],
    fake: fake_cuda.Fake,
    monkeypatch: pytest.MonkeyPatch,
    accumulate: int,
    compiles: bool,
) -> None:
    """On the device, but for sums of several backward passes, which lie on the host."""

    def run(model: nn.Module) -> tiny_models.Trace:
        optimizer = memascend.Apollo(memascend.apollo_groups(model, 24), lr=2e-3, update_proj_gap=2)
        return tiny_models.train(model, "llama", optimizer=optimizer, accumulate=accumulate)

    expected = run(memascend.fuse_loss(tiny_models.build("llama")))
    device, projected = SimulatedDevice(), []
    if compiles:
        whole = device.projection
        monkeypatch.setattr(device, "projection", lambda *given: projected.append(given) or whole(*given))
    else:
        monkeypatch.setattr(device, "projection", lambda *_: None)
    model = on_device(tiny_models.build("llama"), device=device)
    with Accesses(fake):
        trace = run(model)
    tiny_models.assert_same(trace, expected)
    assert bool(projected) == compiles
    large = [
        place for place in memascend.offload_of(model).places if not place.tensor.packed and place.gradient.projected
    ]
    assert bool(large) == compiles


def test_a_run_goes_on_elsewhere(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, store: Path) -> None:
    """On the CPU first, then on a device, and back: the same bits as all in memory."""
    expected = tiny_models.train(tiny_models.build("qwen3"), "qwen3", steps=3, evaluate=False)
    losses, model = [], None
    for step, device in enumerate([None, SimulatedDevice(), None]):
        if step == 0:
            model = memascend.offload(tiny_models.build("qwen3"), store=store, host_memory="256MiB", keep_store=True)
            optimizer: Any = memascend.AdamW(model.parameters(), lr=3e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            memascend.track(model, scheduler=scheduler)
        else:
            run = memascend.resume(store, host_memory="256MiB", device=device, keep_store=True)
            model, optimizer = run.model, run.optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            memascend.track(model, scheduler=scheduler)
        with Accesses(fake):
            loss = model(**tiny_models.batch("qwen3", step)).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            weights = dict(memascend.parameters_of(model))
        memascend.close(model)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected.losses, strict=True))
    tiny_models.assert_same_weights(weights, expected.weights)
    fake.assert_clean()


def test_what_is_saved_is_what_was_trained(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path
) -> None:
    model = on_device(tiny_models.build("qwen2"))
    with Accesses(fake):
        trace = tiny_models.train(model, "qwen2", steps=1)
        memascend.save_pretrained(model, tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tiny_models.assert_same_weights(dict(saved.named_parameters()), trace.weights)


# ---- exactness ------------------------------------------------------------------------------------------------


def run_apart(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> fake_cuda.Fake:
    """Train a little in the smallest budgets, on a runtime of its own that leaves a wait out; return its books."""
    folder.mkdir()
    monkeypatch.setenv(fake_cuda.VARIABLE, str(shutil.copy(library, folder)))
    fake = fake_cuda.Fake()
    for name, value in settings.items():
        fake.set(name, value)
    fresh = tiny_models.build("qwen3")
    model = memascend.offload(
        fresh,
        store=folder / "store",
        host_memory=tiny_models.smallest_budget(fresh),
        device=SimulatedDevice(),
        device_memory=tiny_models.smallest_device_budget(fresh, activations="ssd"),
        activations="ssd",
    )
    try:
        with Accesses(fake):
            optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
            for step in range(2):
                model(**tiny_models.batch("qwen3", step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        memascend.close(model)
    return fake


@pytest.mark.core
def test_every_wait_is_needed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do not wait for each other where they should are found out, whichever wait is left out."""
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    clean = run_apart(library, tmp_path / "clean", monkeypatch, lazy=1, lateness=1000)
    assert clean.get("races") == 0, clean.text("race")
    waits = clean.get("waits")
    needed = [number for number in range(1, waits + 1) if clean.wait_was_used(number)]
    assert len(needed) > 20, f"only {len(needed)} of {waits} waits order anything"

    def is_noticed(number: int, attempt: int) -> bool:
        # Copies at once: one that nothing orders could write to memory that has another owner by then.
        folder = tmp_path / f"{number}-{attempt}"
        without = run_apart(library, folder, monkeypatch, lateness=1000, skip_wait=number)
        return without.get("races") > 0 or without.wait_was_redundant(number)

    # Threads put copies into streams in an order that differs by one or two: a wait may be another's.
    unseen = [number for number in needed[::5] if not any(is_noticed(number, attempt) for attempt in range(3))]
    assert not unseen, f"waits {unseen} of {waits} were left out, and no race was found"


def test_the_host_does_not_wait_in_mid_pass(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    """With buffers for everything, only the step asks the device for something: the norm."""
    model = on_device(tiny_models.build("llama"))
    # Otherwise the host waits where the thread that copies gradients has fallen behind, as on a busy machine.
    captured(model).leaving.most_bytes = 1 << 30
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    before = {}
    for step in range(3):
        before = memascend.stats(model)["device"]["waits_python"]
        loss = model(**tiny_models.batch("llama", step)).loss
        loss.backward()
        during = memascend.stats(model)["device"]["waits_python"] - before
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step:  # weights come from the SSD first
            assert during == 0


def deep_llama() -> nn.Module:
    """Return a model with more layers than there are staging buffers to spare."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**tiny_models.SMALL_DECODER | {"num_hidden_layers": 12})).to(torch.bfloat16)


def test_inputs_of_frozen_layers_stay_in_host_memory(
    on_device: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for inputs is planned by their size: the gradients, whose room they shared, are none here."""
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    model = on_device(deep_llama().requires_grad_(False), activations="host", batch_tokens=(2, 16))
    start = torch.randn(2, 16, tiny_models.NARROW, dtype=torch.bfloat16, requires_grad=True)
    before = memascend.stats(model)
    for step in range(2):
        model(inputs_embeds=start * 1, labels=tiny_models.batch("qwen3", step)["labels"]).loss.backward()
    after = memascend.stats(model)
    assert after["device"]["d2h_bytes"] - before["device"]["d2h_bytes"] >= 2 * 12 * start.nbytes
    assert after["ssd_bytes_written"] == before["ssd_bytes_written"]


def test_the_inputs_of_two_layers_are_read_ahead(
    on_device: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the caller launches a layer's backward pass, the drive goes on with the layers before."""
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    model = on_device(deep_llama(), activations="ssd", batch_tokens=(2, 16))
    restore, ahead = LeavingInput.restore, []

    def watched(stashed: LeavingInput) -> torch.Tensor:
        restored = restore(stashed)
        earlier = stashed._previous()
        following = [earlier, None if earlier is None else earlier._previous()]
        ahead.append(sum(one is not None and one._coming is not None for one in following))
        return restored

    monkeypatch.setattr(LeavingInput, "restore", watched)
    model(**tiny_models.batch("qwen3", 0)).loss.backward()
    # The last layer's and those before: their inputs have left the device by then.
    assert len(ahead) == 12 and ahead[:10] == [2] * 10


class Changing(nn.Module):
    """A model that changes the input of its first layer after the layer has taken it, or a copy of it."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.copies = copies

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.embedding(ids) * 2
        second = self.layers[0](first)
        (first.clone() if self.copies else first).add_(1)
        return self.layers[1](second).sum()


@pytest.mark.parametrize("activations", ["recompute", "ssd"])
def test_inputs_changed_in_place_are_refused(
    activations: str, on_device: Callable[..., nn.Module], fake: fake_cuda.Fake
) -> None:
    torch.manual_seed(0)
    model = Changing().to(torch.bfloat16)
    reference = Changing(copies=True).to(torch.bfloat16)
    reference.load_state_dict(model.state_dict())
    reference(torch.arange(8)[None]).backward()
    model = on_device(model, activations=activations)
    try:
        model(torch.arange(8)[None]).backward()
    except memascend.MemascendError as error:
        assert "changed in place" in str(error)
    else:
        # The copy was done before the change: nothing else is lost.
        assert activations == "ssd"
        found, expected = (dict(tiny_models.gradients_of(one)) for one in (model, reference))
        assert not bit_equality.differing(found, expected)


# ---- failures -------------------------------------------------------------------------------------------------


def test_out_of_memory_is_explained(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_device(tiny_models.build("llama"), device_memory="64MiB")
    rotate = type(model.model.layers[1].mlp).forward

    def fail(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return rotate(self, x)

    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", fail)
    fails = True
    with pytest.raises(torch.OutOfMemoryError) as forward:
        model(**tiny_models.batch("llama", 0))
    fails = False
    loss = model(**tiny_models.batch("llama", 0)).loss
    fails = True
    with pytest.raises(torch.OutOfMemoryError) as backward:
        loss.backward()
    for error in (forward, backward):
        (note,) = error.value.__notes__
        assert "weights of model.layers" in note and "64.0 MiB" in note and "activations='host'" in note
    fails = False
    model(**tiny_models.batch("llama", 0)).loss.backward()  # and it goes on


def test_a_device_that_is_taken(store: Path, fake: fake_cuda.Fake) -> None:
    model = tiny_models.build("llama")
    device = SimulatedDevice(total=32 * 2**20)
    with pytest.raises(memascend.BudgetError, match=r"only 32\.0 MiB free.*another process.*device_memory"):
        memascend.offload(model, store=store, host_memory="256MiB", device=device, device_memory="48MiB")
    with pytest.raises(memascend.BudgetError, match=r"device_memory.*too small: the least is"):
        memascend.offload(model, store=store, host_memory="256MiB", device=device, device_memory="1MiB")
    assert not store.exists() or not list(store.iterdir())
    fake.assert_clean()


def test_where_little_may_be_pinned_windows_shrink(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    fresh = tiny_models.build("llama")
    least = tiny_models.smallest_budget(fresh)
    fake.set("limit", 2 * least)
    model = on_device(fresh, host_memory="256MiB")
    with Accesses(fake):
        trace = tiny_models.train(model, "llama")
    tiny_models.assert_same(trace, reference("llama"))
    stats = memascend.stats(model)
    assert any("pins less host memory" in notice for notice in stats["notices"])
    assert stats["host_bytes_reserved"] <= 2 * least
    assert stats["host_bytes_budget"] == 256 * 2**20
    memascend.close(model)
    fake.set("limit", least // 4)
    with pytest.raises(memascend.PinnedMemoryError):
        on_device(tiny_models.build("llama"), host_memory="256MiB")


@pytest.mark.parametrize(
    ("definitions", "says"),
    [
        (("FAKE_DEVICES=0",), "no CUDA device"),
        (("FAKE_COUNT_ERROR=35", "FAKE_DRIVER=11000"), "driver"),
        (("FAKE_VERSION=11080",), "11.8"),
        (None, "MEMASCEND_CUDART"),
        ((), "PyTorch"),
    ],
    ids=["no device", "old driver", "old runtime", "no runtime", "PyTorch without it"],
)
def test_where_cuda_is_missing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, definitions: tuple[str, ...] | None, says: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is not missing here")
    path = tmp_path / "nowhere.so" if definitions is None else fake_cuda.build(tmp_path, *definitions)
    monkeypatch.setenv(fake_cuda.VARIABLE, str(path))
    with pytest.raises(memascend.DeviceError, match=says) as refused:
        memascend.offload(tiny_models.build("plain"), store=store, host_memory="256MiB", device="cuda")
    assert "device='cpu'" in str(refused.value) or 'device="cpu"' in str(refused.value)
    assert not store.exists()


def test_options_that_make_no_sense(store: Path) -> None:
    def refuse(says: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=says):
            memascend.offload(tiny_models.build("plain"), store=store, host_memory="256MiB", **options)

    refuse("device_memory needs a CUDA device", device_memory="1GiB")
    refuse("is not one of", activations="disk")
    refuse("recompute=True", activations="ssd", recompute=False)
    refuse("device mps is not supported", device="mps")
    refuse("batch_tokens=0", batch_tokens=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_adapters_over_weights_in_their_files(
    on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, tmp_path: Path
) -> None:
    """Frozen weights come from the files to the device; adapters are ordinary parameters there."""
    peft = requirements.package("peft")
    tiny_models.build("llama").save_pretrained(tmp_path / "llama")

    def train(model: nn.Module, told: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        adapters = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
        optimizer = memascend.AdamW(adapters.values(), lr=1e-2)
        losses = []
        with told:
            for step in range(3):
                loss = adapted(**tiny_models.batch("llama", step)).loss
                loss.backward()
                losses.append(loss.detach())
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return losses, {name: each.detach() for name, each in adapters.items()}

    whole = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16)
    expected, weights = train(whole.train().requires_grad_(False), nullcontext())
    model = memascend.from_pretrained(
        tmp_path / "llama",
        store=tmp_path / "store",
        host_memory="64MiB",
        device=SimulatedDevice(),
        device_memory="64MiB",
        activations="ssd",
        frozen="files",
    )
    losses, trained = train(model, Accesses(fake))
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    tiny_models.assert_same_weights(trained, weights)
    stats = memascend.stats(model)
    assert stats["file_bytes_read"] > 0 and stats["store_bytes_used"] < 2**20  # activations

    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    with pytest.raises(memascend.MemascendError, match="stays as it is"):
        weight.data.mul_(2)
    assert torch.equal(weight.detach().clone(), before)
    memascend.close(model)
    del model
    gc.collect()
    fake.assert_clean()


def test_a_budget_that_changes_between_passes(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    def run(model: nn.Module, budgets: tuple[str, ...] = ()) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
        for number in range(6):
            if budgets:
                memascend.set_host_memory(model, budgets[number % len(budgets)])
            model(**tiny_models.batch("llama", number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model = on_device(tiny_models.build("llama"), host_memory="24MiB", host_memory_max="192MiB")
    with Accesses(fake):
        weights = run(model, ("192MiB", "18MiB", "26MiB"))
    assert all(map(torch.equal, weights, run(tiny_models.build("llama"))))
