"""APOLLO and APOLLO-Mini against their formulas in float64, and the same bits wherever parameters and states are."""

from __future__ import annotations

import copy
import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from durable_run import LEAST, Run, same
from torch import nn
from transformers import AutoModelForCausalLM

import memascend
from memascend._memascend import ForTests, Projection
from memascend.cli import main
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan
from memascend.optim import apollo_moments
from memascend.session.api import find_offload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


TALL, BROAD = (48, 20), (20, 48)
GAMMA = 1.01


class Reference:
    """The formulas of the paper (arXiv 2412.05270) in float64, for one matrix."""

    def __init__(self, weight: torch.Tensor, options: dict[str, Any]) -> None:
        self.weight, self.options = weight.double().clone(), options
        self.first = self.second = torch.zeros(())
        self.norm: float | None = None
        self.limited = 0
        self.step = 0

    def take(self, gradient: torch.Tensor) -> None:
        options, self.step = self.options, self.step + 1
        gradient = gradient.double()
        rows, columns = gradient.shape
        projection = Projection(rows, columns, options["rank"], 0, (self.step - 1) // options["update_proj_gap"])
        matrix = torch.tensor(ForTests.random_matrix(projection)).double().view(min(rows, columns), options["rank"])
        projected = gradient @ matrix if rows >= columns else matrix.t() @ gradient
        beta1, beta2 = options["betas"]
        self.first = beta1 * self.first + (1 - beta1) * projected
        self.second = beta2 * self.second + (1 - beta2) * projected**2
        stepped = self.first / (self.second.sqrt() + options["eps"])
        if options["scale_type"] == "channel":
            along = 1 if rows >= columns else 0
            factors = stepped.norm(dim=along, keepdim=True) / (projected.norm(dim=along, keepdim=True) + 1e-8)
        else:
            factors = stepped.norm() / (projected.norm() + 1e-8)
        update = factors * gradient
        root = math.sqrt(options["scale"])
        if options["scale_front"]:
            update = update * root
        norm = float(update.norm())
        if self.norm is not None:
            limit = max(norm / (self.norm + 1e-8), GAMMA) / GAMMA
            self.limited += limit > 1
            update, norm = update / limit, norm / limit
        self.norm = norm
        size = options["lr"] * math.sqrt(1 - beta2**self.step) / (1 - beta1**self.step)
        self.weight -= size * (1 if options["scale_front"] else root) * update
        self.weight -= options["lr"] * options["weight_decay"] * self.weight


OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.0,
    "rank": 8,
    "scale": 1.0,
    "scale_type": "channel",
    "scale_front": False,
    "update_proj_gap": 30,
}
MINI = OPTIONS | {"rank": 1, "scale": 128.0, "scale_type": "tensor"}


@pytest.mark.core
@pytest.mark.parametrize("shape", [TALL, BROAD, (24, 24)])
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        OPTIONS | {"rank": 21, "weight_decay": 0.1, "scale": 4.0},
        OPTIONS | {"scale": 3.0, "scale_front": True, "betas": (0.4, 0.95)},
        MINI,
        MINI | {"weight_decay": 0.1, "scale_front": True},
    ],
)
def test_a_hundred_steps_are_those_of_the_formulas(shape: tuple[int, int], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator)
    parameter = nn.Parameter(weight.clone())
    kind = memascend.ApolloMini if options["rank"] == 1 else memascend.Apollo
    optimizer = kind([parameter], **options)
    reference = Reference(weight, options)
    for step in range(100):
        # Sometimes larger, so that the growth of the step is limited.
        size = 5.0 if step % 7 == 3 else 1.0
        parameter.grad = size * torch.randn(shape, generator=generator)
        reference.take(parameter.grad)
        optimizer.step()
    assert 0 < reference.limited < 99, "the limiter is active in some steps"
    moved = (reference.weight - weight.double()).norm()
    assert (parameter.detach().double() - reference.weight).norm() < 2e-6 * (moved + weight.norm())
    state = optimizer.state_dict()["state"][0]
    torch.testing.assert_close(state["exp_avg"].double(), reference.first, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_sq"].double(), reference.second, rtol=1e-4, atol=1e-7)
    assert float(state["norm"]) == pytest.approx(reference.norm, rel=1e-5)


def test_the_random_matrix_is_normal_and_a_function_of_everything_that_it_depends_on() -> None:
    matrix = torch.tensor(ForTests.random_matrix(Projection(300, 400, 200, 1, 0))).double() * math.sqrt(200)
    assert abs(float(matrix.mean())) < 4 / math.sqrt(matrix.numel())
    assert float(matrix.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / matrix.numel()))
    for quantile in (0.001, 0.05, 0.3, 0.5, 0.8, 0.999):
        share = float((matrix < NormalDist().inv_cdf(quantile)).double().mean())
        assert abs(share - quantile) < 4 * math.sqrt(quantile * (1 - quantile) / matrix.numel())
    for other in (Projection(300, 400, 200, 2, 0), Projection(300, 400, 200, 1, 1)):
        products = matrix * torch.tensor(ForTests.random_matrix(other)).double() * math.sqrt(200)
        assert abs(float(products.mean())) < 4 / math.sqrt(matrix.numel())


