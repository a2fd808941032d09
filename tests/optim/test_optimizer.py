"""memascend.AdamW compared with torch.optim.AdamW, through every part of PyTorch's optimizer interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 20
#: In fp32 places of |weight| + |its updates so far|; measured: 3.25.
BOUND_ULPS = 6.0
SHAPES = [(300, 257), (64,), (513, 128)]


def master_of(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Put a bf16 weight and the low half of its master together, as state_dict documents it."""
    bits = (weight.detach().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def ulps(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the largest distance in units of the last fp32 place of `scale`."""
    unit = torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
    return float(((actual.double() - expected.double()).abs() / unit.double()).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_close_to_torch(dtype: torch.dtype, weight_decay: float) -> None:
    # Gradients are the same numbers for both, so only the arithmetic of the update is compared. The largest distance
    # seen in 20 steps is 3.25 ulp: the two differ only in where they round.
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    ours = [nn.Parameter(value.clone()) for value in start]
    theirs = [nn.Parameter(value.float().clone()) for value in start]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": weight_decay}
    mine = memascend.AdamW(ours, **options)
    reference = torch.optim.AdamW(theirs, foreach=False, fused=False, **options)
    worst = 0.0
    travelled = [torch.zeros_like(value) for value in theirs]
    for _ in range(STEPS):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = (torch.randn(one.shape, generator=generator) * 0.1).to(dtype)
            other.grad = one.grad.float()
        before = [value.detach().clone() for value in theirs]
        mine.step()
        reference.step()
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            master = one.detach() if dtype == torch.float32 else master_of(one, mine.state[one]["master_low"])
            travelled[index] += (other.detach() - before[index]).abs()
            worst = max(worst, ulps(master, other.detach(), other.detach().abs() + travelled[index]))
    assert 0.0 < worst <= BOUND_ULPS, f"{worst} ulp"
    for one, other in zip(ours, theirs, strict=True):
        if dtype == torch.bfloat16:
            # The weight that the model sees is its master to the nearest bf16, ties away from zero or to even.
            assert ((one.detach().float() - other.detach()).abs() <= other.detach().abs() * 2**-8).all()


def test_the_bound_is_sharp_enough_to_see_a_wrong_epsilon() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    mine = memascend.AdamW([ours], lr=1e-2, eps=1e-8)
    reference = torch.optim.AdamW([theirs], lr=1e-2, eps=2e-6, foreach=False)
    for one in (ours, theirs):
        one.grad = torch.full_like(values, 0.01)
    mine.step()
    reference.step()
    assert ulps(ours.detach(), theirs.detach(), theirs.detach().abs() + 0.01) > BOUND_ULPS


def model_of_all_kinds(dtype: torch.dtype = torch.bfloat16) -> tiny_models.Plain:
    model = tiny_models.build("plain", dtype)
    assert isinstance(model, tiny_models.Plain)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups with options of their own; small parameters of one pack are in different groups."""
    named = dict(model.named_parameters())
    decay = [p for name, p in named.items() if p.ndim > 1 and "head" not in name]
    head = [p for name, p in named.items() if "head" in name]
    rest = [p for name, p in named.items() if p.ndim == 1 and "head" not in name]
    assert decay and head and rest
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": head, "lr": 5e-3, "betas": (0.8, 0.99)},
        {"params": rest, "weight_decay": 0.0, "lr": 2e-2, "eps": 1e-6},
    ]


def test_param_groups(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    def run(model: nn.Module, **where: Any) -> tiny_models.Trace:
        optimizer = memascend.AdamW(groups_of(model), lr=1e-2, **where)
        trace = tiny_models.train(model, "plain", optimizer=optimizer)
        optimizer.close()
        return trace

    expected = run(model_of_all_kinds())
    tiny_models.assert_same(run(offloaded(model_of_all_kinds())), expected)
    tiny_models.assert_same(run(model_of_all_kinds(), store=tmp_path / "states", allocator="pageable"), expected)
    one_group = tiny_models.train(model_of_all_kinds(), "plain", lr=1e-2)
    assert not torch.equal(one_group.weights["head.weight"], expected.weights["head.weight"])
    assert not torch.equal(one_group.weights["shift"], expected.weights["shift"])


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            ],
            milestones=[2],
        ),
    ],
    ids=["cosine", "one cycle", "sequential"],
)
def test_schedulers(offloaded: Callable[..., nn.Module], make: Callable[[Any], Any]) -> None:
    def run(model: nn.Module) -> tuple[list[Any], dict[str, torch.Tensor]]:
        optimizer = memascend.AdamW(groups_of(model), lr=1e-2)
        scheduler = make(optimizer)
        rates = []
        for step in range(4):
            model(**tiny_models.batch("plain", step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # The update uses the rate at the time of step(), though it may run later.
            scheduler.step()
            rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return rates, dict(memascend.parameters_of(model))

    rates, weights = run(model_of_all_kinds())
    actual_rates, actual = run(offloaded(model_of_all_kinds()))
    assert actual_rates == rates
    assert len({str(rate) for rate in rates}) == 4
    tiny_models.assert_same_weights(actual, weights)


def test_add_param_group(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    def run(model: nn.Module, **where: Any) -> dict[str, torch.Tensor]:
        named = list(model.named_parameters())
        for name, parameter in named:
            parameter.requires_grad_("head" in name)
        optimizer = memascend.AdamW([p for name, p in named if "head" in name], lr=1e-2, **where)
        for step in range(4):
            if step == 2:
                added = [p for name, p in named if "head" not in name]
                for parameter in added:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({"params": added, "lr": 1e-3})
            model(**tiny_models.batch("plain", step)).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = dict(memascend.parameters_of(model))
        optimizer.close()
        return weights

    expected = run(model_of_all_kinds())
    tiny_models.assert_same_weights(run(offloaded(model_of_all_kinds())), expected)

    # The states of a group added later go to the store too, beside the first ones.
    def in_host(**store: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(300, 300)), nn.Parameter(torch.randn(5))]
        optimizer = memascend.AdamW(parameters[:1], lr=1e-2, **store)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": parameters[1:], "lr": 1e-3})
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            optimizer.step()
        optimizer.close()
        return parameters

    on_ssd, in_memory = in_host(store=tmp_path / "states", allocator="pageable"), in_host()
    assert all(torch.equal(a, b) for a, b in zip(on_ssd, in_memory, strict=True))
    assert not (tmp_path / "states").exists()


def test_closure(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(**tiny_models.batch("qwen2", step)).loss
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses

    expected, actual = run(tiny_models.build("qwen2")), run(offloaded(tiny_models.build("qwen2")))
    assert [float(loss) for loss in actual] == [float(loss) for loss in expected]


class Choice(nn.Module):
    """Use one of two branches, so that the other has no gradient; each has packed and large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        for index in used:
            x = self.branches[index](x)
        return x.float().square().mean() + x.float().abs().sin().mean()


@pytest.mark.parametrize("recompute", [True, False])
def test_missing_gradients(offloaded: Callable[..., nn.Module], tmp_path: Path, recompute: bool) -> None:
    # A parameter without a gradient is neither updated nor decayed, and its step does not count.
    def run(model: nn.Module, **where: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **where)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
        for used in [(0,), (0, 1), (1, 2), (2, 0)]:
            model(x, *used).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        steps = [int(optimizer.state[p].get("step", 0)) for p in model.parameters()]
        weights = dict(memascend.parameters_of(model))
        optimizer.close()
        return weights, steps

    def fresh() -> nn.Module:
        torch.manual_seed(5)
        return Choice().bfloat16()

    weights, steps = run(fresh())
    assert steps == [3] * 6 + [2] * 12
    for actual, counted in (
        run(offloaded(fresh(), recompute=recompute)),
        run(fresh(), store=tmp_path / "states", allocator="pageable"),
    ):
        assert counted == steps
        tiny_models.assert_same_weights(actual, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_move_between_offloaded_and_memory(
    offloaded: Callable[..., nn.Module], tmp_path: Path, dtype: torch.dtype
) -> None:
    def leg(model: nn.Module, first: int, saved: dict[str, Any] | None) -> tuple[dict[str, Any], nn.Module]:
        optimizer = memascend.AdamW(groups_of(model), lr=1e-2)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in range(first, first + 2):
            model(**tiny_models.batch("plain", step)).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        path = tmp_path / "optimizer.pt"
        torch.save(optimizer.state_dict(), path)
        return torch.load(path, weights_only=True), model

    def successor(model: nn.Module) -> nn.Module:
        new = model_of_all_kinds(dtype)
        with torch.no_grad():
            for name, value in memascend.parameters_of(model):
                new.get_parameter(name).copy_(value)
        return new

    straight = model_of_all_kinds(dtype)
    optimizer = memascend.AdamW(groups_of(straight), lr=1e-2)
    for step in range(6):
        straight(**tiny_models.batch("plain", step)).loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    saved, model = leg(offloaded(model_of_all_kinds(dtype)), 0, None)
    copy = successor(model)
    memascend.close(model)
    saved, model = leg(copy, 2, saved)
    saved, model = leg(offloaded(successor(model)), 4, saved)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(memascend.parameters_of(straight)))
    ours, theirs = saved["state"], optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for key, state in theirs.items():
        assert ours[key].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(ours[key][name]), torch.as_tensor(value)), (key, name)


def test_states_move_to_and_from_torch(offloaded: Callable[..., nn.Module]) -> None:
    generator = torch.Generator().manual_seed(8)

    def step(*pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
        # All optimizers get the same gradients.
        for name, parameter in pairs[0][0].named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator) * 0.1
            for model, _ in pairs:
                model.get_parameter(name).grad = gradient.clone()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()

    theirs = model_of_all_kinds(torch.float32)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False)
    for _ in range(3):
        step((theirs, reference))
    ours = model_of_all_kinds(torch.float32)
    ours.load_state_dict(theirs.state_dict())
    offloaded(ours)
    optimizer = memascend.AdamW(ours.parameters(), lr=1.0)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    again = optimizer.state_dict()["state"]
    for key, state in reference.state_dict()["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(again[key][name], state[name]), (key, name)
    for _ in range(3):
        step((theirs, reference), (ours, optimizer))
    expected = dict(theirs.named_parameters())
    for name, value in memascend.parameters_of(ours):
        scale = expected[name].detach().abs() + 0.06  # six steps of the learning rate
        assert ulps(value, expected[name].detach(), scale) <= BOUND_ULPS, name

    back = torch.optim.AdamW(model_of_all_kinds(torch.float32).parameters(), lr=1.0)
    back.load_state_dict(optimizer.state_dict())
    assert back.param_groups[0]["lr"] == 1e-2
    for key, state in reference.state_dict()["state"].items():
        loaded = back.state_dict()["state"][key]
        assert loaded["step"] == state["step"] == 6
        torch.testing.assert_close(loaded["exp_avg"], state["exp_avg"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("volumes", [1, 2])
def test_states_alone_on_ssd(tmp_path: Path, architecture: str, dtype: torch.dtype, volumes: int) -> None:
    expected = tiny_models.train(tiny_models.build(architecture, dtype), architecture, accumulate=2)
    model = tiny_models.build(architecture, dtype)
    stores = [tmp_path / str(index) for index in range(volumes)]
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3, store=stores, allocator="pageable")
    assert sum(file.stat().st_size for store in stores for file in store.iterdir()) > 8 * 10**5
    tiny_models.assert_same(tiny_models.train(model, architecture, accumulate=2, optimizer=optimizer), expected)
    optimizer.close()
    assert not any(store.exists() for store in stores)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
    ],
)
def test_bad_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        memascend.AdamW([nn.Parameter(torch.ones(4))], **bad)


def test_bad_parameters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float64"):
        memascend.AdamW([nn.Parameter(torch.ones(4, dtype=torch.float64))])
    with pytest.raises(ValueError, match="view_as_real"):
        memascend.AdamW([nn.Parameter(torch.ones(4, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="meta"):
        memascend.AdamW([nn.Parameter(torch.ones(4, device="meta"))])
    with pytest.raises(ValueError, match="empty"):
        memascend.AdamW([])
    with pytest.raises(ValueError, match="size"):
        memascend.AdamW([nn.Parameter(torch.ones(4))], store=tmp_path / "s", host_memory="much")
    with pytest.raises(memascend.BudgetError, match=r"host memory budget of .* is too small") as caught:
        memascend.AdamW([nn.Parameter(torch.ones(4))], store=tmp_path / "s", host_memory=4096)
    assert not (tmp_path / "s").exists()
    optimizer = memascend.AdamW(
        [nn.Parameter(torch.ones(4))],
        store=tmp_path / "s",
        host_memory=caught.value.smallest_bytes,
        allocator="pageable",
    )
    optimizer.close()


def test_load_state_dict_refuses_what_does_not_fit(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(model_of_all_kinds())
    optimizer = memascend.AdamW(model.parameters())
    other = memascend.AdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict(other.state_dict())
    shapes = [nn.Parameter(torch.ones(3)) for _ in model.parameters()]
    for parameter in shapes:
        parameter.grad = torch.ones(3)
    other = memascend.AdamW(shapes)
    other.step()
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(other.state_dict())


def test_discarded_gradients(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)

        def backward(number: int) -> None:
            model(**tiny_models.batch("plain", number)).loss.backward()

        backward(0)
        model.zero_grad()
        backward(1)
        for name, parameter in model.named_parameters():
            if "layers.1" in name or name == "shift":
                parameter.grad = None
        backward(2)  # accumulates, but from nothing where the gradient was dropped
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        backward(3)
        optimizer.zero_grad()
        optimizer.step()  # does nothing
        backward(4)
        model.get_parameter("head.weight").grad = None
        model.get_parameter("head.bias").grad = None
        optimizer.step()
        return dict(memascend.parameters_of(model))

    expected = run(model_of_all_kinds())
    budget = tiny_models.smallest_budget(model_of_all_kinds())
    for where in ({}, {"host_memory": budget}):
        model = offloaded(model_of_all_kinds(), **where)
        tiny_models.assert_same_weights(run(model), expected)
        memascend.close(model)


def test_gradients_zeroed_in_place(offloaded: Callable[..., nn.Module]) -> None:
    # zero_grad(set_to_none=False) writes zeros into p.grad, which only shows a gradient kept elsewhere.
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            model(**tiny_models.batch("plain", number)).loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            model.zero_grad(set_to_none=False)
        for number in range(2, 4):
            model(**tiny_models.batch("plain", number)).loss.backward()
            model.zero_grad(set_to_none=False)
        model.get_parameter("mix").grad.fill_(0.25)
        assert optimizer.clip_grad_norm_(1.0) == 0.25 * tiny_models.WIDE
        optimizer.step()  # momentum alone, but for one
        return dict(memascend.parameters_of(model))

    expected = run(model_of_all_kinds())
    tiny_models.assert_same_weights(run(offloaded(model_of_all_kinds())), expected)


def test_discarded_gradients_give_their_memory_back(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(model_of_all_kinds())
    optimizer = memascend.AdamW(model.parameters())
    tiny_models.logits(model, "plain")
    before = memascend.stats(model)["host_bytes_in_use"]
    model(**tiny_models.batch("plain", 0)).loss.backward()
    kept = memascend.stats(model)["host_bytes_in_use"]
    optimizer.zero_grad()
    assert kept - before > 2048 * 256 * 2
    assert memascend.stats(model)["host_bytes_in_use"] <= before


def test_two_optimizers_of_one_layer(offloaded: Callable[..., nn.Module]) -> None:
    # Their updates meet in the same units, and in the same packs.
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        one = memascend.AdamW([p for name, p in named.items() if name.endswith("bias")], lr=1e-2)
        other = memascend.AdamW([p for name, p in named.items() if not name.endswith("bias")], lr=1e-3)
        for number in range(4):
            model(**tiny_models.batch("plain", number)).loss.backward()
            one.clip_grad_norm_(0.1)
            one.step()
            other.step()
            one.zero_grad()
            other.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = run(model_of_all_kinds())
    tiny_models.assert_same_weights(run(offloaded(model_of_all_kinds())), expected)


def test_gradients_set_by_hand(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        model(**tiny_models.batch("plain", 0)).loss.backward()
        for name in ("head.weight", "shift"):
            parameter = model.get_parameter(name)
            parameter.grad = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
        model(**tiny_models.batch("plain", 1)).loss.backward()  # adds to the value that was set
        parameter = model.get_parameter("mix")
        parameter.grad = torch.full(parameter.shape, 0.5, dtype=parameter.dtype)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return dict(memascend.parameters_of(model))

    expected = run(model_of_all_kinds())
    tiny_models.assert_same_weights(run(offloaded(model_of_all_kinds())), expected)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_torch(offloaded: Callable[..., nn.Module], foreach: bool) -> None:
    """Gradients are multiplied in their own dtype, as in memory."""

    def run(model: nn.Module) -> torch.Tensor:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        model(**tiny_models.batch("plain", 0)).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    expected, model = model_of_all_kinds(), offloaded(model_of_all_kinds())
    assert torch.equal(run(model), run(expected))
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(memascend.parameters_of(expected)))


@pytest.mark.parametrize("where", ["memory", "offloaded"])
def test_overflow_shows_in_the_norm(offloaded: Callable[..., nn.Module], where: str) -> None:
    model = model_of_all_kinds()
    if where == "offloaded":
        offloaded(model)
    optimizer = memascend.AdamW(model.parameters())
    (model(**tiny_models.batch("plain", 0)).loss * float("inf")).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    before = dict(memascend.parameters_of(model))
    optimizer.zero_grad()
    model(**tiny_models.batch("plain", 1)).loss.backward()
    assert torch.isfinite(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    after = dict(memascend.parameters_of(model))
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_the_norm_is_that_of_torch() -> None:
    model = tiny_models.build("qwen3", torch.float32)
    optimizer = memascend.AdamW(model.parameters())
    model(**tiny_models.batch("qwen3", 0)).loss.backward()
    expected = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
    assert optimizer.clip_grad_norm_(1.0) == expected.float()


@pytest.mark.parametrize("where", ["memory", "states", "offloaded"])
def test_a_graph_older_than_the_step_is_refused(
    offloaded: Callable[..., nn.Module], tmp_path: Path, where: str
) -> None:
    # The weights of the graph are gone. PyTorch refuses too ("modified by an inplace operation").
    for recompute in (True, False):
        model = model_of_all_kinds()
        if where == "offloaded":
            offloaded(model, recompute=recompute)
        states: dict[str, Any] = {"store": tmp_path / "s", "allocator": "pageable"} if where == "states" else {}
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2, **states)
        old = model(**tiny_models.batch("plain", 0)).loss
        old.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed since"):
            old.backward()
        optimizer.zero_grad()
        memascend.close(model)
        optimizer.close()
