"""Frozen experts that are read one by one: the bits of memory within less of it, and reads of those that are used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from small_mixtures import DECODER, EXPERTS, MODELS, ODD, assert_same, batch
from small_mixtures import build as mixture
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memascend
from memascend.errors import MemascendError
from memascend.layout.units import partition
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.session.api import offload_of
from memascend.streaming.experts import ExpertPieces

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("small_experts_in_pieces"),
]


def build(*of: Any, **changed: Any) -> Any:
    return mixture(*of, **changed).requires_grad_(False)


def adapt(model: nn.Module) -> Any:
    torch.manual_seed(5)
    config = {"r": 4, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**config))


def trained(
    model: nn.Module, steps: int = 3, autocast: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = memascend.AdamW(parameters.values(), lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch(2 * step + micro)).loss
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in parameters.items()}


def pieces(offloaded: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    return offloaded(model, **{"host_memory": None, "experts": "pieces"} | options)


def are_pieces(model: nn.Module) -> bool:
    return any(unit.is_experts for unit in offload_of(model).units)


def whole_uses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "used as a whole" in record.getMessage()]


@pytest.fixture(autouse=True)
def never_whole(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail where experts were used as a whole, beyond the budget."""
    caplog.set_level(logging.WARNING, "memascend")
    yield
    assert not whole_uses(caplog)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("architecture", MODELS)
def test_adapters_train_with_the_bits_of_memory(
    offloaded: Callable[..., nn.Module], architecture: str, implementation: str, recompute: bool
) -> None:
    expected = trained(adapt(build(architecture, implementation)))
    model = adapt(pieces(offloaded, build(architecture, implementation), recompute=recompute))
    assert are_pieces(model)
    written = memascend.stats(model)["ssd_bytes_written"]
    assert_same(trained(model), expected)
    assert memascend.stats(model)["ssd_bytes_written"] == written