def test_clipping_and_unscaling_are_factors_of_the_gradient() -> None:
    gradients = [torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def run(loss_scale: float, clip: bool) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(64, 32))
        optimizer = memascend.Apollo([parameter], rank=4)
        for gradient in gradients:
            parameter.grad = gradient * loss_scale * (1 if clip else 1 / max(1.0, float(gradient.norm())))
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        return parameter.detach()

    torch.testing.assert_close(run(1.0, clip=True), run(1.0, clip=False), rtol=1e-5, atol=1e-6)


# ---- the same bits everywhere ------------------------------------------------------------------------------

HALF, FULL = torch.bfloat16, torch.float32
#: By name: the class, options, and the dtype of the model.
VARIANTS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "apollo": (memascend.Apollo, {"rank": 12, "update_proj_gap": 2}, HALF),
    "mini": (memascend.ApolloMini, {"rank": 1}, HALF),
    "apollo fp32": (memascend.Apollo, {"rank": 16, "scale_front": True, "scale": 2.0}, FULL),
    "apollo without master": (memascend.Apollo, {"rank": 4, "master": False, "weight_decay": 0.1}, HALF),
    "mini, upwards": (memascend.ApolloMini, {"rank": 3, "maximize": True, "states": "8bit"}, HALF),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def make(variant: str, model: nn.Module, **more: Any) -> Any:
    kind, options, _ = VARIANTS[variant]
    rest = {name: value for name, value in options.items() if name != "rank"}
    return kind(memascend.apollo_groups(model, options["rank"]), lr=2e-3, **rest, **more)


def build(variant: str, architecture: str = "llama") -> nn.Module:
    return tiny_models.build(architecture, VARIANTS[variant][2])


@pytest.mark.core
@variants
def test_the_same_bits_as_in_memory(offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str) -> None:
    model = memascend.fuse_loss(build(variant))
    expected = tiny_models.train(model, "llama", optimizer=make(variant, model))
    model = offloaded(build(variant))
    tiny_models.assert_same(tiny_models.train(model, "llama", optimizer=make(variant, model)), expected)
    model = memascend.fuse_loss(build(variant))
    optimizer = make(variant, model, store=tmp_path / "states", allocator="pageable")
    tiny_models.assert_same(tiny_models.train(model, "llama", optimizer=optimizer), expected)
    optimizer.close()


@pytest.mark.parametrize("variant", ["apollo", "mini", "apollo without master"])
@pytest.mark.parametrize("tight", [False, True])
def test_neither_budget_nor_threads_matter(
    offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str, tight: bool
) -> None:
    model = build(variant, "qwen3")
    expected = tiny_models.train(model, "qwen3", optimizer=make(variant, model), accumulate=2)
    budget = tiny_models.smallest_budget(build(variant, "qwen3")) if tight else "1GiB"
    stores = [tmp_path / "a", tmp_path / "b"]
    threads = 1 if tight else 3
    model = offloaded(build(variant, "qwen3"), store=stores, host_memory=budget, compute_threads=threads)
    tiny_models.assert_same(tiny_models.train(model, "qwen3", optimizer=make(variant, model), accumulate=2), expected)


@pytest.mark.parametrize("variant", ["apollo", "mini", "apollo without master"])
def test_update_threads_change_no_bit(offloaded: Callable[..., nn.Module], tmp_path: Path, variant: str) -> None:
    model = build(variant, "llama")
    expected = tiny_models.train(model, "llama", optimizer=make(variant, model))
    for threads in (1, 2, 3, 5):
        model = offloaded(build(variant, "llama"), store=tmp_path / str(threads), compute_threads=threads)
        tiny_models.assert_same(tiny_models.train(model, "llama", optimizer=make(variant, model)), expected)


def test_threads_and_pieces_change_no_bit_of_a_step() -> None:
    def run(threads: int) -> torch.Tensor:
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(700, 300)), nn.Parameter(torch.randn(300, 900).bfloat16())]
        optimizer = memascend.Apollo(parameters, rank=40)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for seed in range(3):
                for parameter in parameters:
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                    parameter.grad = noise.to(parameter.dtype)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])

    assert torch.equal(run(1), run(3))


