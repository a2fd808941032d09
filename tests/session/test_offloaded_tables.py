"""Tables are read by blocks and by rows, and give the bits of the same functions in memory."""

from __future__ import annotations

import copy
import errno
import logging
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock

import bit_equality
import pytest
import requirements
import tiny_models
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

import memascend
from memascend.formats import safetensors
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan
from memascend.streaming.blocks import BlockReader
from memascend.streaming.tables import OffloadedTable
from memascend.vocabulary import chunked_loss, logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("small_tables")


@pytest.fixture
def offload(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., nn.Module]:
    """Offload a model with the least memory; it is closed at the end of the test."""

    def make(model: nn.Module, **options: Any) -> nn.Module:
        options = {"host_memory": tiny_models.smallest_budget(model), "keep_store": False} | options
        memascend.offload(model, store=tmp_path / "store", **options)
        request.addfinalizer(lambda: memascend.close(model))
        return model

    return make


def streamed(model: nn.Module) -> list[str]:
    """Return the names of the tables that are read by blocks and rows."""
    session = model._memascend
    return [unit.name for unit in session.units if session.streamer.is_streamed(unit)]


@contextmanager
def counting_heads() -> Iterator[list[int]]:
    """Collect the rows of the heads whose logits are computed."""
    computed: list[int] = []
    compute = logits._Head.compute

    def collect(head: Any) -> torch.Tensor:
        computed.append(head.table.rows)
        return compute(head)

    with mock.patch.object(logits._Head, "compute", collect):
        yield computed


#: Models that do something to their logits before the loss.
STEPPING: dict[str, Callable[..., nn.Module]] = {
    "soft cap": lambda **tied: Gemma2ForCausalLM(
        Gemma2Config(**tiny_models.SMALL_DECODER | tied, head_dim=32, final_logit_softcapping=5.0)
    ),
    "scale": lambda **tied: CohereForCausalLM(CohereConfig(**tiny_models.SMALL_DECODER | tied, logit_scale=0.25)),
    "division": lambda **tied: GraniteForCausalLM(
        GraniteConfig(**tiny_models.SMALL_DECODER | tied, logits_scaling=4.0)
    ),
}


def check(offload: Callable[..., nn.Module], architecture: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Train in memory with the same loss, and offloaded, and compare; return the model, still open."""
    where = options.pop("where", {})
    build = options.pop("build", lambda: tiny_models.build(architecture, dtype))
    prepare = options.pop("prepare", lambda model: None)
    runs = []
    fused = where.get("fused_loss", "auto")
    for place in (lambda model: memascend.fuse_loss(model, fused), lambda model: offload(model, **where)):
        model = build()
        prepare(model)
        place(model)
        runs.append(tiny_models.train(model, architecture, **options))
    tiny_models.assert_same(runs[1], runs[0])
    return model


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma", "t5", "plain"])
def test_training_has_the_bits_of_memory(
    offload: Callable[..., nn.Module], architecture: str, dtype: torch.dtype
) -> None:
    where = {"fused_loss": True} if architecture == "plain" else {}
    model = check(offload, architecture, dtype, where=where, generate=architecture in ("llama", "gpt2"))
    assert streamed(model), "no table was read by blocks, so this proves nothing"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps", STEPPING)
def test_logits_that_the_model_changes(offload: Callable[..., nn.Module], steps: str, tied: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return STEPPING[steps](tie_word_embeddings=tied).train()

    model = check(offload, "mistral", torch.float32, build=build, generate=tied)
    assert streamed(model) == ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    with counting_heads() as computed:
        model(**tiny_models.batch("mistral", 0)).loss.backward()
    assert not computed, "the logits were whole"


def test_a_table_is_whole_where_the_budget_has_room(offload: Callable[..., nn.Module]) -> None:
    model = check(offload, "llama", torch.bfloat16, where={"host_memory": "256MiB"})
    assert not streamed(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_of_several_passes_add_up(offload: Callable[..., nn.Module], architecture: str) -> None:
    assert streamed(check(offload, architecture, torch.bfloat16, accumulate=3))


def test_training_has_no_table_in_memory(offload: Callable[..., nn.Module]) -> None:
    model = offload(tiny_models.build("gpt2"))
    optimizer = memascend.AdamW(model.parameters(), lr=0.1)
    for number in range(2):
        tiny_models.step(model, optimizer, "gpt2", number)
    memascend.flush(model)
    assert memascend.stats(model)["host_bytes_outside_most"] == 0


@pytest.mark.parametrize(
    ("architecture", "frozen"),
    [
        ("llama", "embed_tokens"),
        ("llama", "lm_head"),
        ("llama", "embed_tokens lm_head"),
        ("gpt2", "wte"),
        ("t5", "shared"),
    ],
)
def test_frozen_tables(offload: Callable[..., nn.Module], architecture: str, frozen: str) -> None:
    def freeze(model: nn.Module) -> None:
        for name in frozen.split():
            (weight,) = (p for key, p in model.named_parameters() if name in key)
            weight.requires_grad_(False)

    assert streamed(check(offload, architecture, torch.float32, prepare=freeze))


def test_lookups_are_pytorchs_own(offload: Callable[..., nn.Module]) -> None:
    """With fused_loss=False heads are whole, and a model has PyTorch's bits; its embedding is looked up by rows."""
    expected, model = tiny_models.build("llama"), tiny_models.build("llama")
    offload(model, fused_loss=False, host_memory="64MiB")
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(expected, "llama"))


