"""Parts of layers on tiles of the sequence: the bits of the same tiles in memory, and no wide tensor of it all."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from typing import TYPE_CHECKING, Any

import bit_equality
import faults
import peft
import pytest
import tiny_models
import torch
from simulated_device import Accesses
from test_slices import Layers, assert_same, build, calls_of, padded, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memascend
from memascend.slicing.tiles import Whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_cuda import Fake
    from test_slices import Offload

#: Tokens of a tile; a batch has five sequences of 16, so that the last tile is smaller.
TILE = 24


class Widest(TorchDispatchMode):
    """The most tokens of a tensor (sequences, tokens, `width`)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 3 and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.shape[:-1].numel())
        return result


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5_dropout", "mixtral", "qwen3_moe", "bert", "plain"])
def test_the_bits_are_those_of_the_tiles_in_memory(offloaded: Offload, architecture: str) -> None:
    def batch(*of: Any) -> dict[str, torch.Tensor]:
        return (tiny_models.batch if architecture == "plain" else padded)(*of, rows=5)

    in_memory = memascend.run_in_tiles(build(architecture), TILE)
    expected = train(in_memory, architecture, batch=batch)
    model = offloaded(build(architecture), tile_tokens=TILE)
    assert_same(train(model, architecture, batch=batch), expected)
    assert [notice for notice in memascend.stats(model)["notices"] if "tile_tokens" in notice] == []


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({"activations": "recompute", "tile_tokens": 24}, "layers.1."),
        ({"activations": "host", "micro_batch_size": 2}, "layers.0."),
        ({"activations": "ssd", "update": "backward"}, ""),
        ({"recompute": False}, "mlp"),
        ({"recompute": False, "micro_batch_size": 3}, "norm"),
    ],
    ids=str,
)
def test_options(offloaded: Offload, options: dict[str, Any], frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)

    def made() -> nn.Module:
        model = build("qwen2")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))
        return model

    in_memory = memascend.run_in_tiles(made(), TILE)
    if rows := options.get("micro_batch_size"):
        memascend.run_in_slices(in_memory, rows)
    clip = "update" not in options
    expected = train(in_memory, "qwen2", clip=clip)
    options = {"tile_tokens": TILE} | options
    if clip:
        options["host_memory"] = tiny_models.smallest_budget(made())
    assert_same(train(offloaded(made(), **options), "qwen2", clip=clip), expected)


