"""Experts that are trained while they are read one by one: bits, gradients, durable steps and memory."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import faults
import pytest
import torch
from small_mixtures import DECODER, EXPERTS, MODELS, ODD, assert_same, batch, build
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memascend
from memascend.layout import tables
from memascend.layout.units import partition
from memascend.memory_plan import experts as planned_experts
from memascend.memory_plan.host import make_plan, smallest_plan
from memascend.session.api import offload_of
from memascend.streaming.table_reads import TableReads
from memascend.vocabulary.gradient import TableGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memascend.layout.units import Unit

pytestmark = pytest.mark.usefixtures("small_experts_in_pieces")
PIECES: dict[str, Any] = {"host_memory": None, "experts": "pieces"}
#: So few tokens that most experts get none.
FEW = {"rows": 1, "columns": 2}
NAME = "model.layers.1.mlp.experts.down_proj"


def step(
    model: nn.Module, optimizer: Any, number: int, clip: float | None = 0.05, autocast: bool = False
) -> torch.Tensor:
    """Take a step of two micro-batches; one reaches few experts."""
    losses = []
    for micro, size in enumerate([{}, FEW]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch(2 * number + micro, **size)).loss
        loss.backward()
        losses.append(loss.detach().clone())
    if clip is not None:
        losses.append(optimizer.clip_grad_norm_(clip))
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([loss.float() for loss in losses])


def trained(
    model: nn.Module, steps: int = 2, make: Callable[..., Any] = memascend.AdamW, step_of: dict[str, Any] | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [step(model, optimizer, number, **step_of or {}) for number in range(steps)]
    return list(torch.cat(losses)), {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], None]]:
    """Fail where a gradient of experts was whole in memory, or the weights were in a pass."""
    caplog.set_level(logging.WARNING, "memascend")
    made_whole: list[tuple[int, ...]] = []
    dense = TableGradient.dense

    def note(self: TableGradient) -> torch.Tensor:
        if not self.is_dense and self.ndim == 3:
            made_whole.append(tuple(self.shape))
        return dense(self)

    monkeypatch.setattr(TableGradient, "dense", note)

    def check() -> None:
        assert made_whole == []

    yield check
    check()


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("architecture", MODELS)
def test_all_of_a_mixture_trains_with_the_bits_of_memory(
    offloaded: Callable[..., nn.Module], architecture: str, implementation: str
) -> None:
    expected = trained(build(architecture, implementation))
    model = offloaded(build(architecture, implementation), **PIECES)
    assert any(unit.is_experts for unit in offload_of(model).units)
    assert_same(trained(model), expected)
    assert not any("used as a whole" in notice for notice in memascend.stats(model)["notices"])


@pytest.mark.parametrize("autocast", [False, True])
def test_experts_that_get_all_tokens(offloaded: Callable[..., nn.Module], autocast: bool) -> None:
    dtype, of_step = torch.float32 if autocast else torch.bfloat16, {"autocast": autocast}
    expected = trained(build("llama4", dtype=dtype), step_of=of_step)
    assert_same(trained(offloaded(build("llama4", dtype=dtype), **PIECES), step_of=of_step), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_without_recomputation_and_with_experts_that_begin_within_pages(
    offloaded: Callable[..., nn.Module], implementation: str
) -> None:
    expected = trained(build("qwen3_moe", implementation, **ODD))
    assert_same(trained(offloaded(build("qwen3_moe", implementation, **ODD), recompute=False, **PIECES)), expected)


def eight_bits(parameters: Any, **options: Any) -> Any:
    return memascend.AdamW(parameters, states="8bit", **options)


def momentum(parameters: Any, **options: Any) -> Any:
    return memascend.SGD(parameters, momentum=0.9, **options)


def apollo(parameters: Any, **options: Any) -> Any:
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    return memascend.Apollo([{"params": matrices, "rank": 4}, {"params": others}], **options)


@pytest.mark.parametrize("make", [eight_bits, momentum, memascend.Lion, apollo])
def test_other_optimizers(offloaded: Callable[..., nn.Module], make: Callable[..., Any]) -> None:
    expected = trained(build("gpt_oss"), make=make)
    assert_same(trained(offloaded(build("gpt_oss"), **PIECES), make=make), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_float32_under_autocast(offloaded: Callable[..., nn.Module], implementation: str) -> None:
    of_step = {"autocast": True}
    expected = trained(build("mixtral", implementation, torch.float32), step_of=of_step)
    model = offloaded(build("mixtral", implementation, torch.float32), **PIECES)
    assert_same(trained(model, step_of=of_step), expected)


def test_gradients_put_aside_in_bfloat16(offloaded: Callable[..., nn.Module]) -> None:
    options = {"gradients": "bfloat16"}
    model = offloaded(build("mixtral", "eager", torch.float32), **options)
    expected = trained(model)
    memascend.close(model)
    assert_same(trained(offloaded(build("mixtral", "eager", torch.float32), **options, **PIECES)), expected)


def test_slices_of_a_batch(offloaded: Callable[..., nn.Module]) -> None:
    expected = trained(memascend.run_in_slices(build("qwen3_moe"), 1))
    assert_same(trained(offloaded(build("qwen3_moe"), micro_batch_size=1, **PIECES)), expected)


def test_updates_in_the_backward_pass(offloaded: Callable[..., nn.Module]) -> None:
    def train(model: nn.Module) -> Any:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2, nonfinite="propagate")
        losses = []
        for number in range(3):
            losses.append(model(**batch(number)).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses], {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = train(build("qwen3_moe"))
    assert_same(train(offloaded(build("qwen3_moe"), update="backward", **PIECES)), expected)


def test_budgets_that_keep_experts(offloaded: Callable[..., nn.Module]) -> None:
    expected = trained(build("qwen3_moe"), steps=3)
    unlimited = make_plan(partition(build("qwen3_moe"), experts="pieces"), 1 << 40)
    for budget in (unlimited.total - unlimited.experts[0].total // 2, unlimited.total):
        model = offloaded(build("qwen3_moe"), host_memory=budget, experts="pieces")
        assert_same(trained(model, steps=3), expected)
        assert all(line.count > 2 for line in offload_of(model).plan.experts)
        memascend.close(model)


def test_an_expert_is_read_as_soon_as_its_part_is_updated(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1 << 20)
    wide = {"moe_intermediate_size": 416, "num_hidden_layers": 2}
    expected = trained(build("qwen3_moe", **wide), steps=3)
    model = offloaded(build("qwen3_moe", **wide), **PIECES)
    groups: list[int] = []
    use = TableReads.use_experts

    def note(self: TableReads, unit: Unit) -> Any:
        update = use(self, unit)
        groups.append(0 if update is None else update.groups)
        return update

    monkeypatch.setattr(TableReads, "use_experts", note)
    assert_same(trained(model, steps=3), expected)
    assert max(groups) == 2


def test_gradients_are_those_of_memory(
    offloaded: Callable[..., nn.Module], one_by_one: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected, model = build("qwen3_moe", "eager"), offloaded(build("qwen3_moe", "eager"), **PIECES)
    inputs = batch(1, **FEW)
    for computed in (expected, model):
        computed(**inputs).loss.backward()
        computed(**inputs).loss.backward()
    one_by_one()
    theirs = expected.get_parameter(NAME).grad
    assert theirs is not None and 0 < int((theirs.flatten(1).abs().sum(1) == 0).sum()) < EXPERTS
    for name, parameter in model.named_parameters():
        grad, of_memory = parameter.grad, expected.get_parameter(name).grad
        assert grad is not None and of_memory is not None
        # The sign of a zero too.
        assert torch.equal(grad.clone().view(torch.int16), of_memory.view(torch.int16)), name
    # The second pass has one notice, which names the option. A processor with slow products of bfloat16 has another.
    said = [text for text in (record.getMessage() for record in caplog.records) if "GFLOP/s" not in text]
    assert len(said) == 1 and "micro_batch_size=K" in said[0]


def test_a_part_that_is_used_otherwise_has_its_gradient(
    offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    gradients = []
    for model in (build("qwen3_moe"), offloaded(build("qwen3_moe"), **PIECES)):
        weight = model.get_parameter(NAME)
        taken = weight[3]
        x = torch.full((2, taken.shape[1]), 0.5, dtype=taken.dtype)
        other = weight.transpose(1, 2)[2]
        value = nn.functional.linear(x, taken).sum() + (taken * 3).sum() + (x @ taken.transpose(0, 1)).sum()
        value = value + nn.functional.linear(x.new_ones(2, other.shape[1]), other).sum() + weight.float().pow(2).sum()
        gradients.append(torch.autograd.grad(value, [weight])[0].clone())
    assert torch.equal(*gradients)


def test_weights_that_change_before_the_backward_pass_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(build("qwen3_moe"), **PIECES)
    loss = model(**batch(1)).loss
    with torch.no_grad():
        model.get_parameter(NAME).mul_(2)
    with pytest.raises(memascend.MemascendError, match="changed since the forward pass"):
        loss.backward()


def test_experts_that_are_frozen_and_trained_as_a_run_goes_on(offloaded: Callable[..., nn.Module]) -> None:
    def train(model: nn.Module) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        losses = [step(model, optimizer, 0)]
        model.requires_grad_(True)
        losses.append(step(model, optimizer, 1))
        loss = model(**batch(5)).loss
        model.get_parameter(NAME).requires_grad_(False)  # The graph was made before.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step(model, optimizer, 3))
        return list(torch.cat(losses)), {name: p.detach().clone() for name, p in model.named_parameters()}

    def frozen() -> Any:
        model = build("qwen3_moe")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        return model

    expected = train(frozen())
    assert_same(train(offloaded(frozen(), **PIECES | {"host_memory": "16MiB"})), expected)


MAKERS: dict[str, Callable[..., Any]] = {"AdamW": memascend.AdamW, "APOLLO": apollo}


def interrupted(_pipe: Any, store: Path, name: str) -> None:
    """Train, and be killed within the third step."""
    planned_experts.take_less = lambda *_: True  # as the fixture has it
    model = memascend.offload(build("gpt_oss"), store=store, keep_store=True, allocator="pageable", **PIECES)
    optimizer = MAKERS[name](list(model.parameters()), lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
    model(**batch(4)).loss.backward()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_that_is_killed_goes_on(tmp_path: Path, store: Path, name: str) -> None:
    """Also with the experts in their layers for a step."""
    expected = build("gpt_oss")
    optimizer = MAKERS[name](list(expected.parameters()), lr=1e-2)
    losses = [step(expected, optimizer, number) for number in range(4)]
    with faults.Child(tmp_path, interrupted, store, name) as child:
        assert child.wait(120).code == -signal.SIGKILL, child.told()
    steps, weights = 0, {}
    for experts in ("pieces", "whole", "pieces"):
        run = memascend.resume(store, experts=experts, allocator="pageable", keep_store=True)
        assert run.steps >= 1 and run.steps >= steps
        steps = run.steps
        if steps < 4:
            assert torch.equal(step(run.model, run.optimizer, steps), losses[steps])
            steps += 1
        weights = dict(memascend.parameters_of(run.model))
        memascend.close(run.model)
    assert steps == 4
    assert_same(([], weights), ([], dict(memascend.parameters_of(expected))))


def test_the_least_budget_does_not_depend_on_the_number_of_experts() -> None:
    def least(number: int, experts: str) -> int:
        config = Qwen3MoeConfig(**DECODER | {"hidden_size": 2048}, num_experts=number, moe_intermediate_size=768)
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        return smallest_plan(partition(model, experts=experts)).total

    of_router = 2 * 64 * 2048 * 2
    assert 0 <= least(128, "pieces") - least(64, "pieces") <= 4 * of_router
    assert least(64, "pieces") < least(64, "whole") / 3
