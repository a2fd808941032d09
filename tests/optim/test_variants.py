"""Every optimizer, kind of states and master: the same bits on SSD as in memory, saved and loaded exactly."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from torch import nn

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HALF, FULL = torch.bfloat16, torch.float32
#: By name: the optimizer, its options, and the dtype of the model.
VARIANTS: dict[str, tuple[type[memascend.AdamW], dict[str, Any], torch.dtype]] = {
    "amsgrad": (memascend.AdamW, {"amsgrad": True}, HALF),
    "amsgrad fp32 maximize": (memascend.AdamW, {"amsgrad": True, "maximize": True}, FULL),
    "adam with L2": (memascend.Adam, {"weight_decay": 0.1}, HALF),
    "bf16 states": (memascend.AdamW, {"states": "bfloat16"}, HALF),
    "bf16 states fp32": (memascend.AdamW, {"states": torch.bfloat16, "seed": 5}, FULL),
    "8-bit states": (memascend.AdamW, {"states": "8bit"}, HALF),
    "8-bit amsgrad fp32": (memascend.AdamW, {"states": "8bit", "amsgrad": True}, FULL),
    "no master": (memascend.AdamW, {"master": False}, HALF),
    "no master, bf16 states": (memascend.AdamW, {"master": False, "states": "bfloat16", "seed": 3}, HALF),
    "lion": (memascend.Lion, {"weight_decay": 0.1}, HALF),
    "lion 8-bit": (memascend.Lion, {"states": "8bit", "master": False}, HALF),
    "sgd": (memascend.SGD, {"weight_decay": 0.01}, HALF),
    "sgd without states at all": (memascend.SGD, {"master": False}, HALF),
    "sgd momentum": (memascend.SGD, {"momentum": 0.9, "nesterov": True}, FULL),
    "sgd momentum bf16": (memascend.SGD, {"momentum": 0.9, "dampening": 0.5, "states": "bfloat16"}, HALF),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def make(variant: str, model: nn.Module, **more: Any) -> Any:
    kind, options, _ = VARIANTS[variant]
    return kind(model.parameters(), lr=2e-3, **options, **more)


def build(variant: str) -> nn.Module:
    return tiny_models.build("plain", VARIANTS[variant][2])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> dict[str, torch.Tensor]:
    for number in numbers:
        model(**tiny_models.batch("plain", number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(memascend.parameters_of(model))


# ---- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.core
@variants
def test_the_same_bits_as_in_memory(offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str) -> None:
    model = build(variant)
    assert any(p.numel() * p.element_size() >= 64 * 1024 for p in model.parameters()), (
        "something large enough for 8 bits"
    )
    expected = tiny_models.train(model, "plain", optimizer=make(variant, model))
    assert not torch.equal(expected.weights["head.weight"], build(variant).get_parameter("head.weight"))
    model = offloaded(build(variant))
    tiny_models.assert_same(tiny_models.train(model, "plain", optimizer=make(variant, model)), expected)
    model = build(variant)
    optimizer = make(variant, model, store=tmp_path / "states", allocator="pageable")
    tiny_models.assert_same(tiny_models.train(model, "plain", optimizer=optimizer), expected)
    optimizer.close()


@pytest.mark.parametrize("variant", ["bf16 states", "no master", "8-bit states", "amsgrad"])
@pytest.mark.parametrize("tight", [False, True])
def test_neither_budget_nor_threads_matter(
    offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str, tight: bool
) -> None:
    model = tiny_models.build("qwen2", torch.bfloat16)
    expected = tiny_models.train(model, "qwen2", optimizer=make(variant, model), accumulate=2)
    budget = tiny_models.smallest_budget(tiny_models.build("qwen2", torch.bfloat16)) if tight else "1GiB"
    stores = [tmp_path / "a", tmp_path / "b"]
    model = offloaded(
        tiny_models.build("qwen2", torch.bfloat16), store=stores, host_memory=budget, compute_threads=1 if tight else 3
    )
    tiny_models.assert_same(tiny_models.train(model, "qwen2", optimizer=make(variant, model), accumulate=2), expected)
    torch.set_num_threads(2)
    try:
        model = tiny_models.build("qwen2", torch.bfloat16)
        optimizer = make(variant, model)
        weights = tiny_models.train(model, "qwen2", optimizer=optimizer, accumulate=2).weights
    finally:
        torch.set_num_threads(1)
    # PyTorch's own sums may differ between thread counts, so only the thread count of the steps is checked.
    assert weights.keys() == expected.weights.keys()


@variants
def test_update_threads_change_no_bit(offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str) -> None:
    model = build(variant)
    expected = tiny_models.train(model, "plain", optimizer=make(variant, model))
    for threads in (1, 2, 3, 5):
        model = offloaded(build(variant), store=tmp_path / str(threads), compute_threads=threads)
        assert memascend.stats(model)["threads"]["update"] == threads
        tiny_models.assert_same(tiny_models.train(model, "plain", optimizer=make(variant, model)), expected)


def test_the_seed_matters_and_parameters_round_apart() -> None:
    def run(seed: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(40_000, dtype=HALF)) for _ in range(2)]
        optimizer = memascend.AdamW(parameters, lr=1e-4, master=False, seed=seed)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    first, second = run(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, run(0)[0])
    assert not torch.equal(first, run(1)[0])


def test_groups_may_keep_their_states_differently(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> tiny_models.Trace:
        named = dict(model.named_parameters())
        head = [p for name, p in named.items() if "head" in name]
        norms = [p for name, p in named.items() if "norm" in name]
        rest = [p for name, p in named.items() if "head" not in name and "norm" not in name]
        groups = [
            {"params": rest, "states": "8bit"},
            {"params": head, "amsgrad": True, "lr": 1e-3},
            # This parameter is packed with parameters of the other groups.
            {"params": norms, "states": "bfloat16", "master": False, "maximize": True},
        ]
        return tiny_models.train(model, "plain", optimizer=memascend.AdamW(groups, lr=2e-3))

    tiny_models.assert_same(run(offloaded(tiny_models.build("plain", HALF))), run(tiny_models.build("plain", HALF)))


def test_two_algorithms_in_one_pack(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        lion = memascend.Lion([p for name, p in named.items() if name.endswith("bias")], lr=1e-3, states="bfloat16")
        adam = memascend.AdamW([p for name, p in named.items() if not name.endswith("bias")], lr=2e-3)
        for number in range(3):
            model(**tiny_models.batch("plain", number)).loss.backward()
            if number != 1:
                lion.step()
            adam.step()
            adam.zero_grad()
            lion.zero_grad()
        return dict(memascend.parameters_of(model))

    tiny_models.assert_same_weights(
        run(offloaded(tiny_models.build("plain", HALF))), run(tiny_models.build("plain", HALF))
    )


def test_unfrozen_later_without_a_word(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    # PyTorch's optimizers allocate states at the first gradient.
    def run(model: nn.Module, **where: Any) -> dict[str, torch.Tensor]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" not in name)
        optimizer = memascend.AdamW(model.parameters(), lr=2e-3, **where)
        steps(model, optimizer, range(2))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        weights = steps(model, optimizer, range(2, 4))
        optimizer.close()
        return weights

    expected = run(tiny_models.build("plain", HALF))
    tiny_models.assert_same_weights(run(offloaded(tiny_models.build("plain", HALF))), expected)
    on_ssd = run(tiny_models.build("plain", HALF), store=tmp_path / "states", allocator="pageable")
    tiny_models.assert_same_weights(on_ssd, expected)


def test_what_is_kept_costs_what_it_should(offloaded: Callable[..., nn.Module]) -> None:
    def used(**options: Any) -> float:
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))).bfloat16()
        model = offloaded(layers, durability="none")
        before = memascend.stats(model)["store_bytes_used"]
        memascend.AdamW(model.parameters(), **options)
        parameters = memascend.stats(model)["parameters"]
        found = (memascend.stats(model)["store_bytes_used"] - before) / parameters - 2  # the gradient
        memascend.close(model)
        return found

    # The scales of 65,536 elements take one page.
    eight_bits = 1 + 4096 / 65536
    for options, expected in [
        ({}, 8 + 2),
        ({"amsgrad": True}, 12 + 2),
        ({"states": "bfloat16"}, 4 + 2),
        ({"states": "8bit"}, 2 * eight_bits + 2),
        ({"states": "8bit", "master": False}, 2 * eight_bits),
    ]:
        assert used(**options) == expected, options


# ---- float16 -------------------------------------------------------------------------------------------------


def scaled(model: nn.Module, **options: Any) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    optimizer = memascend.AdamW(model.parameters(), lr=2e-3, **options)
    scaler = memascend.GradScaler(init_scale=2.0**12, growth_interval=2)
    norms = []
    for number in range(5):
        loss = model(**tiny_models.batch("plain", number)).loss
        scaler.scale(loss * math.inf if number == 2 else loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(optimizer.clip_grad_norm_(1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return dict(memascend.parameters_of(model)), norms, optimizer


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_float16_weights(offloaded: Callable[..., nn.Module], tmp_path: Path, states: str) -> None:
    expected, norms, reference = scaled(tiny_models.build("plain", torch.float16), states=states)
    assert math.isnan(norms.pop(2))
    assert all(0.0 < norm < 100.0 for norm in norms), "unscaled before they are clipped"
    ours, our_norms, optimizer = scaled(offloaded(tiny_models.build("plain", torch.float16)), states=states)
    our_norms.pop(2)
    assert our_norms == norms
    tiny_models.assert_same_weights(ours, expected)
    on_ssd = {"store": tmp_path / "states", "allocator": "pageable"}
    tiny_models.assert_same_weights(
        scaled(tiny_models.build("plain", torch.float16), states=states, **on_ssd)[0], expected
    )
    for one, other in zip(
        optimizer.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True
    ):
        assert other["step"] == 4
        for name, value in other.items():
            assert torch.equal(one[name], value), name
    master = reference.state_dict()["state"][0]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master.half(), next(iter(expected.values())))
    assert not torch.equal(master, master.half().float()), "the master knows more than the weight"


def test_pytorch_trains_float16_no_better() -> None:
    # The purpose of a master: steps smaller than half a unit of the weight's last place add up.
    ours, theirs = (nn.Parameter(torch.ones(100, dtype=torch.float16)) for _ in range(2))
    optimizers = [memascend.SGD([ours], lr=1e-5), torch.optim.SGD([theirs], lr=1e-5)]
    for _ in range(100):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert (theirs == 1).all()
    assert torch.allclose(ours.float(), torch.tensor(1 - 1e-3), atol=6e-4)
    assert (ours < 1).all()


# ---- saved and loaded ----------------------------------------------------------------------------------------


@pytest.mark.core
@variants
def test_a_run_goes_on_from_its_state_dict_as_if_nothing_had_happened(
    offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str
) -> None:
    straight = build(variant)
    expected = steps(straight, make(variant, straight), range(4))

    model = offloaded(build(variant))
    optimizer = make(variant, model)
    weights = steps(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    memascend.close(model)
    for where in ("memory", "ssd"):
        saved = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=where == "ssd")
        model = build(variant)
        with torch.no_grad():
            for name, value in weights.items():
                model.get_parameter(name).copy_(value)
        if where == "ssd":
            offloaded(model)
        optimizer = make(variant, model)
        optimizer.load_state_dict(saved)
        tiny_models.assert_same_weights(steps(model, optimizer, range(2, 4)), expected)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_states_of_torch_are_taken_over_in_any_format(states: str, amsgrad: bool) -> None:
    theirs = nn.Parameter(torch.linspace(-1, 1, 100_000))
    reference = torch.optim.AdamW([theirs], amsgrad=amsgrad)
    for step in range(3):
        theirs.grad = torch.sin(torch.arange(100_000) * (step + 1.0))
        reference.step()
    ours = nn.Parameter(theirs.detach().clone())
    optimizer = memascend.AdamW([ours], states=states, lr=9.0)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["states"] == states
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["amsgrad"] == amsgrad
    saved, original = optimizer.state_dict()["state"][0], reference.state_dict()["state"][0]
    assert saved.keys() == original.keys()
    tolerance = {"float32": 0.0, "bfloat16": 2**-8, "8bit": 0.0071}[states]
    for name in saved.keys() - {"step"}:
        allowed = tolerance * (original[name].abs().max() if states == "8bit" else original[name].abs())
        assert ((saved[name].float() - original[name]).abs() <= allowed).all(), name
    # The reverse direction.
    torch.optim.AdamW([nn.Parameter(theirs.detach().clone())]).load_state_dict(optimizer.state_dict())


def test_momentum_of_torch_is_taken_over() -> None:
    theirs, ours = (nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2))
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    theirs.grad = torch.ones(1000)
    reference.step()
    ours.data.copy_(theirs.data)
    optimizer = memascend.SGD([ours], lr=0.1, momentum=0.9)
    optimizer.load_state_dict(reference.state_dict())
    for parameter in (theirs, ours):
        parameter.grad = torch.full((1000,), 0.5)
    reference.step()
    optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_what_a_state_dict_does_not_have_begins_anew(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=2e-3)
        steps(model, optimizer, range(2))
        saved = optimizer.state_dict()
        saved["state"] = {key: value for key, value in saved["state"].items() if key % 2}
        optimizer.load_state_dict(saved)
        return steps(model, optimizer, range(2, 4))

    expected = run(tiny_models.build("plain", HALF))
    tiny_models.assert_same_weights(run(offloaded(tiny_models.build("plain", HALF))), expected)
    whole = tiny_models.build("plain", HALF)
    assert not torch.equal(steps(whole, memascend.AdamW(whole.parameters(), lr=2e-3), range(4))["mix"], expected["mix"])


def test_a_state_dict_takes_no_memory(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).bfloat16())
    optimizer = memascend.AdamW(model.parameters())
    model(torch.ones(1, 2048, dtype=HALF)).float().sum().backward()
    optimizer.step()
    optimizer.flush()
    states_bytes = 10 * memascend.stats(model)["parameters"]

    def private() -> int:
        with open("/proc/self/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before = private()
    saved = optimizer.state_dict()
    assert sum(v.nbytes for s in saved["state"].values() for v in s.values()) > states_bytes
    assert private() - before < states_bytes / 20
    torch.save(saved, tmp_path / "optimizer.pt")
    del saved
    before = private()
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=True)
    optimizer.load_state_dict(loaded)
    assert private() - before < states_bytes / 20
    again = optimizer.state_dict()["state"]
    for key, state in loaded["state"].items():
        for name, value in state.items():
            assert torch.equal(again[key][name], value), name


def test_hooks_and_copies() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = memascend.AdamW([parameter], nonfinite="skip")
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("before") or state)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["step", "before", "after"]

    model = nn.Linear(3, 3)
    optimizer = memascend.AdamW(model.parameters(), nonfinite="skip", states="bfloat16")

    def once(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.arange(3.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return next(model.parameters()).detach().clone()

    once(model, optimizer)
    copied, twin = copy.deepcopy((model, optimizer))
    thawed, frozen = pickle.loads(pickle.dumps((model, optimizer)))
    expected = once(model, optimizer)
    assert torch.equal(once(copied, twin), expected)
    assert torch.equal(once(thawed, frozen), expected)
    assert twin.nonfinite == "skip"


def test_what_is_on_ssd_is_not_copied(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("plain", HALF))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(memascend.AdamW(model.parameters()))


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: memascend.AdamW([p], states="int4"), ValueError, "int4"),
        (lambda p: memascend.AdamW([p], states=torch.float16), ValueError, "float16"),
        (lambda p: memascend.AdamW([p], nonfinite="ignore"), ValueError, "nonfinite.*propagate, skip, raise"),
        (lambda p: memascend.AdamW([p], seed=-1), ValueError, "seed"),
        (lambda p: memascend.AdamW([p], capturable=True), ValueError, "capturable"),
        (lambda p: memascend.SGD([p], differentiable=True), ValueError, "differentiable"),
        (lambda p: memascend.AdamW([p], fused=True, foreach=True), RuntimeError, "fused.*foreach"),
        (lambda p: memascend.AdamW([p], lr=torch.ones(2)), ValueError, "Tensor lr must be 1-element"),
        (lambda p: memascend.AdamW([p], betas=(torch.tensor(0.9), 0.99)), ValueError, "both floats or both Tensors"),
        (lambda p: memascend.SGD([p], momentum=-1), ValueError, "Invalid momentum value: -1"),
        (lambda p: memascend.SGD([p], nesterov=True), ValueError, "Nesterov momentum requires a momentum"),
        (lambda p: memascend.Lion([p], betas=(0.9, 1.0)), ValueError, "Invalid beta parameter at index 1: 1.0"),
        (lambda p: memascend.Lion([p], lr=-1), ValueError, "Invalid learning rate: -1"),
        (lambda p: memascend.AdamW([p], engin="ring"), TypeError, "engin"),
        (
            lambda p: memascend.AdamW([nn.Parameter(p.detach().half())], master=False),
            ValueError,
            "float16 weights need a master",
        ),
    ],
)
def test_bad_options(make: Callable[[nn.Parameter], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(nn.Parameter(torch.ones(4)))


def test_a_learning_rate_may_be_a_tensor() -> None:
    ours, theirs = (nn.Parameter(torch.ones(4)) for _ in range(2))
    lr = torch.tensor(0.1)
    optimizers = [memascend.AdamW([ours], lr=lr), torch.optim.AdamW([theirs], lr=lr, foreach=False)]
    for parameter in (ours, theirs):
        parameter.grad = torch.ones(4)
    for rate in (0.1, 0.01):
        lr.fill_(rate)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, theirs)


def test_bad_gradients_change_nothing(offloaded: Callable[..., nn.Module]) -> None:
    good, bad = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 3))
    optimizer = memascend.AdamW([good, bad], lr=0.1)
    good.grad = torch.ones(4)
    bad.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match="AdamW does not support sparse gradients"):
        optimizer.step()
    bad.grad = torch.ones(4, 3)
    bad.data = torch.ones(5, 3)
    with pytest.raises(RuntimeError, match=r"gradient of shape \(4, 3\)"):
        optimizer.step()
    bad.grad, bad.data = None, torch.ones(4, 3, dtype=torch.float64)
    bad.grad = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        optimizer.step()
    assert torch.equal(good.detach(), torch.ones(4))
    assert not optimizer.state_dict()["state"]

    model = offloaded(nn.Sequential(nn.Embedding(300, 300, sparse=True), nn.Linear(300, 300)))
    with pytest.raises(ValueError, match="sparse"):
        model(torch.arange(3)).sum().backward()


def test_neither_parameters_nor_gradients_need_be_contiguous(tmp_path: Path) -> None:
    def run(contiguous: bool, **where: Any) -> torch.Tensor:
        values = torch.linspace(0, 1, 300 * 400).view(300, 400).t()
        parameter = nn.Parameter(values.contiguous() if contiguous else values)
        assert parameter.is_contiguous() == contiguous
        optimizer = memascend.AdamW([parameter], lr=0.1, **where)
        for _ in range(2):
            gradient = torch.linspace(-1, 1, 300 * 400).view(300, 400).t()
            parameter.grad = gradient.contiguous() if contiguous else gradient
            optimizer.step()
        optimizer.close()
        return parameter.detach()

    expected = run(True)
    assert torch.equal(run(False), expected)
    assert torch.equal(run(False, store=tmp_path / "states", allocator="pageable"), expected)


def test_states_cannot_change_their_format_on_the_way() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = memascend.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, value, lost in (("states", "bfloat16", "exp_avg"), ("master", False, "master_low")):
        kept = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(memascend.MemascendError, match=f"{lost}.*state_dict"):
            optimizer.step()
        optimizer.param_groups[0][name] = kept
    # This change adds a state and loses none.
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()
    assert optimizer.state_dict()["state"][0].keys() >= {"max_exp_avg_sq"}


# ---- gradients that are not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ssd", "memory"])
def test_gradients_that_are_not_finite_follow_the_policy(offloaded: Callable[..., nn.Module], where: str) -> None:
    model = tiny_models.build("plain", HALF)
    if where == "ssd":
        offloaded(model)
    optimizer = memascend.AdamW(model.parameters(), lr=2e-3, nonfinite="skip")

    def backward(factor: float) -> None:
        optimizer.zero_grad()
        (model(**tiny_models.batch("plain", 0)).loss * factor).backward()

    backward(1.0)
    optimizer.step()
    before = dict(memascend.parameters_of(model))
    backward(math.nan)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.nonfinite = "raise"
    backward(math.inf)
    with pytest.raises(memascend.MemascendError, match=r"not finite.*nothing has changed"):
        optimizer.step()
    optimizer.zero_grad()
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), before)
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1}
    backward(1.0)
    optimizer.step()
    assert not torch.equal(dict(memascend.parameters_of(model))["mix"], before["mix"])
    optimizer.nonfinite = "propagate"
    backward(math.nan)
    optimizer.step()
    assert dict(memascend.parameters_of(model))["mix"].isnan().all()
