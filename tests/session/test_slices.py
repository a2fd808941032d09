"""Layers on slices of a batch: the bits of the same slices in memory, whatever else is asked for."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import bit_equality
import peft
import pytest
import tiny_models
import torch
from simulated_device import Accesses
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_cuda import Fake

    Offload = Callable[..., nn.Module]
    Result = tuple[list[torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]

ROWS = 5


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    return BertForMaskedLM(config).train()  # with dropout


def build(architecture: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return bert().to(dtype) if architecture == "bert" else tiny_models.build(architecture, dtype)


def padded(architecture: str, number: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Return a batch whose rows have fewer and fewer tokens."""
    inputs = tiny_models.batch(architecture, number, rows=rows)
    inputs["attention_mask"] = (torch.arange(16) < torch.arange(16, 16 - rows, -1)[:, None]).long()
    return inputs


def train(
    model: nn.Module,
    architecture: str,
    *,
    batch: Callable[..., dict[str, torch.Tensor]] = padded,
    steps: int = 2,
    accumulate: int = 1,
    first: int = 0,
    clip: bool = True,
    context: Callable[[], Any] = nullcontext,
    optimizer: Any = None,
) -> Result:
    """Return the losses, the gradients of the first step, and the weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = memascend.AdamW(trained, lr=3e-3) if optimizer is None else optimizer
    torch.manual_seed(7 + first)
    losses, gradients = [], {}
    for step in range(first, first + steps):
        for micro in range(accumulate):
            with context():
                loss = model(**batch(architecture, step * accumulate + micro)).loss
            loss.backward()
            losses.append(loss.detach().clone())
        if step == first and clip:
            gradients = dict(tiny_models.gradients_of(model))
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, dict(memascend.parameters_of(model))


def assert_same(actual: Result, expected: Result) -> None:
    assert all(torch.isfinite(loss) for loss in expected[0]) and expected[2]
    assert bit_equality.difference(actual, expected) is None


def calls_of(module: nn.Module) -> list[int]:
    """Note how many rows each call of a part of a layer has, from now on."""
    rows: list[int] = []
    module.register_forward_hook(lambda _, args, result: rows.append(len(result)))
    return rows


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5_dropout", "mixtral", "qwen3_moe", "bert", "plain"])
def test_the_bits_are_those_of_the_slices_in_memory(offloaded: Offload, architecture: str) -> None:
    batch = tiny_models.batch if architecture == "plain" else padded
    in_memory = memascend.run_in_slices(build(architecture), 2)
    expected = train(in_memory, architecture, batch=lambda *of: batch(*of, rows=ROWS))
    model = offloaded(build(architecture), micro_batch_size=2)
    assert_same(train(model, architecture, batch=lambda *of: batch(*of, rows=ROWS)), expected)
    assert not any("whole batch" in notice for notice in memascend.stats(model)["notices"])


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({"activations": "recompute"}, "layers.1."),
        ({"activations": "host"}, "layers.0."),
        ({"activations": "ssd"}, ""),
        ({"recompute": False}, "layers.0."),
        ({"durability": "every:2", "gradients": "bfloat16"}, "embed"),
        ({"durability": "none"}, "norm"),
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

    model = made()
    expected = train(memascend.run_in_slices(model, 2), "qwen2")
    assert_same(
        train(
            offloaded(made(), host_memory=tiny_models.smallest_budget(made()), micro_batch_size=2, **options), "qwen2"
        ),
        expected,
    )


def test_states_of_an_encoder_are_put_aside_once(offloaded: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)

    def put_aside(**options: Any) -> int:
        model = offloaded(build("t5"), activations="ssd", **options)
        inputs = memascend.offload_of(model).inputs
        copies: list[Any] = []
        copy_out = inputs.copy_out
        inputs.copy_out = lambda tensor: copies.append(tensor.nbytes) or copy_out(tensor)  # type: ignore[method-assign]
        model(**tiny_models.batch("t5", 0, rows=4)).loss.backward()
        memascend.close(model)
        return sum(copies)

    whole = put_aside(keep_store="replace")
    assert put_aside(keep_store="replace", micro_batch_size=1) == whole > 0


def test_updates_in_the_backward_pass(offloaded: Offload) -> None:
    expected = train(memascend.run_in_slices(build("llama"), 2), "llama", steps=3, clip=False)
    model = offloaded(build("llama"), micro_batch_size=2, update="backward")
    assert_same(train(model, "llama", steps=3, clip=False), expected)


def test_updates_in_the_backward_pass_of_a_device(on_device: Offload, fake: Fake) -> None:
    expected = train(memascend.run_in_slices(build("llama"), 2), "llama", steps=3, clip=False)
    model = on_device(build("llama"), micro_batch_size=2, update="backward", activations="ssd")
    with Accesses(fake):
        actual = train(model, "llama", steps=3, clip=False)
    assert_same(actual, expected)


def test_several_calls_in_a_step(offloaded: Offload) -> None:
    expected = train(memascend.run_in_slices(build("llama"), 2), "llama", accumulate=2)
    assert_same(train(offloaded(build("llama"), micro_batch_size=2), "llama", accumulate=2), expected)


def test_autocast_converts_weights_for_each_slice(offloaded: Offload) -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    in_memory = memascend.run_in_slices(build("llama", torch.float32), 2)
    expected = train(in_memory, "llama", context=autocast)
    model = offloaded(build("llama", torch.float32), micro_batch_size=2)
    assert_same(train(model, "llama", context=autocast), expected)


def test_adapters(offloaded: Offload) -> None:
    def adapted(base: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        with warnings.catch_warnings(action="ignore"):  # a name of transformers that PEFT still uses
            return peft.get_peft_model(base.requires_grad_(False), config)

    in_memory = memascend.run_in_slices(adapted(build("qwen2")), 2)
    expected = train(in_memory, "qwen2")
    assert_same(train(offloaded(adapted(build("qwen2")), micro_batch_size=2), "qwen2"), expected)


def test_a_run_goes_on_with_its_micro_batches(offloaded: Offload, store: Path) -> None:
    in_memory = memascend.run_in_slices(build("llama"), 2)
    optimizer = memascend.AdamW(in_memory.parameters(), lr=3e-3)
    train(in_memory, "llama", optimizer=optimizer)
    expected = train(in_memory, "llama", optimizer=optimizer, first=2)
    model = offloaded(build("llama"), micro_batch_size=2, keep_store=True)
    train(model, "llama")
    memascend.close(model)
    resumed = memascend.resume(store, model=build("llama"), host_memory=tiny_models.smallest_budget(build("llama")))
    try:
        rows = calls_of(resumed.model.get_submodule("model.layers.0.mlp"))
        assert_same(train(resumed.model, "llama", optimizer=resumed.optimizers[0], first=2), expected)
        assert set(rows) == {2, 1}
    finally:
        memascend.close(resumed.model)


class Layers(nn.Module):
    """Layers alone, and a loss with a term for each element."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum() / 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_accumulated_micro_batches(offloaded: Offload, dtype: torch.dtype) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Layers(*(tiny_models.Block(192) for _ in range(3))).to(dtype)

    x = torch.randn(7, 5, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    accumulated, model = made(), offloaded(made(), micro_batch_size=2)
    for part in x.split(2):
        accumulated(part).backward()
    model(x).backward()
    assert (
        bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(accumulated)))
        is None
    )