def test_a_lookup_reads_rows_and_not_the_table(offload: Callable[..., nn.Module]) -> None:
    model = offload(tiny_models.build("llama", torch.float32))
    embedding = model.model.embed_tokens
    weight = dict(memascend.parameters_of(model))["model.embed_tokens.weight"]
    with torch.no_grad():
        embedding(torch.tensor([[2, 901]]))  # the first row of each MiB has the MiB compared
    before = memascend.stats(model)["ssd_bytes_read"]
    ids = torch.tensor([[3, 900, 3, 17]])
    with torch.no_grad():
        assert torch.equal(embedding(ids), F.embedding(ids, weight))
    read = memascend.stats(model)["ssd_bytes_read"] - before
    assert 0 < read < weight.nbytes / 20  # with the units read ahead


def test_the_loss_is_that_of_transformers(offload: Callable[..., nn.Module]) -> None:
    expected, model = tiny_models.build("gemma", torch.float32), tiny_models.build("gemma", torch.float32)
    offload(model)
    losses = [run(**tiny_models.batch("gemma", 0)).loss for run in (expected, model)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-6)
    for (name, ours), (_, theirs) in zip(
        tiny_models.gradients_of(model), tiny_models.gradients_of(expected), strict=True
    ):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


def test_logits_can_be_used(offload: Callable[..., nn.Module]) -> None:
    """A loss of one's own gets logits, and their gradients reach both tables."""
    runs = [
        memascend.fuse_loss(tiny_models.build("llama", torch.float32)),
        offload(tiny_models.build("llama", torch.float32)),
    ]
    gradients = []
    for model in runs:
        logits = model(input_ids=tiny_models.batch("llama", 0)["input_ids"]).logits
        (logits.softmax(-1)[..., 5].sum() + logits[:, -1].logsumexp(-1).sum()).backward()
        gradients.append(dict(tiny_models.gradients_of(model)))
    assert not bit_equality.differing(gradients[1], gradients[0])
    assert gradients[0]["lm_head.weight"] is not None


def test_what_was_looked_up_is_written_in_place(offload: Callable[..., nn.Module]) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(1024, 128), nn.Embedding(64, 128)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(ids)
            hidden += self.positions(torch.arange(ids.shape[1]))
            return hidden.mul_(3.0)

    torch.manual_seed(0)
    expected = Embedded()
    model = offload(copy.deepcopy(expected))
    assert streamed(model)
    for run in (expected, model):
        run(tiny_models.batch("gpt2", 0)["input_ids"]).square().mean().backward()
    assert not bit_equality.differing(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected)))


def test_logits_of_a_head_with_a_bias_are_read_after_the_pass(offload: Callable[..., nn.Module]) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1024, 128), nn.Linear(128, 1024)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    torch.manual_seed(0)
    expected = Biased()
    runs = [memascend.fuse_loss(copy.deepcopy(expected)), offload(expected)]
    assert streamed(runs[1])
    ids = tiny_models.batch("gpt2", 0)["input_ids"]
    results = []
    for model in runs:
        with torch.no_grad():
            values = model(ids).clone()
        logits = model(ids)
        logits.square().mean().backward()
        results.append({"no_grad": values, "logits": logits.detach(), **dict(tiny_models.gradients_of(model))})
    assert results[0]["no_grad"].isfinite().all()
    assert not bit_equality.differing(results[1], results[0])