def test_on_a_device(on_device: Offload, fake: Fake) -> None:
    expected = train(memascend.run_in_tiles(build("llama"), TILE), "llama")
    model = on_device(build("llama"), tile_tokens=TILE, activations="ssd")
    with Accesses(fake):
        actual = train(model, "llama")
    assert_same(actual, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_norm_that_is_compiled_runs_on_tiles(offloaded: Offload) -> None:
    expected = train(memascend.run_in_tiles(build("llama"), TILE), "llama")
    model = offloaded(build("llama"), tile_tokens=TILE)
    model.get_submodule("model.norm").compile(backend="eager")
    assert_same(train(model, "llama"), expected)


def test_autocast_converts_weights_for_each_tile(offloaded: Offload) -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    expected = train(memascend.run_in_tiles(build("llama", torch.float32), TILE), "llama", context=autocast)
    model = offloaded(build("llama", torch.float32), tile_tokens=TILE)
    assert_same(train(model, "llama", context=autocast), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_with_dropout(offloaded: Offload) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(build("qwen2").requires_grad_(False), config)

    expected = train(memascend.run_in_tiles(adapted(), TILE), "qwen2")
    assert_same(train(offloaded(adapted(), tile_tokens=TILE), "qwen2"), expected)


def test_a_run_goes_on_with_its_tiles(offloaded: Offload, store: Path) -> None:
    in_memory = memascend.run_in_tiles(build("llama"), TILE)
    optimizer = memascend.AdamW(in_memory.parameters(), lr=3e-3)
    train(in_memory, "llama", optimizer=optimizer)
    expected = train(in_memory, "llama", optimizer=optimizer, first=2)
    model = offloaded(build("llama"), tile_tokens=TILE, keep_store=True)
    train(model, "llama")
    memascend.close(model)
    resumed = memascend.resume(store, model=build("llama"), host_memory=tiny_models.smallest_budget(build("llama")))
    try:
        assert_same(train(resumed.model, "llama", optimizer=resumed.optimizers[0], first=2), expected)
    finally:
        memascend.close(resumed.model)


def train_until_killed(pipe: Any, store: Path) -> None:
    """Take two steps, and be killed in the backward pass of a third, after the third of nine slices and tiles."""
    cut = {"micro_batch_size": 2, "tile_tokens": TILE}
    model = memascend.offload(build("llama"), store=store, host_memory="64MiB", allocator="pageable", **cut)
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    train(model, "llama", optimizer=optimizer)
    calls: list[Any] = []
    weight = model.get_submodule("model.layers.1.mlp.down_proj")
    weight.register_forward_hook(lambda *of: calls.append(of) if torch.is_grad_enabled() else None)
    weight.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 3 else None)
    train(model, "llama", optimizer=optimizer, steps=1, first=2)
    pipe.send("not killed")


def test_a_killed_run_goes_on_with_its_slices_and_tiles(store: Path, room: Path) -> None:
    in_memory = memascend.run_in_slices(memascend.run_in_tiles(build("llama"), TILE), 2)
    optimizer = memascend.AdamW(in_memory.parameters(), lr=3e-3)
    train(in_memory, "llama", optimizer=optimizer)
    with faults.Child(room, train_until_killed, store) as child:
        assert child.wait(120).code == -signal.SIGKILL
    resumed = memascend.resume(store, model=build("llama"), host_memory="64MiB", allocator="pageable")
    try:
        # The commit of the second step is under way by the end of the third's first backward pass.
        if resumed.steps == 1:
            in_memory = memascend.run_in_slices(memascend.run_in_tiles(build("llama"), TILE), 2)
            optimizer = memascend.AdamW(in_memory.parameters(), lr=3e-3)
            train(in_memory, "llama", optimizer=optimizer, steps=1)
        expected = train(in_memory, "llama", optimizer=optimizer, first=resumed.steps)
        optimizer = resumed.optimizers[0]
        assert_same(train(resumed.model, "llama", optimizer=optimizer, first=resumed.steps), expected)
    finally:
        memascend.close(resumed.model)


@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"micro_batch_size": 2}], ids=str)
def test_no_wide_tensor_has_more_than_a_tile(offloaded: Offload, options: dict[str, Any]) -> None:
    """Neither in the forward pass nor in the backward pass; nor the norms', which are converted to float32."""
    model = offloaded(build("llama"), tile_tokens=TILE, **options)
    model(**padded("llama", 0)).loss.backward()  # with the trials
    with Widest(512) as widest:
        model(**padded("llama", 0)).loss.backward()
    assert widest.rows == TILE
    with Widest(512) as widest, torch.no_grad():
        model.eval()(**padded("llama", 0), use_cache=False)
    assert widest.rows == TILE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_near_those_without_tiles(dtype: torch.dtype) -> None:
    """By roundings: weights' gradients are sums over tiles, in float32."""

    def gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(**padded("llama", 0)).loss
        loss.backward()
        return loss.detach(), dict(tiny_models.gradients_of(model))

    (loss, whole), (tiled_loss, tiled) = (
        gradients(model) for model in (build("llama", dtype), memascend.run_in_tiles(build("llama", dtype), 8))
    )
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(tiled_loss, loss, rtol=close, atol=0)
    for name, gradient in whole.items():
        difference = (tiled[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert difference < (1e-5 if dtype == torch.float32 else 2e-2), name


def test_sums_of_many_tiles_lose_nothing_to_bfloat16() -> None:
    """A sum in bfloat16 stops growing after 256 equal terms."""

    def made() -> nn.Module:
        model = Layers(tiny_models.Block(64), tiny_models.Block(64)).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.detach().fill_(0.01)
        return model

    x = torch.ones(1, 4096, 64, dtype=torch.bfloat16)
    whole, tiled = made(), memascend.run_in_tiles(made(), 1)
    for model in (whole, tiled):
        model.layers[0].mlp(x).sum().backward()
    for name in ("layers.0.mlp.0.weight", "layers.0.mlp.2.weight", "layers.0.mlp.2.bias"):
        expected, actual = (model.get_parameter(name).grad for model in (whole, tiled))
        torch.testing.assert_close(actual, expected)


def test_tokens_that_have_no_gradient_have_zeros() -> None:
    """Of experts that no token of a tile is sent to, for one."""
    whole = Whole(torch.empty(2, 3, 4))
    whole.put(None, 0, 2)
    assert whole.gradient is None
    whole.put(torch.ones(1, 2, 4), 2, 4)
    assert whole.gradient is not None
    whole.gradient[1, 1:] = 7  # the former contents of the memory
    whole.put(None, 4, 6)
    assert whole.gradient.flatten(0, 1)[:, 0].tolist() == [0, 0, 1, 1, 0, 0]


def test_a_programs_hooks_on_weights_are_called_once(offloaded: Offload) -> None:
    model = offloaded(build("llama"), tile_tokens=TILE)
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    seen: list[Any] = []
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    model(**padded("llama", 0)).loss.backward()
    assert seen == [weight.shape]


def test_a_router_that_transformers_collects_sees_all_tokens(offloaded: Offload) -> None:
    """For its auxiliary loss; the experts run on tiles all the same."""

    def made() -> nn.Module:
        model: Any = build("mixtral", torch.float32)
        model.config.output_router_logits = True
        return model

    in_memory, model = memascend.run_in_tiles(made(), TILE), offloaded(made(), tile_tokens=TILE)
    rows = calls_of(model.get_submodule("model.layers.0.mlp.experts"))
    outputs = [each(**padded("mixtral", 0)) for each in (in_memory, model)]
    for output in outputs:
        output.loss.backward()
    whole = made()(**padded("mixtral", 0))
    torch.testing.assert_close(outputs[0].aux_loss, whole.aux_loss)
    assert bit_equality.same(*(output.aux_loss.detach() for output in outputs))
    assert (
        bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(in_memory)))
        is None
    )
    assert [logits.shape for logits in outputs[1].router_logits] == [logits.shape for logits in whole.router_logits]
    assert rows


