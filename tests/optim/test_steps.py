"""A step is taken whole or not at all, and no optimizer uses the states of another."""

from __future__ import annotations

import copy
import gc
import math
import signal
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from torch import nn

import memascend
from memascend.optim.step import OptimizerStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memascend.optim.schedule import Schedule

pytestmark = pytest.mark.core

HALF = torch.bfloat16


def backward(model: nn.Module, number: int = 0, factor: float = 1.0) -> None:
    (model(**tiny_models.batch("plain", number)).loss * factor).backward()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in memascend.parameters_of(model)}


def placed(
    where: str, model: nn.Module, offloaded: Callable[..., nn.Module], tmp_path: Path
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, offloaded or not, and where its optimizer is to keep its states."""
    if where == "store":
        return model, {"store": tmp_path / "states", "allocator": "pageable"}
    return offloaded(model) if where == "offloaded" else model, {}


def ones(dtype: torch.dtype = torch.float32, numel: int = 1000) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(numel, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


# ---- whole or not at all ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize("where", ["offloaded", "store", "memory"])
def test_what_cannot_be_computed_leaves_everything_as_it_was(
    offloaded: Callable[..., nn.Module], tmp_path: Path, where: str, dtype: torch.dtype
) -> None:
    def run(model: nn.Module, bad: bool, **options: Any) -> dict[str, torch.Tensor]:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:5]}, {"params": parameters[5:]}]
        optimizer = memascend.AdamW(groups, lr=2e-3, **options)
        for number in range(2):
            backward(model, number)
            if bad:
                before = weights_of(model)
                for name, value in (("lr", None), ("seed", "four"), ("states", "int4")):
                    kept = optimizer.param_groups[1][name]
                    optimizer.param_groups[1][name] = value
                    with pytest.raises((TypeError, ValueError)):
                        optimizer.step()
                    optimizer.param_groups[1][name] = kept
                assert all(parameter.grad is not None for parameter in parameters)
                tiny_models.assert_same_weights(weights_of(model), before)
            optimizer.step()
            optimizer.zero_grad()
        weights = weights_of(model)
        optimizer.close()
        return weights

    expected = run(tiny_models.build("plain", dtype), False)
    model, options = placed(where, tiny_models.build("plain", dtype), offloaded, tmp_path)
    tiny_models.assert_same_weights(run(model, True, **options), expected)


def test_a_step_while_a_layer_is_in_use_is_refused_whole(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("plain", torch.float16))
    optimizer = memascend.AdamW(model.parameters(), lr=2e-3)
    backward(model)
    before = weights_of(model)
    state = memascend.offload_of(model)
    state.streamer.enter(state.units[-1])
    with pytest.raises(memascend.MemascendError, match="in use"):
        optimizer.step()
    state.streamer.exit(state.units[-1])
    tiny_models.assert_same_weights(weights_of(model), before)
    assert not optimizer.state_dict()["state"]
    optimizer.step()
    after = weights_of(model)
    assert all((after[name] - value).abs().max() < 0.01 for name, value in before.items()), "masters are the weights"


@pytest.mark.parametrize("where", ["offloaded", "store"])
def test_ctrl_c_waits_for_the_end_of_a_step(
    offloaded: Callable[..., nn.Module], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: nn.Module, interrupt: bool, **options: Any) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=2e-3, **options)
        for number in range(3):
            backward(model, number)
            if interrupt:
                carry_out = OptimizerStep.carry_out

                def interrupted(step: OptimizerStep, schedule: Schedule, carry_out: Any = carry_out) -> None:
                    signal.raise_signal(signal.SIGINT)
                    carry_out(step, schedule)

                monkeypatch.setattr(OptimizerStep, "carry_out", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                monkeypatch.undo()
            else:
                optimizer.step()
            optimizer.zero_grad()
        weights = weights_of(model)
        optimizer.close()
        return weights

    expected = run(tiny_models.build("plain", HALF), False)
    model, options = placed(where, tiny_models.build("plain", HALF), offloaded, tmp_path)
    # A shell starts background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        tiny_models.assert_same_weights(run(model, True, **options), expected)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_states_that_fit_no_more_are_refused(tmp_path: Path) -> None:
    for options in ({}, {"store": tmp_path / "states", "allocator": "pageable"}):
        for numel in (100_000, 10):
            parameter = ones(numel=1000)
            optimizer = memascend.AdamW([parameter], **options)
            optimizer.step()
            parameter.data = torch.ones(numel)
            parameter.grad = torch.ones(numel)
            with pytest.raises(RuntimeError, match="shape"):
                optimizer.step()
            assert (parameter == 1).all()
            optimizer.close()
    parameter = ones(HALF)
    optimizer = memascend.AdamW([parameter], states="bfloat16")
    optimizer.step()
    copied, twin = copy.deepcopy((parameter, optimizer))
    copied.grad = torch.ones_like(copied)
    twin.param_groups[0]["states"] = "float32"
    with pytest.raises(RuntimeError, match="exp_avg"):
        twin.step()


def test_a_closed_optimizer_says_so(tmp_path: Path) -> None:
    parameter = ones()
    optimizer = memascend.AdamW([parameter], store=tmp_path / "states", allocator="pageable")
    optimizer.close()
    with pytest.raises(memascend.MemascendError, match="AdamW was closed"):
        optimizer.step()


# ---- weights that change on the way ----------------------------------------------------------------------------


def test_float16_weights_set_by_hand_are_not_lost() -> None:
    parameter = ones(torch.float16)
    optimizer = memascend.AdamW([parameter], lr=1e-3)
    optimizer.step()
    with torch.no_grad():
        parameter.fill_(5.0)
    optimizer.step()
    assert ((parameter - 5).abs() < 0.01).all()


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_a_master_that_torch_carried_along_is_not_taken_for_the_weight(dtype: torch.dtype) -> None:
    ours = ones(dtype)
    optimizer = memascend.AdamW([ours], lr=1e-3)
    optimizer.step()
    theirs = nn.Parameter(ours.detach().clone())
    reference = torch.optim.AdamW([theirs])
    reference.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        theirs.fill_(0.5)
    back = nn.Parameter(theirs.detach().clone())
    optimizer = memascend.AdamW([back], lr=1e-3)
    optimizer.load_state_dict(reference.state_dict())
    back.grad = torch.zeros_like(back)
    optimizer.step()
    assert ((back.float() - 0.5).abs() < 0.01).all()
    if dtype == torch.bfloat16:
        # Exactly the weight plus the step, without a stale low half.
        fresh = nn.Parameter(theirs.detach().float())
        reference = torch.optim.AdamW([fresh], lr=1e-3)
        low = optimizer.state_dict()["state"][0]["master_low"]
        assert low.unique().numel() == 1


def test_a_model_offloaded_in_mid_training_takes_its_states_along(offloaded: Callable[..., nn.Module]) -> None:
    for dtype in (torch.float16, HALF, torch.float32):
        straight = tiny_models.build("plain", dtype)
        optimizer = memascend.AdamW(straight.parameters(), lr=2e-3)
        model = tiny_models.build("plain", dtype)
        moved = memascend.AdamW(model.parameters(), lr=2e-3)
        for number in range(4):
            if number == 2:
                offloaded(model)
            for each, its in ((straight, optimizer), (model, moved)):
                backward(each, number)
                its.step()
                its.zero_grad()
        tiny_models.assert_same_weights(weights_of(model), weights_of(straight))
        memascend.close(model)


# ---- gradients that are clipped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("where", ["offloaded", "memory"])
def test_the_coefficient_of_discarded_gradients_is_discarded(
    offloaded: Callable[..., nn.Module], where: str, by_model: bool
) -> None:
    def run(model: nn.Module, overflow: bool) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=2e-3)
        if overflow:
            backward(model, 0, math.nan)
            assert optimizer.clip_grad_norm_(1.0).isnan()
            (model if by_model else optimizer).zero_grad()
        backward(model, 1)
        optimizer.step()
        return weights_of(model)

    expected = run(tiny_models.build("plain", HALF), False)
    model = tiny_models.build("plain", HALF)
    tiny_models.assert_same_weights(run(offloaded(model) if where == "offloaded" else model, True), expected)


@pytest.mark.parametrize("where", ["offloaded", "memory"])
def test_clipping_twice_adds_up_and_a_gradient_must_not_change_after(
    offloaded: Callable[..., nn.Module], where: str
) -> None:
    model = tiny_models.build("plain", HALF)
    if where == "offloaded":
        offloaded(model)
    optimizer = memascend.SGD(model.parameters(), lr=1e-3)
    backward(model, 0, 1000.0)
    before = float(optimizer.clip_grad_norm_(1.0))
    assert before > 100
    assert float(optimizer.clip_grad_norm_(50.0)) == pytest.approx(1.0, rel=1e-3)
    assert float(optimizer.clip_grad_norm_(0.5)) == pytest.approx(1.0, rel=1e-3)
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(0.5, rel=1e-3)
    backward(model, 1)
    with pytest.raises(RuntimeError, match="changed after it was clipped"):
        optimizer.step()


def test_a_stand_in_put_back_is_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("plain", HALF))
    optimizer = memascend.AdamW(model.parameters(), lr=2e-3)
    backward(model)
    saved = {parameter: parameter.grad for parameter in model.parameters()}
    optimizer.zero_grad()
    for parameter, gradient in saved.items():
        with pytest.raises(memascend.MemascendError, match=r"this gradient of .* is gone"):
            parameter.grad = gradient
    optimizer.step()  # no gradients are left: nothing to do
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_backward_pass_that_failed_leaves_nothing_to_add_to(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module, fail: bool) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=2e-3)
        if fail:
            backward(model, 0)

            def refuse(_: torch.Tensor) -> None:
                raise ValueError("this error is part of the test")

            hook = model.get_parameter("mix").register_hook(refuse)
            with pytest.raises(ValueError, match="part of the test"):
                backward(model, 1)
            hook.remove()
            optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        return weights_of(model)

    expected = run(tiny_models.build("plain", HALF), False)
    tiny_models.assert_same_weights(run(offloaded(tiny_models.build("plain", HALF)), True), expected)


def test_scaled_float16_gradients_are_not_mistaken_for_others() -> None:
    for change in ("replace", "clip"):
        parameter = ones(torch.float16)
        optimizer = memascend.SGD([parameter], lr=0.1)
        scaler = memascend.GradScaler(init_scale=1024.0)
        scaler.scale(parameter.float().sum()).backward()
        scaler.unscale_(optimizer)
        if change == "replace":
            parameter.grad = torch.ones_like(parameter)
            scaler.step(optimizer)
            assert torch.allclose(parameter.float(), torch.tensor(0.9), atol=1e-3)
        else:
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            with pytest.raises(RuntimeError, match="with the optimizer's clip_grad_norm_"):
                scaler.step(optimizer)


# ---- several optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "slots"), [("none", 1), ("step", 2)])
def test_a_second_optimizer_begins_anew_and_the_first_is_told(
    offloaded: Callable[..., nn.Module], durability: str, slots: int
) -> None:
    def second(model: nn.Module, **options: Any) -> memascend.Lion:
        optimizer = memascend.Lion(model.parameters(), lr=1e-3, **options)
        for number in range(2, 4):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def both(model: nn.Module) -> tuple[memascend.AdamW, memascend.Lion]:
        first = memascend.AdamW(model.parameters(), lr=2e-3)
        backward(model, 0)
        first.step()
        first.zero_grad()
        return first, second(model, states="bfloat16")

    expected = tiny_models.build("plain", HALF)
    both(expected)
    model = offloaded(tiny_models.build("plain", HALF), durability=durability)
    first, other = both(model)
    tiny_models.assert_same_weights(weights_of(model), weights_of(expected))
    # The states of the first optimizer are gone and move no more. The weight, the low half and one bf16 state move, in
    # as many slots, and the gradient.
    used = memascend.stats(model)["store_bytes_used"]
    assert used / memascend.stats(model)["parameters"] == pytest.approx(slots * (2 + 2 + 2) + 2, rel=0.05)
    backward(model, 4)
    with pytest.raises(memascend.MemascendError, match="trained by another optimizer since"):
        first.step()
    # It is refused until states are loaded again.
    first.load_state_dict(memascend.AdamW(tiny_models.build("plain", HALF).parameters()).state_dict())
    first.step()
    first.zero_grad()
    with pytest.raises(memascend.MemascendError, match="trained by another optimizer since"):
        backward(model, 5)
        other.step()


def test_states_of_an_optimizer_that_is_gone_make_room_at_once(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("plain", HALF), durability="none")
    optimizer = memascend.AdamW(model.parameters(), amsgrad=True)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    before = memascend.stats(model)["store_bytes_used"]
    del optimizer
    gc.collect()
    memascend.SGD(model.parameters(), master=False)
    after = memascend.stats(model)["store_bytes_used"]
    assert (before - after) / memascend.stats(model)["parameters"] > 13


def test_8_bits_after_32_at_the_smallest_budget(offloaded: Callable[..., nn.Module]) -> None:
    budget = tiny_models.smallest_budget(tiny_models.build("plain", HALF))

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        for options in ({}, {"states": "8bit"}, {"amsgrad": True}):
            optimizer = memascend.AdamW(model.parameters(), lr=2e-3, **options)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    tiny_models.assert_same_weights(
        run(offloaded(tiny_models.build("plain", HALF), host_memory=budget)), run(tiny_models.build("plain", HALF))
    )


def test_momentum_switched_on_later_begins_as_the_gradient(offloaded: Callable[..., nn.Module]) -> None:
    def run(parameters: list[nn.Parameter], kind: Any) -> None:
        optimizer = kind(parameters, lr=0.1, momentum=0.0, dampening=0.0)
        for momentum, dampening in ((0.0, 0.0), (0.9, 0.5), (0.9, 0.5)):
            optimizer.param_groups[0].update(momentum=momentum, dampening=dampening)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    ours, theirs = ones(), ones()
    run([ours], memascend.SGD)
    run([theirs], torch.optim.SGD)
    torch.testing.assert_close(ours, theirs)
    model = offloaded(nn.Linear(300, 300))
    other = nn.Linear(300, 300)
    with torch.no_grad():
        for (_, value), parameter in zip(memascend.parameters_of(model), other.parameters(), strict=True):
            parameter.copy_(value)
    run(list(model.parameters()), memascend.SGD)
    run(list(other.parameters()), memascend.SGD)
    tiny_models.assert_same_weights(weights_of(model), weights_of(other))


# ---- dictionaries ---------------------------------------------------------------------------------------------------


def test_a_dictionary_that_does_not_fit_changes_nothing() -> None:
    first, second = ones(), ones()
    optimizer = memascend.AdamW([first, second], lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(saved)
    broken["param_groups"][0]["lr"] = 7.0
    broken["state"][1]["exp_avg"] = 0.5
    with pytest.raises(ValueError, match="exp_avg of the loaded state dict is a float"):
        optimizer.load_state_dict(broken)
    assert optimizer.param_groups[0]["lr"] == 0.1
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[key][name], value) for key in (0, 1) for name, value in saved["state"][key].items())


def test_options_of_a_dictionary_are_copied_and_adamw_stays_adamw() -> None:
    lr = torch.tensor(0.1)
    first = memascend.Adam([ones()], lr=lr)
    first.step()
    second = memascend.AdamW([ones()])
    second.load_state_dict(first.state_dict())
    lr.fill_(9.0)
    assert float(second.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert second.param_groups[0]["decoupled_weight_decay"]
    third = memascend.Adam([ones()])
    third.load_state_dict(first.state_dict())
    assert not third.param_groups[0]["decoupled_weight_decay"]


def test_amsgrad_switched_on_before_a_step_that_is_left_out() -> None:
    parameter = ones()
    optimizer = memascend.AdamW([parameter], nonfinite="skip")
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert "max_exp_avg_sq" not in optimizer.state_dict()["state"][0]


def test_options_of_groups_are_checked_like_those_of_all() -> None:
    optimizer = memascend.AdamW([ones()])
    before = dict(optimizer._backends.numbers)
    for bad in ({"seed": -1}, {"states": "int4"}, {"states": torch.float16}):
        with pytest.raises(ValueError, match=r"seed|states"):
            optimizer.add_param_group({"params": [ones()], **bad})
    assert len(optimizer.param_groups) == 1
    assert optimizer._backends.numbers == before, "others keep their random numbers"
    optimizer.add_param_group({"params": [ones()], "states": torch.bfloat16})
    optimizer.step()
    for betas in ((0.9,), ()):
        with pytest.raises(ValueError, match="there are two"):
            memascend.AdamW([ones()], betas=betas)
