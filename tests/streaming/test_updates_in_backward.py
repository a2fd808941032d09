"""Updates in the backward pass (`update="backward"`): the same bits, no gradients on the SSD, and clear refusals."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import COMBINATIONS, LEAST, OPTIMIZERS, Run, build, same, traffic
from torch import nn
from unusual_uses import USES, made, train

import memascend
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STEPS = 6


@cache
def reference(name: str) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    run = Run(memascend.fuse_loss(build("llama")), "llama", plain=True, **OPTIMIZERS[name]).go(STEPS)
    return run.losses, run.state()


def budget(keeps: str) -> int:
    """Return the least, one that keeps half of the states or so, and one that keeps everything."""
    model = build("llama")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    least = smallest_plan(partition(model), update="backward").total
    more = {"nothing": 0, "some": (4 << 20) + 7 * parameters, "all": (4 << 20) + 40 * parameters}
    return least + more[keeps]


def offload(tmp_path: Path, **options: Any) -> nn.Module:
    chosen = LEAST | {"store": tmp_path / "store", "keep_store": False, "update": "backward"} | options
    return memascend.offload(build("llama"), **chosen)


@pytest.mark.parametrize(("name", "durability", "keeps"), COMBINATIONS)
def test_the_bits_are_those_of_training_in_memory(tmp_path: Path, name: str, durability: str, keeps: str) -> None:
    losses, state = reference(name)
    model = offload(tmp_path, host_memory=budget(keeps), durability=durability)
    try:
        run = Run(model, "llama", plain=True, **OPTIMIZERS[name]).go(STEPS)
        assert run.losses == losses
        same(run.state(), state)
    finally:
        memascend.close(model)


@contextmanager
def training(tmp_path: Path, steps: int = 2, **options: Any) -> Iterator[Run]:
    """Yield a run of so many steps; from the second on its updates are in the backward pass."""
    model = offload(tmp_path, **{"host_memory": budget("nothing"), "durability": "step"} | options)
    try:
        yield Run(model, "llama", plain=True).go(steps)
    finally:
        memascend.close(model)


def backward(run: Run, step: int = 2) -> None:
    run.model(**tiny_models.batch("llama", 2 * step)).loss.backward()


def takes_the_step(run: Run) -> None:
    """Check that the third step can follow its backward pass, and that the run has the bits of one in memory."""
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.scheduler.step()
    run.go(STEPS, 3)
    same(run.state(), reference("adamw")[1])


def large(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are updated in the backward pass."""
    return [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]


def test_gradients_do_not_go_to_the_ssd(tmp_path: Path) -> None:
    found = {}
    for update in ("forward", "backward"):
        with training(tmp_path, 3, update=update, store=tmp_path / update) as run:
            found[update] = traffic(run.model, lambda run=run: run.go(5, 3))
            parameters = sum(parameter.numel() for parameter in large(run.model))
    read, written = (less - more for less, more in zip(found["forward"], found["backward"], strict=True))
    # Two steps. The least budget of updates in the forward pass keeps a part of the gradients in memory.
    assert read >= 2 * parameters
    assert written >= 2 * parameters


