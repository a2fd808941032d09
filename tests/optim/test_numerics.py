"""Results of the optimizers compared with torch.optim and bitsandbytes, across threads, and with stochastic rounding.

Bounds of a step of fp32 AdamW (Adam, AMSGrad, maximize) that starts from the same state as a step of
`torch.optim.AdamW(foreach=False, fused=False)`, on random and on hostile inputs:

- `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq` are within 2 ulp, strictly. Measured: equal bits.
- The weight is within 2 ulp, strictly, of PyTorch's own code with a correctly rounded square root, and of
  PyTorch's fused step. Measured: equal bits, cancellation or not.
- PyTorch's square root (MKL) is one ulp off for one number in six. Two divisions and a sum turn this into up to
  `ROOT_ULPS` ulp of the update. Strict ulp of the weight therefore mean nothing where weight and update nearly
  cancel, and 2 ulp of the larger of the weight before and after hold while the update is at most a quarter of it.
  PyTorch's fused and single-tensor steps differ from each other by just as much.

This is for PyTorch's vector code (AVX2, AVX-512), which fuses multiply-adds in `lerp` and `addcmul`, as memascend does
on every processor. PyTorch's code for other processors does not, and so differs from its own vector code too.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from training_states import STATES, WEIGHTS

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Steps of a comparison, and elements of each kind of gradient.
STEPS, ELEMENTS = 100, 257
#: Tolerance of a step, in units of the last place.
STRICT_ULPS = 2
#: Error of PyTorch's square root, in ulp of the update.
ROOT_ULPS = 8
#: Parameters below this many bytes keep fp32 states.
SMALLEST_8BIT_BYTES = 64 * 1024


vector_code = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no vector code for this processor"
)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads, which is one in other tests."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def places(values: torch.Tensor) -> torch.Tensor:
    """Number the fp32 values in order from zero, so that a difference is a distance in ulp. All NaNs are equal."""
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFF_FFFF), bits)


def strict_ulps(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (places(actual) - places(expected)).abs()


def ulp_of(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    return (torch.nextafter(magnitude, torch.full_like(magnitude, torch.inf)) - magnitude).double()


# ---- fp32, a step at a time -----------------------------------------------------------------------------


class CorrectRoot(TorchFunctionMode):
    """Count PyTorch's fp32 square roots, and round them correctly: fp64 has more than twice the digits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.roots = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.sqrt and args[0].dtype == torch.float32:
            self.roots += 1
            return args[0].double().sqrt().float()
        return function(*args, **(kwargs or {}))