# ---- parts that see the whole sequence -----------------------------------------------------------------------------


class Part(nn.Module):
    """A wide part, with something between its two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x).relu()))


class Normed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Shifting(Part):
    """A causal convolution, of each token and the one before."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Far(Part):
    """Each token sees the one 100 before it."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.pad(x, (0, 0, 100, 0))[:, :-100]


class Centred(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class Positioned(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()


class Limited(Part):
    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 10_000


class Counting(Part):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean()
        return x


class Writing(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Lending(Part):
    """Computes with a weight that is not registered here."""

    lent: list[nn.Parameter]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.lent[0]


class Summing(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum((0, 1)) + 0 * x


class OverRows(Part):
    """Sequences meet, at each position."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * x.mean(0, keepdim=True)


class Awaking(Shifting):
    """Tokens meet once a weight is no longer zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(256))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix * (super().between(x) - x)


class Closed(Shifting):
    """As models begin whose layers are identities at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)


class CentredInTraining(Centred):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) if self.training else x


class CountingInTraining(Counting):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) if self.training else x


class Crowded(Part):
    """Experts take no more than two thirds of the tokens, which is enough for random ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[..., :1] > x[..., 1:2]
        places = [chosen.flatten().cumsum(0).view_as(chosen) for chosen in (first, ~first)]
        return super().forward(x) * (torch.where(first, *places) <= 180)


class DropPath(nn.Module):
    pass


class Stochastic(Part):
    def __init__(self) -> None:
        super().__init__()
        self.drop = DropPath()


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.gain, self.part = nn.Parameter(torch.ones(256)), part
        if isinstance(part, Lending):
            part.lent = [self.gain]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x.clone()) * self.gain[:64]


def gradients_of_whole_sequences(offloaded: Offload, made: Callable[[], nn.Module]) -> nn.Module:
    """Offload a model for tiles, train a batch, compare its gradients with a model's that has none, and return it."""
    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(3))
    whole, model = made(), offloaded(made(), tile_tokens=30)
    for each in (whole, model):
        each(x).backward()
    assert bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(whole))) is None
    return model


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Normed, "BatchNorm1d takes the statistics of all tokens"),
        (Shifting, "depends on other tokens"),
        (Far, "depends on other tokens"),
        (Centred, "depends on other tokens"),
        (Positioned, "depends on other tokens"),
        (Limited, "has a capacity"),
        (Counting, r"keeps something of each call \(last\)"),
        (Writing, "changes an input in place"),
        (Lending, "trained weights that are not its own"),
        (Summing, "depends on other tokens"),
        (OverRows, "depends on other tokens"),
        (Awaking, "the gradients of what it returns for a token depend on other tokens"),
        (Closed, "the gradients of what it returns for a token depend on other tokens"),
        (CentredInTraining, "depends on other tokens"),
        (CountingInTraining, r"keeps something of each call \(last\)"),
        (Crowded, "depends on other tokens"),
        (Stochastic, "its DropPath drops whole sequences"),
    ],
)
def test_parts_that_need_the_whole_sequence_get_it(offloaded: Offload, part: Callable[[], nn.Module], why: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Residual(part()), Residual(part()))

    model = gradients_of_whole_sequences(offloaded, made)
    (notice,) = [notice for notice in memascend.stats(model)["notices"] if "tile_tokens" in notice]
    assert "Residual runs on whole sequences" in notice
    assert re.search(why, notice)