def test_code_that_indexes_the_weight_gets_it_whole(
    offload: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    class Indexing(tiny_models.Plain):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            output = super().forward(input_ids, labels)
            output.loss = output.loss + self.embedding.weight[:7].float().square().mean()
            return output

    torch.manual_seed(0)
    expected = Indexing()
    torch.manual_seed(0)
    model = offload(Indexing())
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            losses = []
            for run in (expected, model):
                optimizer = memascend.SGD(run.parameters(), lr=0.1)
                losses.append(tiny_models.step(run, optimizer, "plain", step))
            assert torch.equal(*losses)
    assert len([record for record in caplog.records if "embedding is used as a whole" in record.getMessage()]) == 1
    assert memascend.stats(model)["host_bytes_outside"] == 0


class Unusual(tiny_models.Plain):
    """Uses the weights of its embedding and head as no module of PyTorch does, and returns `logits`."""

    logits: Callable[[Unusual, torch.Tensor], torch.Tensor]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embedding(input_ids) @ self.mix + self.shift
        logits = self.logits(self.tail(self.layers[0](x)))
        loss = None if labels is None else F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def write_and_look(model: Unusual, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.head.weight[3] += 0.01
    return model.head(x)


def checkpointed(model: Unusual, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.head, x, use_reentrant=False)


USES: dict[str, Callable[[Unusual, torch.Tensor], torch.Tensor]] = {
    "as it is": lambda model, x: model.head(x),
    "by keywords": lambda model, x: F.linear(input=x, weight=model.head.weight, bias=model.head.bias),
    "product": lambda model, x: x @ model.head.weight.t() + model.head.bias,
    "read before the head": lambda model, x: model.head(x + model.head.weight[:7].mean(0)),
    "embedding as a head": lambda model, x: F.linear(x, model.embedding.weight),
    "product with an embedding": lambda model, x: torch.einsum("btw,vw->btv", x, model.embedding.weight),
    "normalized": lambda model, x: F.linear(x, F.normalize(model.head.weight, dim=1)),
    "rows of the head": lambda model, x: F.linear(x, model.head.weight[:2040]),
    "written to": write_and_look,
    "checkpointed": checkpointed,
}


@pytest.mark.parametrize("use", USES)
def test_models_that_use_their_tables_in_another_way(offload: Callable[..., nn.Module], use: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Unusual().train()
        model.logits = MethodType(USES[use], model)
        return model

    model = check(offload, "plain", torch.float32, build=build, where={"fused_loss": True}, steps=2)
    assert streamed(model) == ["embedding", "head"]
    model(**tiny_models.batch("plain", 0)).loss.backward()
    assert memascend.stats(model)["host_bytes_outside"] == 0, "a table stayed in memory after the backward pass"


def test_heads_in_a_list_are_layers(offload: Callable[..., nn.Module]) -> None:
    """As in Musicgen: each moves whole, and is multiplied by whole, in memory too."""

    class Listed(Unusual):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(tiny_models.WIDE, tiny_models.VOCABULARY) for _ in range(2))

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Listed().train()
        model.logits = MethodType(lambda model, x: sum(head(x) for head in (model.head, *model.heads)), model)
        return model

    model = check(offload, "plain", torch.float32, build=build, where={"fused_loss": True}, steps=2)
    assert streamed(model) == ["embedding", "head"]


def test_logits_meet_values_on_the_store(offload: Callable[..., nn.Module]) -> None:
    """Deferred logits, and weights of a fused model in memory, meet proxies in one function."""
    expected, model = (
        memascend.fuse_loss(tiny_models.build("plain", torch.float32), True),
        tiny_models.build("plain", torch.float32),
    )
    offload(model, fused_loss=True)
    results = []
    for run in (expected, model):
        logits = run.head(torch.ones(3, tiny_models.WIDE))
        results.append(
            [logits + run.head.bias, F.cross_entropy(logits, torch.arange(3), weight=run.head.bias.detach().abs())]
        )
        results[-1].append(torch.maximum(run.head.weight[0], logits[:, : tiny_models.WIDE]))
    assert bit_equality.difference(results[1], results[0]) is None
    assert torch.equal(expected.head.weight, model.head.weight)
    with torch.no_grad():
        expected.embedding.weight.zero_().copy_(model.embedding.weight)
    tiny_models.assert_same_weights(
        {"weight": expected.embedding.weight}, {"weight": tiny_models.build("plain", torch.float32).embedding.weight}
    )


def test_programs_read_and_write_tables(offload: Callable[..., nn.Module]) -> None:
    expected = memascend.fuse_loss(tiny_models.build("gpt2", torch.float32))
    model = offload(tiny_models.build("gpt2", torch.float32))
    for run in (expected, model):
        with torch.no_grad():
            run.lm_head.weight[3:5].mul_(2.0)
            run.transformer.wte.weight.data.clamp_(-0.5, 0.5)
        run(**tiny_models.batch("gpt2", 0)).loss.backward()
        torch.nn.utils.clip_grad_norm_(run.parameters(), 0.1)
        run.lm_head.weight.grad.mul_(0.5)
    assert not bit_equality.differing(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected)))
    assert not bit_equality.differing(dict(memascend.parameters_of(model)), dict(memascend.parameters_of(expected)))
    assert memascend.stats(model)["host_bytes_outside"] == 0