#: Gradients of a step, by the step and by noise. Each kind has `ELEMENTS` of the one parameter that is compared.
GRADIENTS: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "noise": lambda step, noise: noise * 0.1,
    "all magnitudes": lambda step, noise: noise * 2.0 ** (torch.arange(ELEMENTS) % 128 - 80),
    "denormal": lambda step, noise: noise * 1e-39,
    "squares are denormal": lambda step, noise: noise * 1e-21,
    "huge": lambda step, noise: noise * 3e18,
    "squares overflow": lambda step, noise: noise * 1e30,
    "infinite or NaN once": lambda step, noise: torch.where(
        noise.abs() < (1.0 if step == 30 else 0.0), torch.inf * (noise - 0.5).clamp(min=-0.5).sign(), noise
    ),
    "zero after three steps": lambda step, noise: noise * (step < 3),
    "always zero, of either sign": lambda step, noise: noise * 0.0,
    "alternating": lambda step, noise: noise.abs() * (-1) ** step,
    "constant": lambda step, noise: torch.full_like(noise, 0.25),
    "one spike": lambda step, noise: noise * (1e10 if step == 30 else 1e-3),
    "sparse": lambda step, noise: noise * (noise > 2.0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "betas 0": {"betas": (0.0, 0.0)},
    "beta1 0": {"betas": (0.0, 0.999)},
    "beta2 0": {"betas": (0.9, 0.0)},
    "betas 0.5": {"betas": (0.5, 0.5)},
    "betas near 1": {"betas": (0.9999, 0.999999)},
    "eps 0": {"eps": 0.0},
    "eps tiny": {"eps": 1e-30},
    "eps large": {"eps": 1.0},
    "lr large": {"lr": 1.0},
    "lr tiny": {"lr": 1e-12},
    "no decay": {"weight_decay": 0.0},
    "half decays": {"weight_decay": 50.0},
    "all decays": {"weight_decay": 100.0},
    "sign turns": {"weight_decay": 150.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "amsgrad and maximize": {"amsgrad": True, "maximize": True, "betas": (0.7, 0.6)},
}


class Differences:
    """The largest differences of a comparison in ulp, and how often the weight differs at all."""

    def __init__(self) -> None:
        self.elements = self.differing = 0
        #: Of the states and of the weight, strictly.
        self.states = self.weight = 0
        #: Of the weight, in ulp of the larger of it before and after, where the update is at most a quarter of that.
        self.small_update = 0.0
        #: Of the weight, in ulp of the largest of it before, after, and the update.
        self.any_update = 0.0

    def __str__(self) -> str:
        return (
            f"states {self.states}, weight {self.weight} strictly ({self.differing} of {self.elements} differ), "
            f"{self.small_update} where the update is small, {self.any_update} of weight or update"
        )

    def add(self, before: torch.Tensor, decay: float, one: torch.Tensor, other: torch.Tensor) -> None:
        strict = strict_ulps(one, other)
        self.elements += strict.numel()
        self.differing += int((strict > 0).sum())
        self.weight = max(self.weight, int(strict.max()))
        update = (other.double() - before.double() * decay).abs()
        known = update < torch.finfo(torch.float32).max  # neither NaN nor infinite
        assert torch.equal(other.isfinite(), one.isfinite())
        apart = (one.double() - other.double()).abs()[known]
        larger, update = torch.maximum(before.abs(), other.abs())[known], update.float()[known]
        small = update <= larger / 4
        self.small_update = max([self.small_update, *(apart / ulp_of(larger))[small].tolist()])
        self.any_update = max([self.any_update, *(apart / ulp_of(torch.maximum(larger, update))).tolist()])


def compare_steps(
    ours: Callable[..., torch.optim.Optimizer],
    theirs: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    root: CorrectRoot | None = None,
) -> Differences:
    """Take each step with both optimizers, from the state that the reference had before it."""
    found = Differences()
    generator = torch.Generator().manual_seed(1)
    numel = len(GRADIENTS) * ELEMENTS
    # From a million times smaller than the updates to a hundred times larger.
    start = torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-20, 8, (numel,), generator=generator)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine, reference = ours([one], **options), theirs([other], **options)
    for step in range(STEPS):
        if step:
            mine.load_state_dict(copy.deepcopy(reference.state_dict()))
        before = other.detach().clone()
        with torch.no_grad():
            one.copy_(other)
        other.grad = torch.cat([kind(step, torch.randn(ELEMENTS, generator=generator)) for kind in GRADIENTS.values()])
        one.grad = other.grad.clone()
        mine.step()
        with root or contextlib.nullcontext():
            reference.step()
        actual, expected = mine.state_dict()["state"][0], reference.state_dict()["state"][0]
        assert actual["step"] == expected["step"] == step + 1
        names = [name for name, value in expected.items() if value.shape == other.shape]
        assert len(names) == 2 + bool(options.get("amsgrad"))
        for name in names:
            found.states = max(found.states, int(strict_ulps(actual[name], expected[name]).max()))
        found.add(before, 1 - options["lr"] * options["weight_decay"], one.detach(), other.detach())
    assert found.elements == STEPS * numel
    return found


