"""A budget that changes during a run: the same bits, and the memory follows."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import LEAST, Run, build, same

import memascend
from memascend import BudgetError, MemascendError
from memascend.layout.units import partition
from memascend.memory_plan.host import make_plan, smallest_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


#: How often the budget changes in the longest test.
CHANGES = int(os.environ.get("MEMASCEND_CHANGES", "24"))
MOST = 192 << 20


def least(model: nn.Module) -> int:
    return smallest_plan(partition(model, fused_loss="auto"), MOST).total


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Any]:
    """Offload a model whose budget may change, from the least on."""
    opened: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        chosen = {"store": tmp_path / f"store{len(opened)}", "host_memory": least(model), "host_memory_max": MOST}
        opened.append(memascend.offload(model, **LEAST | chosen | {"keep_store": False} | options))
        return opened[-1]

    yield offload
    for model in opened:
        memascend.close(model)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5_dropout"])
@pytest.mark.parametrize("durability", ["step", "every:3", "none"])
def test_random_changes_change_no_bit(offload: Any, architecture: str, durability: str, small_tables: None) -> None:
    """At any moment between passes: before a backward's step, after it, between accumulated batches."""
    chance = random.Random(f"{architecture} {durability} {os.environ.get('MEMASCEND_SEED', '0')}")
    steps = -(-CHANGES // 4)
    expected = Run(memascend.fuse_loss(build(architecture)), architecture).go(steps)
    model = offload(build(architecture), durability=durability)
    smallest = memascend.offload_of(model).plan.smallest_bytes
    changes = 0

    def at(_step: int, moment: str) -> None:
        nonlocal changes
        if moment.startswith("forward") or chance.random() < 0.2:
            return
        budget = chance.choice([smallest, MOST, chance.randint(smallest, MOST), chance.randint(smallest, 2 * smallest)])
        memascend.set_host_memory(model, budget)
        changes += 1
        stats = memascend.stats(model)
        assert stats["host_bytes_planned"] <= budget == stats["host_bytes_budget"]

    run = Run(model, architecture, at=at).go(steps)
    assert changes > steps
    assert run.losses == expected.losses
    same(run.state(), expected.state())


def test_memory_follows_the_budget(offload: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).bfloat16()
    x = torch.randn(4, 1024).bfloat16()
    offload(model, durability="none", allocator="locked")
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def reserved() -> int:
        stats = memascend.stats(model)
        assert stats["host_bytes_leaving"] == 0
        return int(stats["host_bytes_reserved"])

    step(), step()
    small, before = reserved(), resident_bytes()
    memascend.set_host_memory(model, MOST)
    step(), step()
    moved = [memascend.stats(model)[f"ssd_bytes_{kind}"] for kind in ("read", "written")]
    step()
    assert [memascend.stats(model)[f"ssd_bytes_{kind}"] for kind in ("read", "written")] == moved
    large, during = reserved(), resident_bytes()
    assert large > small + (90 << 20)
    assert during - before > 80 << 20
    memascend.set_host_memory(model, memascend.offload_of(model).plan.smallest_bytes)
    step()
    assert reserved() == small
    assert during - resident_bytes() > 80 << 20


def test_a_change_that_cannot_be_is_refused_and_nothing_changes(offload: Any, tmp_path: Path) -> None:
    model = offload(build("llama"), host_memory="64MiB")
    run = Run(model, "llama").go(2)
    before = memascend.stats(model)["host_bytes_budget"]
    with pytest.raises(BudgetError, match="more than the host_memory_max of 192"):
        memascend.set_host_memory(model, MOST + 1)
    with pytest.raises(BudgetError, match="is too small: the least is") as refused:
        memascend.set_host_memory(model, "1MiB")
    memascend.set_host_memory(model, refused.value.smallest_bytes)
    fixed = offload(build("llama"), host_memory_max=None)
    with pytest.raises(MemascendError, match="fixed budget: give host_memory_max"):
        memascend.set_host_memory(fixed, MOST)
    with pytest.raises(BudgetError, match=r"host_memory_max .8.0 MiB. is less"):
        offload(build("llama"), host_memory="64MiB", host_memory_max="8MiB")

    def in_a_pass(*_: Any) -> None:
        with pytest.raises(MemascendError, match="between passes only"):
            memascend.set_host_memory(model, MOST)

    handle = model.model.layers[1].register_forward_pre_hook(in_a_pass)
    run.go(3, 2)
    handle.remove()
    assert memascend.stats(model)["host_bytes_budget"] == refused.value.smallest_bytes != before
    expected = Run(memascend.fuse_loss(build("llama")), "llama").go(3)
    same(run.state(), expected.state())


def test_inputs_that_wait_for_a_backward_pass_are_not_lost(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    model = offload(build("llama"), host_memory=MOST)
    smallest = memascend.offload_of(model).plan.smallest_bytes
    batch = {name: value.repeat(32, 8) for name, value in tiny_models.batch("llama", 0).items()}
    loss = model(**batch).loss
    with pytest.raises(MemascendError, match=r"wait in memory for a backward pass: call backward\(\)"):
        memascend.set_host_memory(model, smallest)
    assert memascend.stats(model)["host_bytes_budget"] == MOST
    loss.backward()
    expected = memascend.fuse_loss(build("llama"))
    expected(**batch).loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    same(ours, {name: parameter.grad for name, parameter in expected.named_parameters()})
    del loss
    memascend.set_host_memory(model, smallest)


def test_a_run_is_resumed_with_a_budget_that_may_change(offload: Any, tmp_path: Path) -> None:
    expected = Run(memascend.fuse_loss(build("llama")), "llama").go(4)
    model = offload(build("llama"), keep_store=True, store=tmp_path / "kept")
    Run(model, "llama").go(2)
    memascend.set_host_memory(model, MOST)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "kept", host_memory="64MiB", host_memory_max=MOST, keep_store=False, **LEAST)
    try:
        run = Run(resumed.model, "llama", resumed.optimizer).go(3, 2)
        memascend.set_host_memory(resumed.model, MOST)
        run.go(4, 3)
        same(run.state(), expected.state())
    finally:
        memascend.close(resumed.model)


def test_a_plan_within_another_has_its_sizes() -> None:
    units = partition(build("llama"), fused_loss="auto")
    plan = make_plan(units, 24 << 20, MOST)
    assert plan.most is not None and plan.most.chunk_elements == plan.chunk_elements
    assert not plan.by_turns and plan.total <= 24 << 20 < plan.most.total <= MOST
    assert {line.nbytes for line in plan.buffers} <= {line.nbytes for line in plan.most.buffers}
    assert tiny_models.smallest_budget(build("llama")) <= plan.smallest_bytes
