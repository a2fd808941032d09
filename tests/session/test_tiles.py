"""Parts of layers on tiles of the sequence: the bits of the same tiles in memory, and no wide tensor of it all."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "all", "0"])
def test_sizes_that_no_tile_has(offloaded: Offload, size: Any) -> None:
    with pytest.raises(ValueError, match="tile_tokens="):
        offloaded(build("plain"), tile_tokens=size)
    with pytest.raises(ValueError, match="tile_tokens="):
        memascend.run_in_tiles(build("plain"), size)