@pytest.mark.core
@vector_code
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_that_of_torch_with_a_correct_root(options: dict[str, Any]) -> None:
    root = CorrectRoot()
    options = {"lr": 1e-2, "weight_decay": 1e-2} | options
    found = compare_steps(memascend.AdamW, partial(torch.optim.AdamW, foreach=False, fused=False), options, root)
    assert root.roots == STEPS
    print(found)
    assert found.states <= STRICT_ULPS and found.weight <= STRICT_ULPS, str(found)


@vector_code
@pytest.mark.parametrize("weight_decay", [0.01, 3.0])
@pytest.mark.parametrize("more", [{}, {"amsgrad": True, "maximize": True}], ids=["plain", "amsgrad and maximize"])
def test_a_step_of_adam_is_that_of_torch_with_a_correct_root(more: dict[str, Any], weight_decay: float) -> None:
    options = {"lr": 1e-2, "weight_decay": weight_decay} | more
    found = compare_steps(memascend.Adam, partial(torch.optim.Adam, foreach=False, fused=False), options, CorrectRoot())
    print(found)
    assert found.states <= STRICT_ULPS and found.weight <= STRICT_ULPS, str(found)


@vector_code
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_near_that_of_torch(options: dict[str, Any]) -> None:
    options = {"lr": 1e-2, "weight_decay": 1e-2} | options
    found = compare_steps(memascend.AdamW, partial(torch.optim.AdamW, foreach=False, fused=False), options)
    print(found)
    assert found.states <= STRICT_ULPS, str(found)
    assert found.small_update <= STRICT_ULPS and found.any_update <= ROOT_ULPS, str(found)


@vector_code
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "weight_decay" not in options])
def test_a_step_is_the_fused_one_of_torch(name: str) -> None:
    # No decay: the fused step computes its factor in fp32, the others in fp64.
    options = {"lr": 1e-2, **OPTIONS[name], "weight_decay": 0.0}
    found = compare_steps(memascend.AdamW, partial(torch.optim.AdamW, fused=True), options)
    print(found)
    assert found.states <= STRICT_ULPS and found.weight <= STRICT_ULPS, str(found)


# ---- the number of threads ------------------------------------------------------------------------------

ALGORITHMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(memascend.AdamW, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(memascend.AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "adam": partial(memascend.Adam, lr=1e-2, weight_decay=0.1),
    "lion": partial(memascend.Lion, lr=1e-3, weight_decay=0.1),
    "sgd": partial(memascend.SGD, lr=1e-2, weight_decay=0.1),
    "momentum": partial(memascend.SGD, lr=1e-2, momentum=0.9, dampening=0.1),
    "nesterov": partial(memascend.SGD, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
}
#: More than a chunk of every size, and no multiple of anything.
SHAPES = [(211, 1237), (65_537,), (3,), ()]


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_do_not_depend_on_threads(
    threads: Callable[[int], None], algorithm: str, states: str, weight: str
) -> None:
    dtype, master = WEIGHTS[weight]

    def run(count: int) -> tuple[list[torch.Tensor], dict[int, dict[str, Any]]]:
        threads(count)
        generator = torch.Generator().manual_seed(2)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        optimizer = ALGORITHMS[algorithm](parameters, states=states, master=master, seed=5)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer.state_dict()["state"]

    weights, expected = run(1)
    for count in (2, 5):
        again, actual = run(count)
        for one, other in zip(again, weights, strict=True):
            assert torch.equal(one, other)
        assert actual.keys() == expected.keys()
        for key, state in expected.items():
            assert actual[key].keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(actual[key][name]), torch.as_tensor(value)), (key, name)


# ---- PyTorch's own tests of optimizers --------------------------------------------------------------------

THEIRS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (memascend.AdamW, torch.optim.AdamW),
    "adam": (memascend.Adam, torch.optim.Adam),
    "sgd": (memascend.SGD, torch.optim.SGD),
}
#: Updates run outside of autograd and of CUDA graphs.
REFUSED_OPTIONS = ("capturable", "differentiable")