def test_experts_that_get_all_tokens(offloaded: Callable[..., nn.Module]) -> None:
    expected = trained(adapt(build("llama4")))
    model = pieces(offloaded, build("llama4"))
    assert are_pieces(model)
    assert_same(trained(adapt(model)), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("autocast", [False, True])
def test_experts_that_begin_within_pages(
    offloaded: Callable[..., nn.Module], implementation: str, autocast: bool
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    expected = trained(adapt(build("qwen3_moe", implementation, dtype, **ODD)), autocast=autocast)
    model = adapt(pieces(offloaded, build("qwen3_moe", implementation, dtype, **ODD)))
    assert are_pieces(model)
    assert_same(trained(model, autocast=autocast), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_mixture_generates_and_reads_the_experts_that_are_used(
    offloaded: Callable[..., nn.Module], implementation: str
) -> None:
    base = build("qwen3_moe", implementation).eval()
    ids = batch(3, 1, 5)["input_ids"]

    def generate(model: nn.Module, tokens: int) -> torch.Tensor:
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    expected = generate(base, 6)
    model = pieces(offloaded, base)
    before = memascend.stats(model)["ssd_bytes_read"]
    assert torch.equal(generate(model, 6), expected)
    first = memascend.stats(model)["ssd_bytes_read"]
    # A token more reads the experts that it is sent to, of each layer.
    assert torch.equal(generate(model, 7)[:, :-1], expected)
    read = memascend.stats(model)["ssd_bytes_read"] - first - (first - before)
    session = offload_of(model)
    all_bytes = sum(unit.nbytes for unit in session.units)
    experts_bytes = sum(unit.nbytes for unit in session.units if unit.is_experts)
    assert experts_bytes > all_bytes / 2
    assert read <= all_bytes - experts_bytes + experts_bytes * 2 // EXPERTS


def test_the_least_budget_does_not_depend_on_the_number_of_experts() -> None:
    def least(number: int, experts: str) -> int:
        config = Qwen3MoeConfig(**DECODER | {"hidden_size": 2048}, num_experts=number, moe_intermediate_size=768)
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
        return smallest_plan(partition(model, experts=experts)).total

    expert_bytes, of_router = 3 * 2048 * 768 * 2, 2048 * 2
    assert least(128, "whole") - least(64, "whole") == 64 * (expert_bytes + of_router)
    # Of the rest of a layer there are two buffers here.
    assert least(128, "pieces") - least(64, "pieces") == 2 * 64 * of_router
    assert least(64, "pieces") < least(64, "whole") / 8


def test_a_larger_budget_keeps_experts(offloaded: Callable[..., nn.Module]) -> None:
    expected = trained(adapt(build("qwen3_moe")), steps=1)
    unlimited = make_plan(partition(build("qwen3_moe"), experts="pieces"), 1 << 40)
    rooms = {0: None, 1: unlimited.total - unlimited.experts[0].total, 2: unlimited.total}
    read = {}
    for room, budget in rooms.items():
        model = adapt(pieces(offloaded, build("qwen3_moe"), host_memory=budget))
        assert_same(trained(model, steps=1), expected)
        before = memascend.stats(model)["ssd_bytes_read"]
        trained(model, steps=1)
        read[room] = memascend.stats(model)["ssd_bytes_read"] - before
        memascend.close(model)
    assert read[0] > read[1] > read[2] == 0


def test_a_backward_pass_begins_with_the_experts_that_are_in_memory(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[Any, int]] = []
    read = ExpertPieces._read

    def note(self: ExpertPieces, place: Any, expert: int, *more: Any) -> bool:
        found = read(self, place, expert, *more)
        reads.extend([(place, expert)] * found)
        return found

    monkeypatch.setattr(ExpertPieces, "_read", note)
    model = adapt(pieces(offloaded, build("qwen3_moe")))
    model(**batch(1)).loss.backward()
    parameters = {place for place, _ in reads}
    assert len(parameters) == 2 * DECODER["num_hidden_layers"]
    # Of each size there are two buffers.
    assert len(reads) == 3 * len(set(reads)) - 2 * len(parameters)


def test_a_budget_that_changes(offloaded: Callable[..., nn.Module]) -> None:
    expected = trained(adapt(build("qwen3_moe")), steps=4)
    model = adapt(pieces(offloaded, build("qwen3_moe"), host_memory="16MiB", host_memory_max="32MiB"))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = memascend.AdamW(parameters.values(), lr=1e-2)
    losses = []
    for step, budget in enumerate(["16MiB", "32MiB", "12MiB", "20MiB"]):
        memascend.set_host_memory(model, budget)
        for micro in range(2):
            loss = model(**batch(2 * step + micro)).loss
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    assert_same((losses, {name: p.detach().clone() for name, p in parameters.items()}), expected)


def test_the_rest_of_a_model_trains_and_goes_on(offloaded: Callable[..., nn.Module], store: Path) -> None:
    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        return model

    expected = freeze(build("qwen3_moe"))
    optimizer = memascend.AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-2)
    losses = [tiny_step(expected, optimizer, number) for number in range(4)]

    model = pieces(offloaded, freeze(build("qwen3_moe")), keep_store=True, durability="step")
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = [tiny_step(model, optimizer, number) for number in range(2)]
    memascend.close(model)
    for number, experts in ((2, "whole"), (3, "pieces")):
        run = memascend.resume(store, experts=experts, allocator="pageable", keep_store=True)
        found.append(tiny_step(run.model, run.optimizer, number))
        weights = dict(memascend.parameters_of(run.model))
        memascend.close(run.model)
    assert_same((found, weights), (losses, dict(memascend.parameters_of(expected))))


def tiny_step(model: nn.Module, optimizer: memascend.AdamW, number: int) -> torch.Tensor:
    loss = model(**batch(number)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_other_uses_of_experts_take_them_whole(
    offloaded: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    # All experts stay in memory, so that writes have to reach those that are there.
    expected, model = build("qwen3_moe"), pieces(offloaded, build("qwen3_moe"), host_memory="64MiB")
    name = "model.layers.1.mlp.experts.down_proj"
    ours, theirs = model.get_parameter(name), expected.get_parameter(name)
    assert torch.equal(ours[3], theirs[3]) and torch.equal(ours.transpose(1, 2)[0], theirs.transpose(1, 2)[0])
    assert torch.equal(ours.sum(0), theirs.sum(0))
    inputs = batch(1)
    assert torch.equal(model(**inputs).loss, expected(**inputs).loss)
    with torch.no_grad():
        ours[3] += 1
        theirs[3] += 1
        ours.mul_(2)
        theirs.mul_(2)
    assert torch.equal(model(**inputs).loss, expected(**inputs).loss)
    assert [message.partition(" is used")[0] for message in whole_uses(caplog)] == [name]
    caplog.clear()


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_a_mixture_is_saved(offloaded: Callable[..., nn.Module], architecture: str, tmp_path: Path) -> None:
    """Files of gpt-oss have the experts in one tensor, files of Qwen3-MoE singly."""
    expected, model = build(architecture), pieces(offloaded, build(architecture))
    memascend.save_pretrained(model, tmp_path / "saved")
    saved = type(expected).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    tiny_models.assert_same_weights(saved.state_dict(), expected.state_dict())


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: torch.nn.functional.linear(torch.ones(2, weight.shape[-1], dtype=weight.dtype), weight),
        lambda weight: torch.nn.functional.embedding(torch.tensor([1]), weight),
    ],
)
def test_all_experts_are_no_matrix(
    offloaded: Callable[..., nn.Module], use: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    # As embedding or head they would give values, and in memory they give an error.
    with pytest.raises(RuntimeError) as expected:
        use(build("mixtral").model.layers[0].mlp.experts.down_proj)
    with pytest.raises(RuntimeError) as error:
        use(pieces(offloaded, build("mixtral")).model.layers[0].mlp.experts.down_proj)
    assert str(error.value) == str(expected.value)
    caplog.clear()


def test_an_expert_without_tokens_is_not_read(offloaded: Callable[..., nn.Module]) -> None:
    model = pieces(offloaded, build("mixtral"))
    weight, read = model.model.layers[0].mlp.experts.down_proj, memascend.stats(model)["ssd_bytes_read"]
    inputs = torch.ones(0, weight.shape[2], dtype=weight.dtype, requires_grad=True)
    outputs = torch.nn.functional.linear(inputs, weight[3])
    outputs.sum().backward()
    assert outputs.shape == (0, weight.shape[1]) and inputs.grad is not None and inputs.grad.shape == inputs.shape
    assert memascend.stats(model)["ssd_bytes_read"] == read


def test_weights_that_change_before_the_backward_pass_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = adapt(pieces(offloaded, build("qwen3_moe"), recompute=False))
    loss = model(**batch(1)).loss
    place = next(unit for unit in offload_of(model).units if unit.is_experts).tensors[0].places[0]
    place.binding.version += 1
    with pytest.raises(MemascendError, match="changed since the forward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("prepare", "options", "says"),
    [
        (lambda model: model.set_experts_implementation("batched_mm"), {}, "'batched_mm'"),
        (lambda model: adapt_experts(model), {}, "has adapters"),
        (lambda model: None, {"tile_tokens": 8}, "tile_tokens"),
        (lambda model: None, {"experts": "groups"}, "not one of 'whole', 'pieces'"),
    ],
)
def test_what_cannot_be_had_is_refused(
    offloaded: Callable[..., nn.Module], prepare: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    model = build("qwen3_moe")
    model = prepare(model) or model
    with pytest.raises(ValueError, match=says):
        pieces(offloaded, model, **options)


def adapt_experts(model: nn.Module) -> Any:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"r": 2, "target_modules": ["o_proj"], "target_parameters": targets, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**config))


def test_adapters_that_are_added_to_experts_later_take_them_whole(
    offloaded: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(5)
        return adapt_experts(model)

    expected = trained(adapted(build("qwen3_moe")))
    assert_same(trained(adapted(pieces(offloaded, build("qwen3_moe")))), expected)
    assert whole_uses(caplog)
    caplog.clear()


def test_a_model_without_experts_is_refused(offloaded: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match="no experts that transformers keeps fused"):
        pieces(offloaded, tiny_models.build("llama").requires_grad_(False))


def test_compiled_layers_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = pieces(offloaded, build("qwen3_moe"))
    with pytest.raises(MemascendError, match="experts='whole' to compile"):
        model.model.layers[0].compile()