def test_gradients_by_torch_autograd_grad(offload: Callable[..., nn.Module]) -> None:
    runs = [
        memascend.fuse_loss(tiny_models.build("llama", torch.float32)),
        offload(tiny_models.build("llama", torch.float32)),
    ]
    found = []
    for model in runs:
        loss = model(**tiny_models.batch("llama", 0)).loss
        wanted = [model.model.embed_tokens.weight, model.lm_head.weight]
        found.append([gradient.clone() for gradient in torch.autograd.grad(loss, wanted)])
        assert all(parameter.grad is None for parameter in wanted)
    assert bit_equality.difference(found[1], found[0]) is None


def test_sums_of_gradients_are_rounded_as_the_program_adds(offload: Callable[..., nn.Module]) -> None:
    """With tied tables each of them is a sum already."""
    runs = [memascend.fuse_loss(tiny_models.build("gpt2")), offload(tiny_models.build("gpt2"))]
    found = []
    for model in runs:
        one, two = (
            torch.autograd.grad(model(**tiny_models.batch("gpt2", n)).loss, model.lm_head.weight)[0] for n in (0, 1)
        )
        found.append([one + two, torch.zeros_like(one).add_(two)])
        found[-1] = [total.clone().mul_(1) for total in found[-1]]
    assert bit_equality.difference(found[1], found[0]) is None


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_that_were_set_to_zero(offload: Callable[..., nn.Module], architecture: str) -> None:
    runs = [memascend.fuse_loss(tiny_models.build(architecture)), offload(tiny_models.build(architecture))]
    gradients = []
    for model in runs:
        model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
        optimizer = memascend.AdamW(model.parameters(), lr=0.1)
        model(**tiny_models.batch(architecture, 0)).loss.backward()
        optimizer.zero_grad(set_to_none=False)
        model(**tiny_models.batch(architecture, 1)).loss.backward()
        gradients.append(dict(tiny_models.gradients_of(model)))
    assert not bit_equality.differing(gradients[1], gradients[0])


def test_hooks_see_gradients_of_tables(offload: Callable[..., nn.Module]) -> None:
    runs = [
        memascend.fuse_loss(tiny_models.build("gpt2", torch.float32)),
        offload(tiny_models.build("gpt2", torch.float32)),
    ]
    for model in runs:
        model.lm_head.weight.register_hook(lambda gradient: gradient * 3)
        model(**tiny_models.batch("gpt2", 0)).loss.backward()
    assert not bit_equality.differing(dict(tiny_models.gradients_of(runs[1])), dict(tiny_models.gradients_of(runs[0])))


def test_a_graph_of_before_a_step_is_refused(offload: Callable[..., nn.Module]) -> None:
    model = offload(tiny_models.build("llama", torch.float32))
    optimizer = memascend.AdamW([model.lm_head.weight], lr=0.1)
    stale = model(**tiny_models.batch("llama", 0)).loss
    tiny_models.step(model, optimizer, "llama", 1)
    with pytest.raises(memascend.MemascendError, match="weights of a head have changed since its loss"):
        stale.backward()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_failure_in_the_backward_pass_leaves_no_half_gradient(
    offload: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, accumulate: bool
) -> None:
    model = offload(tiny_models.build("llama", torch.float32))
    optimizer = memascend.AdamW(model.parameters(), lr=0.1)
    if accumulate:
        model(**tiny_models.batch("llama", 2)).loss.backward()
    loss = model(**tiny_models.batch("llama", 0)).loss
    blocks = OffloadedTable.blocks

    def failing(self: OffloadedTable) -> Any:
        for number, block in enumerate(blocks(self)):
            if number == 3:
                raise KeyboardInterrupt
            yield block

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OffloadedTable, "blocks", failing)
        loss.backward()
    assert (model.lm_head.weight.grad is None) == (not accumulate)
    if accumulate:  # The sum of before must not be missing without a word.
        for use in (
            optimizer.step,
            model(**tiny_models.batch("llama", 3)).loss.backward,
            model.lm_head.weight.grad.sum,
        ):
            with pytest.raises(memascend.MemascendError, match=r"gone|lost"):
                use()
    optimizer.zero_grad()
    tiny_models.step(model, optimizer, "llama", 1)