def common() -> Any:
    """Return the module with PyTorch's inputs: internal, and it imports expecttest, which PyTorch does not install."""
    requirements.package("expecttest")
    with warnings.catch_warnings():
        # Ignore its warnings about other packages that PyTorch's tests use.
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_optimizers

    return common_optimizers


def model_and_loss() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 3))
    inputs, targets = torch.randn(23, 7), torch.randn(23, 3)
    return model, lambda: (model(inputs) - targets).square().mean()


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])  # which kinds of inputs: all are for the CPU here
@pytest.mark.parametrize("name", THEIRS)
def test_inputs_of_torch(name: str, device: str) -> None:
    ours, theirs = THEIRS[name]
    inputs = getattr(common(), f"optim_inputs_func_{name}")(device)
    assert len(inputs) >= 5
    compared = 0
    for given in inputs:
        assert given.params is None
        refused = [key for key in given.kwargs if key in REFUSED_OPTIONS]
        if refused:
            with pytest.raises(ValueError, match=refused[0]):
                ours(model_and_loss()[0].parameters(), **given.kwargs)
        runs = []
        for optimizer_type, more in ((ours, {}), (theirs, {"foreach": False})):
            model, loss = model_and_loss()
            options = {key: copy.deepcopy(value) for key, value in given.kwargs.items() if key not in refused}
            optimizer = optimizer_type(model.parameters(), **options, **more)
            for _ in range(6):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                lr = optimizer.param_groups[0]["lr"]
                if torch.is_tensor(lr):
                    lr.mul_(0.9)  # as a scheduler changes it
            runs.append((model.state_dict(), optimizer.state_dict()["state"]))
        (weights, states), (expected_weights, expected_states) = runs
        torch.testing.assert_close(weights, expected_weights, msg=lambda text, given=given: f"{given.desc}: {text}")
        for key, state in expected_states.items():
            for entry, value in state.items():
                if value is not None:
                    torch.testing.assert_close(torch.as_tensor(states[key][entry]), torch.as_tensor(value).float())
        compared += 1
    assert compared == len(inputs)


@pytest.mark.parametrize("name", THEIRS)
def test_error_inputs_of_torch(name: str) -> None:
    ours, theirs = THEIRS[name]
    errors = getattr(common(), f"optim_error_inputs_func_{name}")("cpu", torch.float32)
    assert len(errors) >= 7
    for error in errors:
        given = error.optimizer_error_input
        params = [nn.Parameter(torch.ones(2, 3))] if given.params is None else given.params
        expect = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
        for optimizer_type in (theirs, ours):
            print(f"{optimizer_type.__module__}: {given.desc}, {given.kwargs}")  # the last one failed
            with expect(error.error_type, match=error.error_regex):
                optimizer_type(params, **given.kwargs)


@pytest.mark.core
@pytest.mark.parametrize("option", REFUSED_OPTIONS)
@pytest.mark.parametrize("name", THEIRS)
def test_options_that_are_refused(name: str, option: str) -> None:
    if (name, option) == ("sgd", "capturable"):
        pytest.skip("torch.optim.SGD has no such option")
    with pytest.raises(ValueError, match=option):
        THEIRS[name][0]([nn.Parameter(torch.ones(2))], **{option: True})


# ---- 8 bits beside bitsandbytes' rule ---------------------------------------------------------------------


def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the 256 values of dynamic tree quantisation with 8 bits (Dettmers 2016, arXiv 1511.04561): seven decades
    up to 1, a decade has twice the pieces of the one below, a value in the middle of each; and 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return torch.tensor(sorted(values))


