"""APOLLO for experts in one tensor: the bits of experts that are parameters of their own, wherever they are."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bit_equality import difference
from small_mixtures import ODD, assert_same, batch, build
from torch import nn

import memascend
from memascend.optim.apollo_experts import seed_of
from memascend.optim.state_backend import BackendContext
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: So few tokens that most experts get none.
FEW = {"rows": 1, "columns": 2}
OWN: dict[str, dict[str, Any]] = {
    "channels": {"rank": 8, "update_proj_gap": 3},
    "tensor": {"rank": 1, "scale": 128.0, "scale_type": "tensor", "scale_front": True},
    "rounded": {"rank": 4, "weight_decay": 0.1, "master": False},
    "upwards": {"rank": 20, "maximize": True, "scale": 4.0},
}


@pytest.mark.core
@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 40, 24)], ids=["broad", "tall"])
@pytest.mark.parametrize("options", OWN)
def test_each_expert_is_as_a_parameter_of_its_own(
    monkeypatch: pytest.MonkeyPatch, options: str, shape: tuple[int, ...]
) -> None:
    """An expert without tokens in a step is left out of it, as a parameter without a gradient is."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if options == "rounded" else torch.float32
    stack = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    own = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    ours, theirs = (memascend.Apollo(parameters, lr=1e-2, **OWN[options]) for parameters in ([stack], own))
    seed = BackendContext.seed
    numbers = {parameter: expert for expert, parameter in enumerate(own)}

    def of_expert(self: BackendContext, group: dict[str, Any], parameter: nn.Parameter) -> int:
        return seed_of(0, numbers[parameter]) if parameter in numbers else seed(self, group, parameter)

    monkeypatch.setattr(BackendContext, "seed", of_expert)
    idle = {0: {1, 2}, 1: {2}, 2: {2, 4}, 4: {1}, 6: set(range(5))}
    for step in range(8):
        stack.grad = torch.randn(shape, generator=generator).to(dtype)
        for expert, parameter in enumerate(own):
            parameter.grad = stack.grad[expert].clone()
            if expert in idle.get(step, ()):
                stack.grad[expert], parameter.grad = -0.0, None
        ours.step()
        theirs.step()
        assert difference(list(stack.detach()), [parameter.detach() for parameter in own]) is None, step
    states = ours.state_dict()["state"][0]
    assert states["steps"].tolist() == [7, 5, 4, 7, 6]
    for expert, of_own in theirs.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq", "norm"):
            assert torch.equal(states[name][expert], of_own[name]), name
        assert int(of_own["step"]) == states["steps"][expert]


# ---- the same bits as in memory --------------------------------------------------------------------------------------


def make(model: nn.Module, rank: int = 4, **options: Any) -> Any:
    return memascend.Apollo(memascend.apollo_groups(model, rank), lr=2e-3, update_proj_gap=2, **options)


def steps(model: nn.Module, optimizer: Any, numbers: range, clip: float | None = 0.5) -> list[torch.Tensor]:
    """Train; few tokens reach few experts in every second step."""
    losses = []
    for number in numbers:
        loss = model(**batch(number, **FEW if number % 2 else {})).loss
        loss.backward()
        losses.append(loss.detach().clone())
        if clip is not None:
            losses.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(model: nn.Module, optimizer: Any = None, numbers: range = range(3), clip: float | None = 0.5) -> Any:
    optimizer = optimizer or make(model)
    losses = steps(model, optimizer, numbers, clip)
    return losses, dict(memascend.parameters_of(model))


def test_groups_have_the_experts_of_a_model() -> None:
    model = build("gpt_oss")
    matrices, others = memascend.apollo_groups(model, 4)
    shapes = {parameter.ndim for parameter in matrices["params"]}
    assert shapes == {2, 3} and sum(p.ndim == 3 for p in matrices["params"]) == 2 * len(model.model.layers)
    assert all(parameter.ndim < 3 for parameter in others["params"])
    matrices, others = memascend.apollo_groups(model, 4, experts=False)
    assert all(parameter.ndim == 2 for parameter in matrices["params"])
    assert {parameter.ndim for parameter in others["params"]} == {1, 2, 3}


