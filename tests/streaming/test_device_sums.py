"""Sums of gradients that stay on the device from pass to pass, as far as the plan has room: the bits are memory's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from simulated_device import Accesses, SimulatedDevice, captured

import memascend
from memascend.memory_plan.device import make_device_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import fake_cuda
    from torch import nn


#: Backward passes of each step: the step before predicts them, rightly or wrongly.
PASSES = (3, 3, 1, 4, 2, 2)


def train(model: nn.Module, after: Callable[[int, int], None] = lambda step, number: None) -> tuple[Any, ...]:
    """Train with another number of passes in each step; `after` is called after each pass."""
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    norms, seen = [], 0
    for step, passes in enumerate(PASSES):
        for number in range(passes):
            model(**tiny_models.batch("llama", seen)).loss.backward()
            seen += 1
            after(step, number)
        norms.append(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(memascend.parameters_of(model))


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == expected[0]
    tiny_models.assert_same_weights(found[1], expected[1])


@pytest.mark.core
@pytest.mark.parametrize("share", [0, 0.3, 1], ids=["none", "some", "all"])
def test_sums_come_down_once(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake, share: float) -> None:
    expected = train(tiny_models.build("llama"))
    fake.set("lateness", 7)
    model = on_device(tiny_models.build("llama"))
    session = memascend.offload_of(model)
    gradients = captured(model)
    whole = sum(place.nbytes for place in session.places)
    assert gradients.sums.room >= whole
    gradients.sums.room = int(whole * share)
    copied: list[int] = []
    stayed: list[int] = []

    def after(step: int, number: int) -> None:
        gradients.leaving.wait()  # copies on their way have arrived
        copied.append(memascend.stats(model)["device"]["d2h_bytes"])
        stayed.append(gradients.sums.nbytes)

    with Accesses(fake):
        found = train(model, after)
    assert_same(found, expected)
    assert gradients.sums.nbytes == 0
    # The second step knows of three passes: the sum comes down with the third.
    assert stayed[0] == 0
    assert all((room > 0) == (share > 0) for room in stayed[3:5]) and stayed[5] == 0
    of_second_step = copied[5] - copied[2]
    if share == 1:
        assert whole <= of_second_step < 1.1 * whole, "gradients, once, and the sums of their squares"
        assert copied[4] == copied[2]
    else:
        assert of_second_step > (3 - 2 * share - 0.2) * whole


def test_a_program_finds_its_gradients(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    """Read, scaled, replaced and discarded between two passes, wherever the sum is."""

    def run(model: nn.Module) -> tuple[Any, ...]:
        shown: list[torch.Tensor] = []

        def after(step: int, number: int) -> None:
            weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
            if step == 1 and number == 0:
                shown.extend(parameter.grad.clone() for parameter in model.parameters())
            elif step == 1 and number == 1:
                weights[0].grad.mul_(0.5)
                weights[1].grad = None
                weights[2].grad = torch.ones_like(weights[2].grad)
            elif step == 3 and number == 0:
                model.zero_grad()
            elif step == 3 and number == 1:
                weights[3].grad.zero_()
                shown.append(weights[4].grad.norm())

        norms, weights = train(model, after)
        return [*norms, *shown], weights

    expected = run(tiny_models.build("llama"))
    model = on_device(tiny_models.build("llama"))
    with Accesses(fake):
        found = run(model)
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    tiny_models.assert_same_weights(found[1], expected[1])


def test_another_budget_between_two_passes(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    expected = train(tiny_models.build("llama"))
    model = on_device(tiny_models.build("llama"))
    gradients = captured(model)

    def after(step: int, number: int) -> None:
        if step == 1 and number == 0:
            assert gradients.sums.nbytes
            memascend.set_device_memory(model, tiny_models.smallest_device_budget(tiny_models.build("llama")))
            assert gradients.sums.room == gradients.sums.nbytes == 0
        elif step == 2:
            memascend.set_device_memory(model, "1GiB")

    with Accesses(fake):
        assert_same(train(model, after), expected)


def test_sums_have_what_weights_leave() -> None:
    units = memascend.layout.units.partition(tiny_models.build("llama"))
    least = make_device_plan(units, None, free=1 << 40).smallest_bytes
    weights = sum(unit.nbytes for unit in units)
    for budget in range(least, least + 12 * weights, weights // 3):
        plan = make_device_plan(units, budget)
        assert plan.total <= budget
        staying = plan.weights_bytes >= weights
        assert staying or not plan.sums_bytes, "weights come first"
        assert plan.sums_bytes <= weights + 4096
    gradients = sum(place.nbytes for unit in units for place in unit.places)
    assert 0 <= make_device_plan(units, 1 << 40).sums_bytes - gradients < 4096


def test_a_model_is_closed_amid_a_step(on_device: Callable[..., nn.Module], fake: fake_cuda.Fake) -> None:
    model = on_device(tiny_models.build("llama"), device=SimulatedDevice())

    class Left(Exception):
        pass

    def leave(step: int, number: int) -> None:
        if step == 1:
            assert captured(model).sums.nbytes
            raise Left

    with pytest.raises(Left), Accesses(fake):
        train(model, leave)
    memascend.close(model)
