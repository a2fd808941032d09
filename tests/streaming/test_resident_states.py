"""States and weights that stay in memory from one step to the next: the same bits, and the traffic.

Whatever the budget keeps, and however rarely it is written, losses, weights and states are as in memory,
and every read of the store gives them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import COMBINATIONS, DURABILITIES, LEAST, OPTIMIZERS, Run, build, moved, same, traffic
from safetensors.torch import load_file

import memascend
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


STEPS = 5


@cache
def reference(name: str, steps: int = STEPS) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    run = Run(memascend.fuse_loss(build("llama")), "llama", **OPTIMIZERS[name]).go(steps)
    return run.losses, run.state()


def offload(tmp_path: Path, **options: Any) -> nn.Module:
    return memascend.offload(build("llama"), **LEAST | {"store": tmp_path / "store", "keep_store": False} | options)


def budget(keeps: str) -> int:
    """Return the least, one that keeps half of the states or so, and one that keeps everything."""
    model = build("llama")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    least = tiny_models.overlapping_budget(model)
    return {"nothing": tiny_models.smallest_budget(model), "some": least + parameters, "all": least + 40 * parameters}[
        keeps
    ]


@pytest.mark.parametrize(("name", "durability", "keeps"), COMBINATIONS)
def test_the_bits_are_those_of_training_in_memory(tmp_path: Path, name: str, durability: str, keeps: str) -> None:
    losses, state = reference(name)
    model = offload(tmp_path, host_memory=budget(keeps), durability=durability)
    try:
        run = Run(model, "llama", **OPTIMIZERS[name]).go(STEPS)
        assert run.losses == losses
        same(run.state(), state)
    finally:
        memascend.close(model)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_with_room_for_everything_only_durable_steps_write(tmp_path: Path, durability: str) -> None:
    model = offload(tmp_path, host_memory=budget("all"), durability=durability)
    try:
        run = Run(model, "llama").go(2)
        read, written = traffic(model, lambda: run.go(6, 2))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        durable = {"step": 4, "every:2": 2, "none": 0}[durability]
        assert read == 0
        assert written == pytest.approx(durable * 12 * parameters, rel=0.02)
        before = moved(model)
        # Readers of the store find resident values, and move nothing.
        same(run.state(), reference("adamw", 6)[1])
        assert durability != "none" or moved(model) == before
    finally:
        memascend.close(model)


@pytest.mark.parametrize("keeps", ["some", "all"])
def test_a_durable_step_writes_all_of_it_whatever_stays(tmp_path: Path, keeps: str) -> None:
    """At once where the forward pass has nothing else for the drives to do, else with the commit."""
    model = offload(tmp_path, host_memory=budget(keeps), durability="step")
    try:
        run = Run(model, "llama").go(2)
        session = offload_of(model)
        assert session.commit_log.makes_durable()
        assert session.commit_log.writes_through() is (keeps == "all")
        read, written = traffic(model, lambda: run.go(6, 2))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert (read > 0) is (keeps == "some")
        assert written == pytest.approx(4 * 12 * parameters, rel=0.02)
    finally:
        memascend.close(model)


def test_what_is_saved_is_what_is_in_memory(tmp_path: Path) -> None:
    model = offload(tmp_path, host_memory=budget("all"), durability="none")
    try:
        Run(model, "llama").go(STEPS)
        memascend.save_pretrained(model, tmp_path / "out")
        saved, expected = load_file(tmp_path / "out" / "model.safetensors"), reference("adamw")[1]
        assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    finally:
        memascend.close(model)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("then", ["nothing", "some", "all"])
def test_a_store_that_is_kept_goes_on_with_any_budget(tmp_path: Path, durability: str, then: str) -> None:
    model = offload(tmp_path, host_memory=budget("all"), durability=durability, keep_store=True)
    Run(model, "llama").go(3)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", host_memory=budget(then), keep_store=False, **LEAST)
    try:
        assert resumed.steps == 3
        run = Run(resumed.model, "llama", resumed.optimizer).go(STEPS, 3)
        same(run.state(), reference("adamw")[1])
    finally:
        memascend.close(resumed.model)


def test_a_checkpoint_between_durable_steps_has_what_is_in_memory(tmp_path: Path) -> None:
    model = offload(tmp_path, host_memory=budget("all"), durability="every:100")
    try:
        Run(model, "llama").go(3)
        memascend.save_checkpoint(model, "third")
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        back = memascend.restore_checkpoint(model, "third")
        run = Run(back.model, "llama", back.optimizer).go(STEPS, 3)
        same(run.state(), reference("adamw")[1])
    finally:
        memascend.close(model)


def change_weights(model: nn.Module, run: Run) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)


def load_states(model: nn.Module, run: Run) -> None:
    state = run.optimizer.state_dict()
    for states in state["state"].values():
        states["exp_avg"] = states["exp_avg"] * 0.5
    run.optimizer.load_state_dict(state)


def load_weights(model: nn.Module, run: Run) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in memascend.parameters_of(model)}
    values = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    model.load_state_dict(values)


def freeze_some(model: nn.Module, run: Run) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." not in name)


def begin_anew(model: nn.Module, run: Run) -> None:
    run.optimizer = memascend.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))


@pytest.mark.parametrize("change", [change_weights, load_states, load_weights, freeze_some, begin_anew])
@pytest.mark.parametrize("durability", ["every:2", "none"])
def test_what_a_program_changes_in_between(
    tmp_path: Path, durability: str, change: Callable[[nn.Module, Run], None]
) -> None:
    def run_of(model: nn.Module) -> Run:
        run = Run(model, "llama").go(3)
        change(model, run)
        return run.go(STEPS, 3)

    expected = run_of(memascend.fuse_loss(build("llama")))
    for keeps in ("some", "all"):
        model = offload(tmp_path, host_memory=budget(keeps), durability=durability)
        try:
            run = run_of(model)
            assert run.losses == expected.losses
            same(run.state(), expected.state())
        finally:
            memascend.close(model)


def test_states_of_ordinary_parameters_stay_within_their_budget(tmp_path: Path) -> None:
    def run_of(**options: Any) -> tuple[memascend.AdamW, nn.Module]:
        model = build("llama")
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2, **options)
        for number in range(3):
            model(**tiny_models.batch("llama", number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, model

    _, expected = run_of()
    optimizer, model = run_of(store=tmp_path / "states", host_memory="96MiB")
    try:
        (store,) = optimizer._backends.state_stores._stores
        stats = store.runtime.stats()
        assert (stats["ssd_bytes_read"], stats["ssd_bytes_written"]) == (0, 0)
        tiny_models.assert_same_weights(dict(model.named_parameters()), dict(expected.named_parameters()))
    finally:
        optimizer.close()