def test_updates_in_the_backward_pass(tmp_path: Path) -> None:
    for variant in ("apollo", "mini"):
        model = memascend.fuse_loss(build(variant))
        expected = Run(model, "llama", make(variant, model), plain=True).go(4)
        least = smallest_plan(partition(build(variant)), update="backward").total
        options = LEAST | {"update": "backward", "host_memory": least}
        model = memascend.offload(build(variant), store=tmp_path / variant, **options)
        try:
            run = Run(model, "llama", make(variant, model), plain=True).go(4)
            assert run.losses == expected.losses
            same(run.state(), expected.state())
        finally:
            memascend.close(model)


def test_options_of_an_update_in_the_backward_pass_stay(tmp_path: Path) -> None:
    least = smallest_plan(partition(build("mini")), update="backward").total
    options = LEAST | {"update": "backward", "host_memory": least}
    model = memascend.offload(build("mini"), store=tmp_path / "store", **options)
    try:
        run = Run(model, "llama", make("mini", model), plain=True).go(2)
        model(**tiny_models.batch("llama", 9)).loss.backward()
        run.optimizer.param_groups[0]["scale"] = 64.0
        with pytest.raises(memascend.MemascendError, match="options of the optimizer have changed"):
            run.optimizer.step()
    finally:
        memascend.close(model)


# ---- saved states, durable steps ---------------------------------------------------------------------------


@variants
def test_a_state_dict_goes_on_to_the_same_bits(offloaded: Callable[..., nn.Module], variant: str) -> None:
    def steps(model: nn.Module, optimizer: Any, numbers: range) -> dict[str, torch.Tensor]:
        for number in numbers:
            tiny_models.step(model, optimizer, "llama", number)
        return dict(memascend.parameters_of(model))

    model = memascend.fuse_loss(build(variant))
    optimizer = make(variant, model)
    steps(model, optimizer, range(3))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = steps(model, optimizer, range(3, 5))
    model = build(variant)
    model.load_state_dict(weights)
    model = offloaded(model)
    optimizer = make(variant, model)
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()["state"]
    assert again.keys() == saved["state"].keys()
    for key, states in saved["state"].items():
        same(again[key], states)
    tiny_models.assert_same_weights(steps(model, optimizer, range(3, 5)), expected)


@pytest.mark.parametrize("durability", ["step", "every:2"])
@pytest.mark.parametrize("variant", ["apollo", "mini"])
def test_a_run_that_fails_resumes_to_the_same_bits(tmp_path: Path, variant: str, durability: str) -> None:
    model = memascend.fuse_loss(build(variant))
    expected = Run(model, "llama", make(variant, model)).go(5)
    options = LEAST | {"durability": durability, "host_memory": tiny_models.smallest_budget(build(variant))}
    model = memascend.offload(build(variant), store=tmp_path / "store", **options)
    run = Run(model, "llama", make(variant, model)).go(3)
    run.model(**tiny_models.batch("llama", 6)).loss.backward()  # half a step, which is given up
    find_offload(model).close(failed=True)
    resumed = memascend.resume(tmp_path / "store", host_memory="1GiB", **LEAST)
    try:
        assert resumed.steps in (2, 3)
        run = Run(resumed.model, "llama", resumed.optimizer).go(5, resumed.steps)
        same(run.state(), expected.state())
    finally:
        memascend.close(resumed.model)