@pytest.mark.core
@pytest.mark.parametrize("experts", ["whole", "pieces"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4"])
def test_the_least_budget_has_the_bits_of_memory(
    offloaded: Callable[..., nn.Module], architecture: str, experts: str
) -> None:
    model = build(architecture)
    optimizer = make(model)
    expected = trained(model, optimizer)
    counts = [steps for state in optimizer.state.values() for steps in state.get("steps", [])]
    assert min(counts) < 3 or architecture == "llama4", "an expert got no tokens in a step"
    assert max(counts) == 3
    model = offloaded(build(architecture), host_memory=None, experts=experts)
    assert_same(trained(model), expected)


@pytest.mark.parametrize("options", [{"states": "8bit", "master": False}, {"rank": 1, "scale_type": "tensor"}], ids=str)
def test_other_options_and_experts_within_pages(
    offloaded: Callable[..., nn.Module], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Experts whose parts of the update begin anywhere in a chunk."""
    model = build("qwen3_moe", **ODD)
    expected = trained(model, make(model, **options))
    model = offloaded(build("qwen3_moe", **ODD), host_memory=None, experts="pieces")
    assert_same(trained(model, make(model, **options)), expected)
    model = build("qwen3_moe", **ODD)
    optimizer = make(model, **options, store=tmp_path / "states", allocator="pageable")
    assert_same(trained(model, optimizer), expected)
    optimizer.close()


@pytest.mark.parametrize("experts", ["whole", "pieces"])
def test_updates_in_the_backward_pass(offloaded: Callable[..., nn.Module], experts: str) -> None:
    expected = trained(build("qwen3_moe"), clip=None)
    model = offloaded(build("qwen3_moe"), update="backward", host_memory=None, experts=experts)
    assert_same(trained(model, clip=None), expected)


def test_a_state_dict_goes_on_to_the_same_bits(offloaded: Callable[..., nn.Module]) -> None:
    model = build("qwen3_moe")
    optimizer = make(model)
    steps(model, optimizer, range(2))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = trained(model, optimizer, range(2, 4))
    model = build("qwen3_moe")
    model.load_state_dict(weights)
    optimizer = make(offloaded(model))
    optimizer.load_state_dict(saved)
    assert difference(optimizer.state_dict()["state"], saved["state"]) is None
    assert_same(trained(model, optimizer, range(2, 4)), expected)
    saved["state"][next(key for key, state in saved["state"].items() if "steps" in state)].pop("steps")
    with pytest.raises(ValueError, match="lack steps or norm"):
        make(build("qwen3_moe")).load_state_dict(saved)


@pytest.mark.parametrize("durability", ["step", "every:2", "none"])
def test_a_run_that_fails_goes_on_to_the_same_bits(tmp_path: Path, durability: str) -> None:
    """Moments of experts without tokens are those of a step before."""
    model = build("qwen3_moe")
    expected = trained(model, numbers=range(5))
    options: dict[str, Any] = {"allocator": "pageable", "host_memory": None, "keep_store": True}
    pieces = options | {"durability": durability, "experts": "pieces"}
    model = memascend.offload(build("qwen3_moe"), store=tmp_path / "store", **pieces)
    optimizer = make(model)
    steps(model, optimizer, range(3))
    if durability != "none":
        model(**batch(6)).loss.backward()  # Half a step, which is given up.
    find_offload(model).close(failed=durability != "none")
    resumed = memascend.resume(tmp_path / "store", **options)
    try:
        losses, weights = trained(resumed.model, resumed.optimizer, range(resumed.steps, 5))
        assert_same((losses, weights), (expected[0][2 * resumed.steps :], expected[1]))
    finally:
        memascend.close(resumed.model)