@pytest.mark.parametrize("at", [(chunked_loss._Reading, "_take"), (BlockReader, "_read")])
def test_errors_that_a_program_keeps_hold_no_buffer(
    offload: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, at: tuple[type, str]
) -> None:
    """An interrupt's traceback, as a notebook keeps it, refers to the frames that read a table."""
    kind, name = at
    model = offload(tiny_models.build("llama", torch.float32))
    expected = model(**tiny_models.batch("llama", 0)).loss.detach()
    kept = []
    for _ in range(3):
        calls, original = iter((False, False, True)), getattr(kind, name)

        def failing(*args: Any, calls: Any = calls, original: Any = original) -> Any:
            if next(calls, False):
                del args
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, failing)
            with pytest.raises(KeyboardInterrupt) as raised:
                model(**tiny_models.batch("llama", 0))
        kept.append(raised)
    assert torch.equal(model(**tiny_models.batch("llama", 0)).loss, expected)


ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "copied head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 900]},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_adapters_over_tables(offload: Callable[..., nn.Module], architecture: str, adapters: str) -> None:
    """Over tables of their own (Llama), and over tied ones (Qwen 3)."""
    peft = requirements.package("peft")

    def build() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[adapters])
        return peft.get_peft_model(tiny_models.build(architecture, torch.float32), config)

    names = streamed(check(offload, architecture, torch.float32, build=build, steps=2))
    assert any("embed_tokens" in name for name in names)
    assert architecture == "qwen3" or any("lm_head" in name for name in names)


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_run_goes_on(tmp_path: Path, durability: str) -> None:
    expected = memascend.fuse_loss(tiny_models.build("gpt2"))
    tiny_models.train(expected, "gpt2", steps=4, evaluate=False)
    model = tiny_models.build("gpt2")
    memascend.offload(
        model, store=tmp_path, host_memory=tiny_models.smallest_budget(model), durability=durability, keep_store=True
    )
    tiny_models.train(model, "gpt2", steps=2, evaluate=False)
    memascend.close(model)
    run = memascend.resume(tmp_path)
    assert streamed(run.model)
    del expected
    again = memascend.fuse_loss(tiny_models.build("gpt2"))
    reference = tiny_models.train(again, "gpt2", steps=2, evaluate=False)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(run.model)), reference.weights)
    memascend.close(run.model)


def test_frozen_tables_are_read_whole_from_their_files(tmp_path: Path) -> None:
    built = tiny_models.build("llama")
    built.save_pretrained(tmp_path / "model")
    expected = type(built).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    least = smallest_plan(partition(built.requires_grad_(False), fused_loss=None)).total
    model = memascend.from_pretrained(
        tmp_path / "model", store=tmp_path / "store", host_memory=least + 2**22, frozen="files", keep_store=False
    )
    assert torch.equal(tiny_models.logits(model, "llama"), tiny_models.logits(expected, "llama"))
    memascend.close(model)


def test_a_model_that_could_not_be_saved_is_saved_elsewhere(
    offload: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload(tiny_models.build("llama"))
    write, caught = safetensors._write, []
    for directory in ("one", "two", "three"):
        writes = iter(range(100))

        def failing(fd: int, view: memoryview, offset: int, writes: Iterator[int] = writes) -> None:
            if next(writes) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(fd, view, offset)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space") as error:
            patch.setattr(safetensors, "_write", failing)
            memascend.save_pretrained(model, tmp_path / directory)
        caught.append(error)
    memascend.save_pretrained(model, tmp_path / "four")
    again = type(model).from_pretrained(tmp_path / "four", dtype=torch.bfloat16)
    tiny_models.assert_same_weights(dict(again.named_parameters()), dict(tiny_models.build("llama").named_parameters()))


def test_models_are_loaded_and_saved_by_blocks(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    model.save_pretrained(tmp_path / "model")
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    opened = memascend.from_pretrained(
        tmp_path / "model", store=tmp_path / "store", host_memory=tiny_models.smallest_budget(model), keep_store=False
    )
    assert streamed(opened)
    memascend.save_pretrained(opened, tmp_path / "saved")
    memascend.save_pretrained(opened, tmp_path / "float32", dtype="float32")
    assert memascend.stats(opened)["host_bytes_outside_most"] == 0
    for directory, dtype in (("saved", torch.bfloat16), ("float32", torch.float32)):
        again = type(model).from_pretrained(tmp_path / directory, dtype=dtype)
        tiny_models.assert_same_weights(
            dict(again.named_parameters()), {name: value.to(dtype) for name, value in expected.items()}
        )
    tiny_models.assert_same_weights(dict(memascend.parameters_of(opened)), expected)
    memascend.close(opened)