@pytest.mark.parametrize("use", ["clipped", "read", "accumulated", "scaled", "noised"])
def test_what_uses_gradients_from_the_first_step_on_has_them(tmp_path: Path, use: str) -> None:
    """No update is in the backward pass then, and nothing differs from training in memory."""

    def halve(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5)

    def train(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        scaler = memascend.GradScaler("cpu", init_scale=2.0**4)
        parameter = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        seen = {}
        if use == "noised":
            parameter.register_post_accumulate_grad_hook(halve)
        for step in range(4):
            for micro in range(2 if use == "accumulated" else 1):
                loss = model(**tiny_models.batch("llama", 2 * step + micro)).loss
                (scaler.scale(loss) if use == "scaled" else loss).backward()
            if use == "clipped":
                optimizer.clip_grad_norm_(0.1)
            if use == "read":
                seen[f"gradient {step}"] = parameter.grad.detach().clone()
            if use == "scaled":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return dict(memascend.parameters_of(model)) | seen

    expected = train(memascend.fuse_loss(build("llama")))
    model = offload(tmp_path, host_memory=budget("nothing"), durability="step")
    try:
        same(train(model), expected)
    finally:
        memascend.close(model)


def test_what_begins_to_use_gradients_later_is_refused(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        backward(run)
        weight = large(run.model)[0]
        for use in (
            lambda: run.optimizer.clip_grad_norm_(1.0),
            lambda: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
            lambda: weight.grad.sum(),
            lambda: weight.grad.mul_(0.5),
            lambda: memascend.overflow.check([p.grad for p in large(run.model)]),
            lambda: run.optimizer.zero_grad(),
            lambda: run.optimizer.zero_grad(set_to_none=False),
        ):
            with pytest.raises((memascend.MemascendError, ValueError), match=r"already applied the gradient of "):
                use()
        takes_the_step(run)


def test_a_gradient_that_is_discarded_or_replaced_is_refused(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        backward(run)
        weight = large(run.model)[0]
        for gradient in (None, torch.ones(weight.shape, dtype=weight.dtype)):
            weight.grad = gradient
            with pytest.raises(memascend.MemascendError, match="already applied"):
                run.optimizer.step()


def test_a_second_backward_pass_is_refused(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        loss = run.model(**tiny_models.batch("llama", 4)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(memascend.MemascendError, match=r"already (updated|applied)|changed since the forward pass"):
            loss.backward()
        with pytest.raises(memascend.MemascendError, match="already updated"):
            run.model(**tiny_models.batch("llama", 5))


def test_what_stands_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        backward(run)
        model, optimizer = run.model, run.optimizer
        for use in (
            lambda: model(**tiny_models.batch("llama", 5)),
            lambda: large(model)[0].sum(),
            lambda: large(model)[0].detach().clone(),
            lambda: dict(memascend.parameters_of(model)),
            lambda: optimizer.state_dict(),
            lambda: memascend.flush(model),
            lambda: memascend.save_checkpoint(model, "middle"),
            lambda: memascend.save_pretrained(model, tmp_path / "saved"),
        ):
            with pytest.raises(memascend.MemascendError, match=r"already updated .*call optimizer.step\(\) before"):
                use()
        takes_the_step(run)


def test_options_that_change_between_backward_and_step_are_refused(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        backward(run)
        (group,) = run.optimizer.param_groups
        for option, value in (("lr", 0.5), ("weight_decay", 0.3), ("betas", (0.5, 0.5))):
            before, group[option] = group[option], value
            with pytest.raises(memascend.MemascendError, match="have changed since backward"):
                run.optimizer.step()
            group[option] = before
        run.optimizer.nonfinite = "skip"
        with pytest.raises(memascend.MemascendError, match="have changed since backward"):
            run.optimizer.step()
        run.optimizer.nonfinite = "propagate"
        takes_the_step(run)


@pytest.mark.parametrize("durability", ["step", "every:2"])
def test_a_backward_pass_that_failed_leaves_the_last_durable_step(tmp_path: Path, durability: str) -> None:
    model = offload(tmp_path, host_memory=budget("nothing"), durability=durability, keep_store=True)
    run = Run(model, "llama", plain=True).go(4)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook of the program's")

    dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        backward(run, 4)
    for use in (run.optimizer.zero_grad, lambda: memascend.flush(model), lambda: backward(run, 4)):
        with pytest.raises(memascend.MemascendError, match=r"already .*memascend.resume goes on"):
            use()
    memascend.close(model)
    resumed = memascend.resume(
        tmp_path / "store", host_memory=budget("some"), update="backward", keep_store=False, **LEAST
    )
    try:
        assert resumed.steps == 4
        again = Run(resumed.model, "llama", resumed.optimizer, plain=True).go(STEPS, resumed.steps)
        same(again.state(), reference("adamw")[1])
    finally:
        memascend.close(resumed.model)


def test_a_checkpoint_after_a_step_has_it(tmp_path: Path) -> None:
    with training(tmp_path, 3) as run:
        memascend.save_checkpoint(run.model, "third")
        run.go(5, 3)
        back = memascend.restore_checkpoint(run.model, "third")
        again = Run(back.model, "llama", back.optimizer, plain=True).go(STEPS, 3)
        same(again.state(), reference("adamw")[1])


def test_several_optimizers_and_parameters_without_gradients(tmp_path: Path) -> None:
    """Layers by turns, each with an optimizer of its own for a part of the steps, and a frozen layer."""

    def train(model: nn.Module) -> dict[str, torch.Tensor]:
        layers = model.model.layers
        layers[1].requires_grad_(False)
        first = [p for p in layers[0].parameters()]
        others = [p for p in model.parameters() if p.requires_grad and all(p is not mine for mine in first)]
        optimizers = [memascend.AdamW(first, lr=1e-2), memascend.SGD(others, lr=1e-2, momentum=0.9)]
        for step in range(5):
            model(**tiny_models.batch("llama", step)).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = train(memascend.fuse_loss(build("llama")))
    model = offload(tmp_path, host_memory=budget("nothing"), durability="step")
    try:
        same(train(model), expected)
    finally:
        memascend.close(model)


@pytest.mark.parametrize("recompute", [True, False])
def test_float32_weights_with_rounded_gradients(tmp_path: Path, recompute: bool) -> None:
    states = []
    for update in ("forward", "backward"):
        model = memascend.offload(
            build("llama", torch.float32),
            store=tmp_path / update,
            host_memory="64MiB",
            gradients="bfloat16",
            recompute=recompute,
            update=update,
            keep_store=False,
            **LEAST,
        )
        try:
            states.append(Run(model, "llama", plain=True).go(4).state())
        finally:
            memascend.close(model)
    same(*states)


def test_values_of_update(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="update='now' is not one of 'forward', 'backward'"):
        offload(tmp_path, host_memory="64MiB", update="now")


def test_the_budget_may_change_between_steps(tmp_path: Path) -> None:
    model = offload(tmp_path, host_memory=budget("all"), host_memory_max=budget("all"), durability="every:2")
    try:
        run = Run(model, "llama", plain=True)
        least = memascend.offload_of(model).plan.smallest_bytes
        for step, bytes_wanted in enumerate([least, budget("all"), least + (2 << 20), least, budget("all"), least]):
            run.go(step + 1, step)
            memascend.set_host_memory(model, bytes_wanted)
        same(run.state(), reference("adamw")[1])
        backward(run, STEPS)
        with pytest.raises(memascend.MemascendError, match="between passes only"):
            memascend.set_host_memory(model, budget("all"))
        run.optimizer.step()
    finally:
        memascend.close(model)


@pytest.mark.parametrize(
    ("keeps", "durability"),
    [
        ("nothing", "step"),
        ("all", "every:2"),
        pytest.param("nothing", "every:2", marks=pytest.mark.soak),
        pytest.param("all", "step", marks=pytest.mark.soak),
    ],
)
def test_a_copy_taken_within_a_backward_pass_goes_on_to_the_same_bits(
    tmp_path: Path, durability: str, keeps: str
) -> None:
    """A copy of the drive at some moment is as a killed process leaves it."""
    model = offload(tmp_path, host_memory=budget(keeps), durability=durability)
    run = Run(model, "llama", plain=True)
    copies: list[tuple[int, Path]] = []
    step = 0

    def copy(_: nn.Parameter) -> None:
        if step in (2, 3):  # one of them durable with every:2
            copies.append((step, tmp_path / f"copy {len(copies)}"))
            shutil.copytree(tmp_path / "store", copies[-1][1])

    weights = large(model)
    for weight in (weights[0], weights[len(weights) // 2], weights[-1]):
        weight.register_post_accumulate_grad_hook(copy)
    for step in range(STEPS):
        run.go(step + 1, step)
    memascend.close(model)
    assert len(copies) == 3 * 2
    for taken, store in copies:
        resumed = memascend.resume(store, host_memory=budget("some"), update="backward", keep_store=False, **LEAST)
        try:
            # The step before is durable by the first update of this one.
            assert resumed.steps == (taken if durability == "step" else taken // 2 * 2)
            again = Run(resumed.model, "llama", resumed.optimizer, plain=True).go(STEPS, resumed.steps)
            same(again.state(), reference("adamw")[1])
        finally:
            memascend.close(resumed.model)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("use", USES)
def test_what_uses_weights_and_gradients_in_other_ways_has_them(tmp_path: Path, use: str, recompute: bool) -> None:
    expected = train(made(use), use)
    model = memascend.offload(
        made(use), store=tmp_path, host_memory="64MiB", recompute=recompute, update="backward", **LEAST
    )
    try:
        assert all(torch.equal(one, other) for one, other in zip(train(model, use), expected, strict=True))
    finally:
        memascend.close(model)


def test_the_step_of_one_optimizer_does_not_confirm_that_of_another(tmp_path: Path) -> None:
    model = offload(tmp_path, host_memory=budget("nothing"), durability="step")
    layers = model.model.layers
    optimizers = [memascend.AdamW(layer.parameters(), lr=1e-2) for layer in layers]
    try:
        for step in range(2):
            model(**tiny_models.batch("llama", step)).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model(**tiny_models.batch("llama", 2)).loss.backward()
        optimizers[0].step()
        for use in (lambda: memascend.flush(model), lambda: model(**tiny_models.batch("llama", 3))):
            with pytest.raises(memascend.MemascendError, match="already updated"):
                use()
        optimizers[1].step()
    finally:
        memascend.close(model)