def test_evaluation(offloaded: Offload) -> None:
    """Slices without a cache; with one, the whole batch, since its entries are for all rows."""
    in_memory, model = memascend.run_in_slices(build("llama"), 2), offloaded(build("llama"), micro_batch_size=2)
    rows = calls_of(model.get_submodule("model.layers.1.mlp"))
    for caches, seen in ((False, {2, 1}), (True, {ROWS})):
        rows.clear()
        with torch.no_grad():
            expected, actual = (m.eval()(**padded("llama", 0), use_cache=caches) for m in (in_memory, model))
        assert bit_equality.same(actual.logits, expected.logits) and seen <= set(rows)
    tokens = [
        m.generate(
            tiny_models.batch("llama", 1, rows=3)["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        for m in (tiny_models.build("llama").eval(), model)
    ]
    assert torch.equal(*tokens)


def test_what_transformers_collects_is_of_the_whole_batch(offloaded: Offload) -> None:
    def collected(model: nn.Module) -> Any:
        return model(
            **padded("mixtral", 0), output_router_logits=True, output_attentions=True, output_hidden_states=True
        )

    def eager() -> Any:
        model: Any = build("mixtral", torch.float32)
        model.set_attn_implementation("eager")
        return model

    whole, actual = collected(eager()), collected(offloaded(eager(), micro_batch_size=2))
    for name in ("router_logits", "attentions", "hidden_states"):
        assert [tensor.shape for tensor in actual[name]] == [tensor.shape for tensor in whole[name]], name
        torch.testing.assert_close(actual[name], whole[name])
    torch.testing.assert_close(actual.aux_loss, whole.aux_loss)
    actual.loss.backward()


# ---- layers that see the whole batch -------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(192), nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Mixing(nn.Module):
    """Each row is changed by the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x - x.mean(0))


class Shifted(nn.Module):
    """Takes a table with a row for each place of the sequence, as many as there are sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)
        self.table = torch.randn(6, 192, generator=torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x + table)


class Summing(nn.Module):
    """Returns a number of the whole batch too, which belongs to no row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.linear(x), x.square().sum()


class Writing(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) + self.linear(x)


class Around(nn.Module):
    """Calls layers with more than the hidden states, or with other dimensions first."""

    def __init__(self, *layers: nn.Module, how: str = "") -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(layers), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1) if self.how == "sequence first" else x
        total = torch.zeros(())
        for layer in self.layers:
            x = layer(x, layer.table) if self.how == "table" else layer(x)
            if isinstance(x, tuple):
                x, more = x
                total = total + more
        return x.square().sum() / 1000 + total


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_within_a_checkpoint_of_the_program(offloaded: Offload, recompute: bool, reentrant: bool) -> None:
    """The backward pass calls them again, outside of any call of the model."""

    class Checkpointed(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.float().square().sum() / 1000

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed(*(tiny_models.Block(192) for _ in range(3)))

    x = torch.randn(5, 4, 192, generator=torch.Generator().manual_seed(3)).requires_grad_()
    in_memory, model = memascend.run_in_slices(made(), 2), offloaded(made(), micro_batch_size=2, recompute=recompute)
    rows = calls_of(model.get_submodule("layers.1.mlp"))
    for each in (in_memory, model):
        each(x).backward()
    assert (
        bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(in_memory)))
        is None
    )
    assert set(rows[-3:]) == {1, 2}


def encoder(batch_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(192, 4, 256, dropout=0.0, batch_first=batch_first)


@pytest.mark.parametrize(
    ("layer", "how", "length", "why"),
    [
        (Normed, "", 4, "statistics of a whole batch"),
        (Mixing, "", 4, "not what it returns for each of them alone"),
        (Shifted, "table", 6, "fails on two rows of the batch|not what it returns"),
        (Summing, "", 4, "not what it returns for each of them alone"),
        (Writing, "", 4, "it changes an input in place"),
        (encoder, "sequence first", 4, "its first input has not the 6 rows of the batch first"),
        (encoder, "sequence first", 6, "not what it returns for each of them alone"),
        (encoder, "sequence first", 12, "not what it returns for each of them alone"),
    ],
)
def test_layers_that_need_the_whole_batch_get_it(
    offloaded: Offload, layer: Callable[[], nn.Module], how: str, length: int, why: str
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Around(layer(), layer(), how=how)

    x = torch.randn(6, length, 192, generator=torch.Generator().manual_seed(3))
    whole, model = made(), offloaded(made(), micro_batch_size=1, recompute=layer is not Writing)
    expected, actual = whole(x.clone()), model(x.clone())
    expected.backward()
    actual.backward()
    assert bit_equality.same(actual.detach(), expected.detach())
    assert bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(whole))) is None
    notices = [notice for notice in memascend.stats(model)["notices"] if "whole batch" in notice]
    assert len(notices) == 1 and any(part in notices[0] for part in why.split("|"))
    assert type(made().layers[0]).__name__ in notices[0]


def test_a_batch_first_layer_of_pytorch(offloaded: Offload) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Around(encoder(batch_first=True), encoder(batch_first=True))

    x = torch.randn(6, 6, 192, generator=torch.Generator().manual_seed(3))
    in_memory, model = memascend.run_in_slices(made(), 1), offloaded(made(), micro_batch_size=1)
    for each in (in_memory, model):
        each(x).backward()
    assert (
        bit_equality.difference(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(in_memory)))
        is None
    )
    assert not memascend.stats(model)["notices"]


@pytest.mark.parametrize("case", ["accumulated", "a step each", "in memory"])
def test_accumulation_is_said_once_where_each_pass_moves_bytes(offloaded: Offload, case: str) -> None:
    model = build("llama")
    budget = {} if case == "in memory" else {"host_memory": tiny_models.smallest_budget(model)}
    model = offloaded(model, **budget)
    train(model, "llama", accumulate=1 if case == "a step each" else 2)
    said = [notice for notice in memascend.stats(model)["notices"] if "accumulate" in notice]
    assert len(said) == (case == "accumulated")
    assert all("micro_batch_size=K" in notice and "accumulate_in_layers=True" in notice for notice in said)


def test_a_trial_leaves_nothing_behind(offloaded: Offload) -> None:
    """Neither random numbers that are drawn nor buffers that are written nor modes."""

    class Counting(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(192, 192), nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return x + self.dropout(self.linear(x)) + 0 * torch.rand(())

    model = offloaded(Layers(Counting(), Counting()), micro_batch_size=3)
    losses = []
    for _ in range(2):  # the first call has the trial
        torch.manual_seed(0)
        losses.append(model(torch.ones(6, 2, 192)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert [layer.seen.item() for layer in model.layers] == [12, 12]
    assert all(layer.training and layer.dropout.training for layer in model.layers)


def test_a_copy_of_a_model_in_memory_computes_with_its_own_weights() -> None:
    torch.manual_seed(0)
    model = memascend.run_in_slices(Layers(*(tiny_models.Block(192) for _ in range(2))), 1)
    copied, x = copy.deepcopy(model), torch.randn(3, 4, 192)
    assert torch.equal(model(x), copied(x))
    with torch.no_grad():
        model.layers[0].mlp[2].weight.zero_()
    assert not torch.equal(model(x), copied(x))
    with pytest.raises(memascend.MemascendError, match="already"):
        memascend.run_in_slices(copied, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_that_no_micro_batch_has(offloaded: Offload, size: Any) -> None:
    with pytest.raises(ValueError, match="micro_batch_size="):
        offloaded(build("plain"), micro_batch_size=size)
    with pytest.raises(ValueError, match="micro_batch_size="):
        memascend.run_in_slices(build("plain"), size)


# ---- traffic -------------------------------------------------------------------------------------------------------


def test_a_step_moves_no_more_for_more_micro_batches(offloaded: Offload) -> None:
    least = tiny_models.smallest_budget(build("llama"))

    def moved(count: int) -> list[int]:
        """Return the bytes that the second step reads and writes, its update included."""
        model = offloaded(
            build("llama"), host_memory=least, micro_batch_size=1, activations="recompute", keep_store="replace"
        )
        optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
        counted: list[dict[str, Any]] = []
        for step in range(2):
            counted = [*counted[-1:], memascend.stats(model)]
            train(model, "llama", batch=lambda *of: padded(*of, rows=count), steps=1, first=step, optimizer=optimizer)
            memascend.flush(model)
        counted = [*counted[-1:], memascend.stats(model)]
        memascend.close(model)
        return [counted[1][name] - counted[0][name] for name in ("ssd_bytes_read", "ssd_bytes_written")]

    once = moved(1)
    assert min(once) > 2 * 1_000_000
    for count in (4, 8):
        assert all(more <= 1.05 * one for more, one in zip(moved(count), once, strict=True)), count