def test_a_part_that_writes_to_its_input_at_times_is_refused(offloaded: Offload) -> None:
    class Jittered(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5) if x.abs().max() > 50 else x)

    model = offloaded(Layers(Residual(Jittered()), Residual(Jittered())), tile_tokens=30)
    with pytest.raises(memascend.MemascendError, match=r"Jittered changes its inputs in place.*tile_tokens"):
        model(torch.randn(2, 150, 64) * 100)


def test_parts_of_one_class_may_differ(offloaded: Offload) -> None:
    class Perhaps(Shifting):
        def __init__(self, shifts: bool) -> None:
            super().__init__()
            self.shifts = shifts

        def between(self, x: torch.Tensor) -> torch.Tensor:
            return super().between(x) if self.shifts else x

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Residual(Perhaps(False)), Residual(Perhaps(True)))

    x = torch.randn(2, 150, 64, generator=torch.Generator().manual_seed(3))
    whole, in_memory, model = made(), memascend.run_in_tiles(made(), 30), offloaded(made(), tile_tokens=30)
    for each in (whole, in_memory, model):
        each(x).backward()
    gradients = [dict(tiny_models.gradients_of(each)) for each in (whole, in_memory, model)]
    assert bit_equality.difference(gradients[2], gradients[1]) is None
    torch.testing.assert_close(gradients[1], gradients[0])


class Conditioned(Part):
    """Computes with a result of its layer."""

    scale: torch.Tensor

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Conditioning(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.gain, self.part = nn.Parameter(torch.ones(256), requires_grad=trained), Conditioned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.scale = self.gain * 2
        return x + self.part(x)


@pytest.mark.parametrize("where", ["in memory", "on SSD"])
@pytest.mark.parametrize("frozen", ["nothing", "the part", "the gain at first"])
def test_what_gets_a_gradient_later_is_not_left_out(offloaded: Offload, where: str, frozen: str) -> None:
    """A part is tried where nothing wants gradients: in evaluation, or before a weight is trained."""
    model = Layers(Conditioning(frozen != "the gain at first"), Conditioning(frozen != "the gain at first"))
    if frozen == "the part":
        for layer in model.layers:
            layer.part.requires_grad_(False)
    model = memascend.run_in_tiles(model, 30) if where == "in memory" else offloaded(model, tile_tokens=30)
    x = torch.randn(2, 150, 64)
    with torch.no_grad():
        model(x)
    model.get_parameter("layers.0.gain").requires_grad_(True)
    with pytest.raises(memascend.MemascendError, match=r"Conditioned computes with trained weights .*tile_tokens"):
        model(x).backward()


def test_numbers_and_complex_outputs_that_no_tile_gives(offloaded: Offload) -> None:
    class Numbering(Part):
        """Counts the tokens before each."""

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = super().forward(x)
            return wide, (wide[..., :1] > 0).flatten().cumsum(0).view(*wide.shape[:2], 1)

    class Turning(Part):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = super().forward(x)
            return wide, torch.complex(wide[..., :1], wide[..., 1:2])

    class Layer(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide, others = self.part(x)
            return x + wide * (others.abs() if others.is_complex() else others / 100)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Layer(Numbering()), Layer(Turning()))

    gradients_of_whole_sequences(offloaded, made)


def test_a_thread_inside_a_part_leaves_others_their_tiles() -> None:
    """Threads may share a model in memory."""
    model = memascend.run_in_tiles(Layers(Residual(Part()), Residual(Part())), 30)
    x = torch.randn(1, 90, 64)
    model(x)
    rows: list[int] = []

    def other(*_: Any) -> None:
        handle.remove()
        model.layers[1].part.up.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[1]))
        thread = threading.Thread(target=model.layers[1], args=(x,))
        thread.start()
        thread.join()

    handle = model.layers[0].part.up.register_forward_hook(other)
    model.layers[0](x)
    assert rows == [30, 30, 30]