class BlockwiseAdamW:
    """AdamW as in bitsandbytes: both moments are codes of the dynamic map, with one scale per 256 codes."""

    def __init__(self, weight: torch.Tensor, lr: float, eps: float, weight_decay: float) -> None:
        self.weight, self.lr, self.eps, self.weight_decay = weight, lr, eps, weight_decay
        self.maps = dynamic_map(signed=True), dynamic_map(signed=False)
        self.moments = [torch.zeros_like(weight), torch.zeros_like(weight)]
        self.step_number = 0

    def step(self, gradient: torch.Tensor) -> None:
        self.step_number += 1
        first, second = self.moments
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = math.sqrt(1 - 0.999**self.step_number)
        self.weight.mul_(1 - self.lr * self.weight_decay)
        step_size = self.lr / (1 - 0.9**self.step_number)
        self.weight.addcdiv_(first, (second.sqrt() / scale).add_(self.eps), value=-step_size)
        self.moments = [rounded(moment, map_) for moment, map_ in zip(self.moments, self.maps, strict=True)]


def rounded(values: torch.Tensor, map_: torch.Tensor) -> torch.Tensor:
    """Return values after 8-bit quantisation: the nearest of the map times the largest magnitude of 256 values."""
    codes, scales = quantised(values, map_)
    return (map_[codes] * scales).flatten()[: values.numel()]


def quantised(values: torch.Tensor, map_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (blocks, 256) and scales (blocks, 1)."""
    blocks = nn.functional.pad(values, (0, -values.numel() % 256)).view(-1, 256)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    boundaries = (map_[1:] + map_[:-1]) / 2
    return torch.bucketize(torch.where(scales > 0, blocks / scales, 0.0), boundaries), scales


PROBLEMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # A gradient is noise plus the weight, whose optimum is 0, times a factor of the element.
    "noise": lambda noise, weight, factor: noise,
    "drift": lambda noise, weight, factor: noise + 0.3,
    "quadratic": lambda noise, weight, factor: weight + 0.1 * noise,
    "ill-conditioned": lambda noise, weight, factor: factor * (weight + 0.1 * noise),
    "sparse": lambda noise, weight, factor: noise * (noise.abs() > 1.5),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_8_bits_are_no_worse_than_those_of_bitsandbytes(problem: str) -> None:
    generator = torch.Generator().manual_seed(6)
    numel = SMALLEST_8BIT_BYTES // 4 + 4321
    options = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 1e-2}
    factor = 10.0 ** torch.empty(numel).uniform_(-1, 1, generator=generator)
    start = torch.randn(numel, generator=generator)
    exact, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference = memascend.AdamW([exact], **options)
    mine = memascend.AdamW([ours], states="8bit", **options)
    theirs = BlockwiseAdamW(start.clone(), **options)
    for _ in range(STEPS):
        # All runs get the gradients of the fp32 run.
        gradient = PROBLEMS[problem](torch.randn(numel, generator=generator), exact.detach(), factor)
        exact.grad, ours.grad = gradient.clone(), gradient.clone()
        for optimizer in (reference, mine):
            optimizer.step()
        theirs.step(gradient)
    travelled = float((exact.detach() - start).norm())
    mine_apart, theirs_apart = (float((one - exact).detach().norm()) for one in (ours, theirs.weight))
    print(f"{problem}: {mine_apart / travelled:.5f} of the way, bitsandbytes' rule {theirs_apart / travelled:.5f}")
    assert 0.0 < mine_apart <= 1.05 * theirs_apart
    assert mine_apart < 0.1 * travelled


def test_zeros_that_a_program_writes_train_on() -> None:
    """The low half of a split master belongs to the weight before: below a written zero it would make a NaN."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4096).bfloat16())
    optimizer = memascend.AdamW([parameter], lr=1e-2)
    for _ in range(2):
        parameter.grad = torch.randn(4096).bfloat16()
        optimizer.step()
        with torch.no_grad():
            parameter[:2048] = 0
            parameter[2048:3072] = -0.0
    parameter.grad = torch.randn(4096).bfloat16()
    optimizer.step()
    assert parameter.isfinite().all()
    assert parameter[:3072].abs().max() < 0.02  # a step of 0.01, and less than the last bit of nothing