def test_a_step_that_fails_half_way_cannot_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some moments are a step ahead then; the run goes on from the durable step."""
    model = memascend.fuse_loss(build("apollo"))
    expected = Run(model, "llama", make("apollo", model)).go(4)
    model = memascend.offload(build("apollo"), store=tmp_path / "store", host_memory="1GiB", **LEAST)
    run = Run(model, "llama", make("apollo", model)).go(2)
    whole, found = apollo_moments.find_factors, []

    def fail(*arguments: Any) -> None:
        found.append(whole(*arguments))
        if len(found) > 3:
            raise OSError("the drive is gone")

    monkeypatch.setattr(apollo_moments, "find_factors", fail)
    run.model(**tiny_models.batch("llama", 4)).loss.backward()
    with pytest.raises(OSError, match="the drive is gone"):
        run.optimizer.step()
        memascend.flush(model)
    monkeypatch.undo()
    for again in (run.optimizer.step, lambda: memascend.save_checkpoint(model, "half")):
        with pytest.raises(memascend.MemascendError, match=r"failed half-way.*memascend\.resume"):
            again()
    find_offload(model).close(failed=True)
    resumed = memascend.resume(tmp_path / "store", host_memory="1GiB", **LEAST)
    try:
        assert resumed.steps == 2
        run = Run(resumed.model, "llama", resumed.optimizer).go(4, 2)
        same(run.state(), expected.state())
    finally:
        memascend.close(resumed.model)


def test_a_store_of_apollo_is_inspected_and_exported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    model = memascend.offload(build("apollo"), store=store, host_memory="1GiB", keep_store=True, **LEAST)
    run = Run(model, "llama", make("apollo", model)).go(2)
    weights, states = dict(memascend.parameters_of(model)), run.optimizer.state_dict()
    memascend.close(model)
    assert main.main(["inspect", str(store), "--tensors"]) == 0
    told = capfd.readouterr().out
    assert "Apollo" in told and "model.layers.0.mlp.up_proj.weight.moments" in told
    assert main.main(["export", str(store), "--out", str(out), "--format", "torch"]) == 0
    for name, value in AutoModelForCausalLM.from_pretrained(out).named_parameters():
        assert torch.equal(value, weights[name]), name
    saved = torch.load(out / "optimizer.pt", weights_only=True)
    assert saved["state"].keys() == states["state"].keys()
    for key, values in states["state"].items():
        same(saved["state"][key], values)
    # The values that the paper's own code keeps of a matrix.
    shapes = {tuple(values["exp_avg"].shape) for values in saved["state"].values()}
    assert (tiny_models.WIDE, 12) in shapes
    assert main.main(["export", str(store), "--out", str(tmp_path / "d"), "--format", "distributed"]) != 0
    assert "Apollo do not have the shapes of parameters" in capfd.readouterr().err


def test_a_step_that_is_left_out_leaves_the_moments(offloaded: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        run = Run(model, "llama", make("apollo", model, nonfinite="skip"), plain=True).go(2)
        loss = model(**tiny_models.batch("llama", 50)).loss
        (loss * math.inf).backward()
        run.optimizer.step()
        assert run.optimizer.skipped_steps == 1
        run.optimizer.zero_grad()
        run.go(4, 2)
        return run.state()

    same(run(offloaded(build("apollo"))), run(memascend.fuse_loss(build("apollo"))))


# ---- refusals ----------------------------------------------------------------------------------------------


def test_what_apollo_cannot_take_is_refused_with_a_remedy() -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="apollo_groups"):
        memascend.Apollo([matrix, vector])
    for option in ({"rank": 0}, {"update_proj_gap": 0}, {"scale": 0}, {"proj": "svd"}, {"proj_type": "left"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            memascend.Apollo([matrix], **option)
    with pytest.raises(ValueError, match="scale_type"):
        memascend.Apollo([matrix], scale_type="row")
    optimizer = memascend.Apollo([matrix], rank=2)
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    optimizer.param_groups[0]["rank"] = 3
    with pytest.raises(memascend.MemascendError, match="rank=3"):
        optimizer.step()


def test_groups_of_a_model() -> None:
    model = tiny_models.build("llama")
    matrices, rest = memascend.apollo_groups(model, rank=8, scale=2.0)
    assert (matrices["rank"], matrices["scale"], "rank" in rest) == (8, 2.0, False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("proj" in names[id(parameter)] for parameter in matrices["params"])
    assert {names[id(parameter)] for parameter in rest["params"]} >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert len(matrices["params"]) + len(rest["params"]) == len(names)


# ---- reads -------------------------------------------------------------------------------------------------


def test_a_gradient_is_read_once(offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on gradients of large matrices are projected when they are captured."""
    variant = "apollo of a large rank"
    monkeypatch.setitem(VARIANTS, variant, (memascend.Apollo, {"rank": 100}, HALF))
    model = memascend.fuse_loss(build(variant))
    expected = Run(model, "llama", make(variant, model)).go(3)
    model = offloaded(build(variant), host_memory=tiny_models.smallest_budget(build(variant)))
    run = Run(model, "llama", make(variant, model)).go(1)
    session = find_offload(model)
    taken = []

    class Counting:
        """The runtime, or its projections, which are recorded."""

        def __init__(self, native: Any) -> None:
            self.native = native

        def __getattr__(self, name: str) -> Any:
            if name in ("take_projected", "project_gradient"):
                taken.append(name)
            value = getattr(self.native, name)
            return Counting(value) if name == "projections" else value

    monkeypatch.setattr(session, "runtime", Counting(session.runtime))
    run.go(3, 1)
    large = [p for p in session.places if not p.tensor.packed and p.shape != (tiny_models.VOCABULARY, tiny_models.WIDE)]
    assert taken == 2 * len(large) * ["take_projected"]
    assert any(place.gradient.projected[1] * 2 > 65536 for place in large), "one is put aside in several chunks"
    same(run.state(), expected.state())