def test_a_trial_leaves_nothing_behind(offloaded: Offload) -> None:
    """Neither random numbers that are drawn nor modes."""

    class Dropping(Part):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    model = offloaded(Layers(Residual(Dropping()), Residual(Dropping())), tile_tokens=30)
    losses = []
    for _ in range(2):  # the first call has the trial
        torch.manual_seed(0)
        losses.append(model(torch.ones(2, 40, 64)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(module.training for module in model.modules())


def test_the_backward_pass_drops_what_the_forward_pass_has_dropped() -> None:
    """Also where the program has switched to evaluation, and has drawn numbers, before the backward pass."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x.exp() * self.scale, 0.5, self.training)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Dropping()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = memascend.run_in_tiles(Model(), 8)
    x = torch.randn(1, 30, 64).requires_grad_()
    outputs = model(x)
    assert 0.3 < (outputs == 0).float().mean() < 0.7
    model.eval()
    drawn = torch.rand(3), torch.get_rng_state()
    outputs.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, outputs.detach())  # the derivative of exp
    assert torch.equal(torch.get_rng_state(), drawn[1])


def test_two_dimensions_and_outputs_that_are_several(offloaded: Offload) -> None:
    """Tokens may come in one dimension; an output that is not used has no gradient."""

    class Pair(Part):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
            wide = super().forward(x) * scale
            return {"used": wide, "scores": wide.argmax(-1, keepdim=True), "unused": wide[..., :3].exp()}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = self.part(x.flatten(0, 1), scale=2.0)
            assert outputs["scores"].shape == (x.shape[:2].numel(), 1)
            return x + outputs["used"].view(x.shape)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(Layer(), Layer())

    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(3))
    whole, in_memory, model = made(), memascend.run_in_tiles(made(), 30), offloaded(made(), tile_tokens=30)
    for each in (whole, in_memory, model):
        each(x).backward()
    gradients = [dict(tiny_models.gradients_of(each)) for each in (whole, in_memory, model)]
    assert bit_equality.difference(gradients[2], gradients[1]) is None
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not memascend.stats(model)["notices"]


def test_a_copy_of_a_model_in_memory_computes_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model = memascend.run_in_tiles(Layers(Residual(Part()), Residual(Part())), 8)
    copied, x = copy.deepcopy(model), torch.randn(3, 4, 64)
    assert torch.equal(model(x), copied(x))
    with torch.no_grad():
        model.layers[0].part.down.weight.zero_()
    assert not torch.equal(model(x), copied(x))
    with pytest.raises(memascend.MemascendError, match="already"):
        memascend.run_in_tiles(copied, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "all", "0"])
def test_sizes_that_no_tile_has(offloaded: Offload, size: Any) -> None:
    with pytest.raises(ValueError, match="tile_tokens="):
        offloaded(build("plain"), tile_tokens=size)
    with pytest.raises(ValueError, match="tile_tokens="):
        memascend.run_in_tiles(build("plain"), size)
