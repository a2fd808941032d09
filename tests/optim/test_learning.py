"""The result of training with states and weights of few bits, and the fairness of random rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from training_states import STATES, WEIGHTS

import memascend

#: The weights that most models have.
SIXTEEN_BITS = ("bf16", "bf16-no-master")


# ---- training ---------------------------------------------------------------------------------------------

TOKENS, TRAINING_STEPS, PEAK_LR = 64, 250, 5e-3


def trained(dtype: torch.dtype, **options: Any) -> float:
    """Train a small language model and return its loss on unseen text."""
    generator = torch.Generator().manual_seed(7)
    # In this language, each of the last two words makes some next words likelier.
    first, second = 2 * torch.randn(2, TOKENS, TOKENS, generator=generator)

    def text(words: int) -> tuple[torch.Tensor, torch.Tensor]:
        last = torch.randint(TOKENS, (words, 2), generator=generator)
        chances = (first[last[:, 0]] + second[last[:, 1]]).softmax(dim=-1)
        return last, torch.multinomial(chances, 1, generator=generator).squeeze(1)

    torch.manual_seed(8)
    # Both matrices are large enough for 8 bits, in 16-bit weights as well.
    model = nn.Sequential(
        nn.Embedding(TOKENS, 32), nn.Flatten(), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, TOKENS)
    ).to(dtype)
    optimizer = memascend.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=TRAINING_STEPS)
    for _ in range(TRAINING_STEPS):
        last, following = text(128)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(last).float(), following).backward()
        optimizer.step()
        schedule.step()
    last, following = text(4096)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(last).float(), following))


@pytest.fixture(scope="module")
def loss_in_fp32() -> float:
    return trained(torch.float32)


@pytest.fixture(scope="module")
def loss_in_bf16() -> float:
    return trained(torch.bfloat16)


@pytest.fixture(scope="module")
def loss_in_fp16() -> float:
    return trained(torch.float16)


def test_the_network_learns_in_every_dtype(loss_in_fp32: float, loss_in_bf16: float, loss_in_fp16: float) -> None:
    # The model learns half the entropy of a guess, and 16-bit weights with masters reach the loss of fp32.
    assert loss_in_fp32 < 0.6 * math.log(TOKENS)
    assert loss_in_bf16 == pytest.approx(loss_in_fp32, rel=0.01)
    assert loss_in_fp16 == pytest.approx(loss_in_fp32, rel=0.01)


@pytest.mark.parametrize(
    "weight", [name if name in SIXTEEN_BITS else pytest.param(name, marks=pytest.mark.soak) for name in WEIGHTS]
)
@pytest.mark.parametrize("states", STATES)
def test_training_ends_where_fp32_states_and_masters_end(
    request: pytest.FixtureRequest, states: str, weight: str
) -> None:
    dtype, master = WEIGHTS[weight]
    if master and states == "float32":
        pytest.skip("this is the reference")
    expected = request.getfixturevalue(f"loss_in_{weight.split('-')[0]}")
    loss = trained(dtype, states=states, master=master)
    print(f"{states} {weight}: {loss / expected - 1:+.3%}")
    assert loss == pytest.approx(expected, rel=0.01)


# ---- rounding at random -----------------------------------------------------------------------------------


def within_four_sigma(sample: torch.Tensor, expected: float) -> bool:
    sample = sample.double()
    return abs(float(sample.mean()) - expected) <= 4 * float(sample.std()) / math.sqrt(sample.numel())


@pytest.mark.parametrize("gradient", [2e-4, -3.0])
def test_weights_without_masters_move_as_fp32_on_average(gradient: float) -> None:
    numel, steps, lr = 2**18, 60, 1e-5
    start = (1 + torch.rand(numel, generator=torch.Generator().manual_seed(9))).bfloat16()

    def run(value: torch.Tensor, **options: Any) -> torch.Tensor:
        parameter = nn.Parameter(value.clone())
        optimizer = memascend.AdamW([parameter], lr=lr, weight_decay=0.0, **options)
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        return parameter.detach()

    expected = float(run(torch.full((1,), 1.5)) - 1.5)
    assert expected == pytest.approx(-math.copysign(steps * lr, gradient), rel=0.01)
    # The bf16 value nearest to the result of a step is the old weight: rounding to nearest would never move it.
    assert torch.equal((start.float() + math.copysign(lr, gradient)).bfloat16(), start)

    moved = run(start, master=False).float() - start.float()
    assert within_four_sigma(moved, expected), f"{float(moved.mean())} instead of {expected}"
    # A step rounds to one of two neighbours: some weights move by one bf16 ulp, and most do not move.
    assert 0.02 < float((moved != 0).float().mean()) < 0.2
    assert float(moved.abs().max()) <= 4 * 2**-7

    # The same seed gives the same numbers, and another seed gives others.
    assert torch.equal(run(start, master=False).float() - start.float(), moved)
    assert not torch.equal(run(start, master=False, seed=1).float() - start.float(), moved)


def test_moments_in_bf16_grow_as_in_fp32_on_average() -> None:
    numel, steps = 2**15, 400
    parameter = nn.Parameter(torch.zeros(numel))
    optimizer = memascend.AdamW([parameter], betas=(0.995, 0.999), states="bfloat16")
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(steps):
        parameter.grad = torch.ones(numel)
        optimizer.step()
        nearest = (0.999 * nearest.float() + 0.001).bfloat16()
    state = optimizer.state_dict()["state"][0]
    for name, beta in (("exp_avg", 0.995), ("exp_avg_sq", 0.999)):
        assert state[name].dtype == torch.bfloat16
        expected = 1 - beta**steps
        mean = float(state[name].double().mean())
        assert within_four_sigma(state[name], expected), f"{name}: {mean} instead of {expected}"
    # Rounded to nearest, the second moment would stop moving on the way.
    assert float(nearest) < 0.9 * (1 - 0.999**steps)


def test_parameters_of_one_optimizer_round_independently() -> None:
    parameters = [nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = memascend.AdamW(parameters, lr=1e-3, weight_decay=0.0, master=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = [parameter.detach() != 1 for parameter in parameters]
    shares = [float(each.double().mean()) for each in moved]
    both = float((moved[0] & moved[1]).double().mean())
    # Each moves with probability 1/4, and both with the product of their probabilities.
    expected = shares[0] * shares[1]
    assert 0.2 < shares[0] < 0.32
    assert abs(both - expected) <= 4 * math.sqrt(expected * (1 - expected) / 2**14), shares
