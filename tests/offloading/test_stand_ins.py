"""What programs do with parameters and gradients: the same bits as in memory, or a refusal that says what to do."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WIDTH, TOKENS = 160, 64
Program = "Callable[[Net, memascend.AdamW], Any]"


class Net(nn.Module):
    """An embedding, blocks, a parameter of one element and a head; every block is a unit of its own."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, max_norm=max_norm)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)  # (sequences, length, width)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden) * self.scale


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(0, TOKENS, (4, 9), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    loss = loss_of(model, seed)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., tuple[nn.Module, nn.Module]]]:
    """Return a model in memory and the same one offloaded, with one buffer for the blocks; it is closed at the end."""
    opened: list[nn.Module] = []

    def make(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        model = Net() if model is None else model
        offloaded = copy.deepcopy(model)
        options = {"host_memory": "14.9MiB", "keep_store": False} | options
        opened.append(memascend.offload(offloaded, store=tmp_path / "store", **options))
        return model, offloaded

    yield make
    for model in opened:
        memascend.close(model)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def assert_same(in_memory: nn.Module, offloaded: nn.Module) -> None:
    """Compare all parameters, gradients and buffers, read as a program reads them."""
    pairs = zip(in_memory.named_parameters(), offloaded.named_parameters(), strict=True)
    for (name, first), (_, second) in pairs:
        assert torch.equal(first.detach(), second.detach().clone()), f"{name} differs"
        assert (first.grad is None) == (second.grad is None), f"the gradient of {name} is there in one of them only"
        if first.grad is not None:
            assert torch.equal(first.grad, second.grad.clone()), f"the gradient of {name} differs"
    for (name, first), (_, second) in zip(in_memory.named_buffers(), offloaded.named_buffers(), strict=True):
        assert torch.equal(first, second), f"buffer {name} differs"


# ---- the same bits ------------------------------------------------------------------------------------------

SAME: dict[str, Callable[[Any, Any], Any]] = {}


def same(program: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """List a program that gives the same bits."""
    SAME[program.__name__] = program
    return program


@same
def read_norms(model: Net, _: Any) -> Any:
    return [parameter.norm().detach() for parameter in model.parameters()]


@same
def describe(model: Net, _: Any) -> Any:
    weight = model.head.weight
    return [
        *(
            repr(weight),
            weight.stride(),
            weight.is_contiguous(),
            weight.shape,
            weight.dtype,
            weight.detach().t().stride(),
        ),
        *(weight.mean().item(), weight[0:2].detach().clone(), float(model.scale.detach()), weight.storage_offset()),
        torch.stack([parameter.detach().abs().max() for parameter in model.parameters()]),
    ]


@same
def multiply_data(model: Net, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


@same
def assign_data(model: Net, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@same
def clamp_a_scalar(model: Net, _: Any) -> None:
    model.scale.data.clamp_(0, 1.2)  # CLIP's logit_scale


@same
def clamp_in_place(model: Net, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)


@same
def write_through_views(model: Net, _: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] = 7
    row = model.head.weight.data[3]
    row.zero_()
    return row.clone()


@same
def keep_views(model: Net, optimizer: memascend.AdamW) -> Any:
    weight, transposed = model.head.weight.detach(), model.layers[0][0].weight.data.t()
    step(model, optimizer, 7)
    return [weight.clone(), transposed.clone()]


@same
def flatten_and_back(model: Net, _: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.3, model.parameters())
    return [vector.detach(), torch.cat([p.flatten() for p in model.parameters()]).detach()]


@same
def initialise(model: Net, _: Any) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    nn.init.normal_(model.embed.weight)


@same
def average(model: Net, optimizer: memascend.AdamW) -> Any:
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(model, optimizer, 5)
    for name, parameter in model.named_parameters():
        averages[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
    return list(averages.values())


@same
def penalise(model: Net, optimizer: memascend.AdamW) -> Any:
    (loss_of(model) + sum((parameter**2).sum() for parameter in model.parameters())).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@same
def use_the_head_outside(model: Net, optimizer: memascend.AdamW) -> Any:
    hidden = model.embed(torch.arange(9)[None])
    for layer in model.layers:
        hidden = hidden + layer(hidden)
    loss = F.linear(hidden, model.head.weight).sum()
    loss.backward()
    gradient = model.head.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), gradient]


@same
def differentiate_between(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    loss = loss_of(model, 4)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(gradient.pow(2).sum() for gradient in gradients)
    penalty.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [gradient.detach() for gradient in gradients]


@same
def differentiate_with_zeros(model: Net, _: Any) -> Any:
    loss = model.embed.weight.sum()
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@same
def scale_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    loss_of(model, 2).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    loss_of(model, 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    return norms


@same
def write_parts_of_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    gradient = model.head.weight.grad
    gradient[0].zero_()
    gradient.view(-1)[500:].mul_(3)
    gradient.data[1:2] += 1
    values = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()
    return values


@same
def clip_as_torch_does(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return [norm, total]


@same
def zero_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()  # a step with gradients of zero
    optimizer.zero_grad()
    return gradients


@same
def zero_after_the_step(model: Net, optimizer: memascend.AdamW) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
    optimizer.zero_grad()


@same
def multiply_by_the_hessian(model: Net, _: Any) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
    loss_of(model, 1).backward()
    products = torch.autograd.grad(gradients, parameters, grad_outputs=[p.grad for p in parameters])
    model.zero_grad()
    return [*products, torch.zeros_like(model.head.weight.t()).stride()]


@same
def scale_losses(model: Net, optimizer: memascend.AdamW) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return [norm, scaler.get_scale()]


@same
def look_at_gradients_in_hooks(model: Net, optimizer: memascend.AdamW) -> Any:
    norms: list[float] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: norms.append(float(parameter.grad.norm())))
        for parameter in model.parameters()
    ]
    loss_of(model).backward()
    loss_of(model, 3).backward()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    return sorted(norms)


@same
def sharpness_aware(model: Net, optimizer: memascend.AdamW) -> None:
    loss_of(model).backward()
    moves = []
    with torch.no_grad():
        for parameter in model.parameters():
            moves.append(parameter.grad * 0.1)
            parameter.add_(moves[-1])
    model.zero_grad()
    loss_of(model).backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


@same
def load_a_part(model: Net, _: Any) -> Any:
    state = model.layers.state_dict()
    values = [tensor.clone() for tensor in state.values()]
    model.layers.load_state_dict({name: tensor * 0.5 for name, tensor in state.items()})
    return values


@same
def save_by_torch(model: Net, optimizer: memascend.AdamW) -> Any:
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file)
    step(model, optimizer, 5)  # the state dict shows the new values, as in memory
    return [*saved.values(), *(tensor.clone() for tensor in state.values())]


@same
def copy_parameters(model: Net, _: Any) -> Any:
    return [copy.deepcopy(parameter).detach() for parameter in model.parameters()]


@same
def arrays(model: Net, _: Any) -> Any:
    return [torch.from_numpy(np.array(parameter.detach().numpy())) for parameter in model.parameters()]


@same
def replace_a_parameter(model: Net, _: Any) -> None:
    model.head.bias = nn.Parameter(torch.ones(TOKENS))


@same
def replace_the_forward(model: Net, _: Any) -> Any:
    def forward(tokens: torch.Tensor) -> torch.Tensor:  # as TRL and Liger-Kernel replace it
        return F.linear(model.layers[0](model.embed(tokens)), model.head.weight) * model.scale

    own = model.forward
    model.forward = forward
    loss = loss_of(model)
    loss.backward()
    model.zero_grad()
    model.forward = own
    return loss.detach()


@same
def write_in_inference_mode(model: Net, _: Any) -> None:
    with torch.inference_mode():
        model.layers[1][2].weight.mul_(2.0)
        model.head.weight[0] = 3
        nn.init.ones_(model.head.bias)
        model.scale.data += 1
        torch.add(model.head.bias, 1, out=model.head.bias)


@same
def exchange_gradients(model: Net, optimizer: memascend.AdamW) -> None:
    loss_of(model).backward()
    first, second = model.layers[0][0].weight, model.layers[1][0].weight
    first.grad, second.grad = second.grad, first.grad
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()


@same
def combine_weights(model: Net, _: Any) -> None:
    first, second, third = (layer[0].weight for layer in model.layers)
    with torch.no_grad():
        first.copy_(third)
        second.addmm_(first, third)
        torch.add(first, second, out=third)


@same
def freeze_before_backward(model: Net, optimizer: memascend.AdamW) -> Any:
    loss = loss_of(model)
    model.layers[0][0].weight.requires_grad_(False)
    loss.backward()
    there = [parameter.grad is not None for parameter in model.parameters()]
    model.layers[0][0].weight.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()
    return there


@same
def checkpoint_parts(model: Net, optimizer: memascend.AdamW) -> Any:
    gradients = []
    for reentrant in (False, True):
        hidden = model.embed(torch.arange(9)[None])
        for layer in model.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden = checkpoint(
            lambda hidden: F.linear(torch.tanh(F.linear(hidden, model.layers[0][0].weight)), model.head.weight),
            hidden,
            use_reentrant=reentrant,
        )
        hidden.square().mean().backward()
        gradients += [model.embed.weight.grad.clone(), model.head.weight.grad.clone()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@same
def backward_to_some(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward(inputs=[model.layers[1][0].weight])
    model.scale.backward()
    there = [parameter.grad is not None for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return there


@same
def a_function_without_a_gradient(model: Net, _: Any) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(states, weight)
            return states @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            _, weight = ctx.saved_tensors
            return gradient @ weight, None

    states = torch.ones(3, WIDTH, requires_grad=True)
    Product.apply(states, model.head.weight).sum().backward()
    loss_of(model).backward()
    Product.apply(states, model.head.weight).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same_bits(pair: Callable[..., tuple[nn.Module, nn.Module]], name: str) -> None:
    results = []
    models = pair()
    for model in models:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        results.append([step(model, optimizer, 1), SAME[name](model, optimizer), step(model, optimizer, 2)])
    assert equal(*results), f"{name} gives other results"
    assert_same(*models)


@pytest.mark.parametrize("name", ["multiply_data", "write_through_views", "load_a_part", "initialise"])
def test_what_a_program_writes_is_durable(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    expected = Net()
    model = memascend.offload(
        copy.deepcopy(expected), store=tmp_path / "store", host_memory="14.9MiB", durability="step", keep_store=True
    )
    for run in (expected, model):
        optimizer = memascend.AdamW(run.parameters(), lr=1e-2)
        step(run, optimizer, 1)
        SAME[name](run, optimizer)
        step(run, optimizer, 2)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=Net())
    assert resumed.steps == 2
    assert_same(expected, resumed.model)
    memascend.close(resumed.model)


# ---- modules that write to their own weights ----------------------------------------------------------------


class Normalised(nn.Module):
    """A layer that normalises its weight in its forward, from a given call on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first, self.calls = first, 0
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.first:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight))
        return states @ self.weight


class Writing(Net):
    """A model whose first layer outside of the blocks writes to its own weight."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.normalised = Normalised(first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.normalised(self.embed(tokens))[..., :TOKENS]


@pytest.mark.parametrize("kind", ["max_norm", "from the first call", "from the third call"])
@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_module_that_writes_to_its_weight(tmp_path: Path, kind: str, durability: str) -> None:
    makers = {
        "max_norm": lambda: Net(max_norm=0.5),
        "from the first call": Writing,
        "from the third call": lambda: Writing(2),
    }
    torch.manual_seed(0)
    expected = makers[kind]()
    model = memascend.offload(
        copy.deepcopy(expected), store=tmp_path / "store", host_memory="16MiB", durability=durability, keep_store=True
    )
    for run in (expected, model):
        optimizer = memascend.AdamW(run.parameters(), lr=1e-2)
        for number in range(5):
            step(run, optimizer, number)
        with torch.no_grad():
            loss_of(run, 9)
    assert_same(expected, model)
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=makers[kind]())
    assert resumed.steps == 5
    assert_same(expected, resumed.model)
    memascend.close(resumed.model)


def test_each_durable_step_is_that_of_memory(tmp_path: Path) -> None:
    """A generation is the state after its step: without what the next forward writes."""
    torch.manual_seed(0)
    expected = Writing()
    model = memascend.offload(copy.deepcopy(expected), store=tmp_path / "store", host_memory="16MiB", durability="step")
    optimizers = [memascend.AdamW(run.parameters(), lr=1e-2) for run in (expected, model)]
    for number in range(3):
        for run, optimizer in zip((expected, model), optimizers, strict=True):
            step(run, optimizer, number)
    after_step = copy.deepcopy(expected)
    loss_of(model, 9)  # writes to the weight, and commits the third step
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        finally:
            memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", model=Writing())
    assert resumed.steps == 3
    assert_same(after_step, resumed.model)
    memascend.close(resumed.model)


def test_a_recomputed_layer_that_writes_to_its_weight_is_refused(pair: Callable[..., Any]) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Normalised() for _ in range(2))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                states = layer(states)
            return states

    _, model = pair(Blocks())
    with pytest.raises(memascend.MemascendError, match="recompute=False"):
        model(torch.ones(2, WIDTH))


# ---- refusals -----------------------------------------------------------------------------------------------


def _use_the_optimizer(kind: type, **options: Any) -> Callable[[Net], None]:
    def use(model: Net) -> None:
        loss_of(model).backward()
        kind(model.parameters(), lr=0.1, **options).step()

    return use


def _after_the_step(model: Net, act: Callable[[Net, Any], None]) -> None:
    optimizer = memascend.AdamW(model.parameters())
    loss_of(model).backward()
    kept = model.head.weight.grad
    optimizer.step()
    act(model, kept)


def _change_between(model: Net, weight: torch.Tensor) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        weight.mul_(2)
    loss.backward()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), "cannot become torch.float16.*before memascend.offload"),
    "shared memory": (lambda model: model.share_memory(), "share_memory_ asks for its address"),
    "shared data": (
        lambda model: setattr(model.layers[0][0].weight, "data", model.layers[1][0].weight.data),
        r"layers\.0\.0\.weight and layers\.1\.0\.weight cannot share",
    ),
    "vmap": (lambda model: torch.func.vmap(lambda x: x @ model.head.weight)(torch.ones(2, 3, TOKENS)), r"torch\.func"),
    "grad": (lambda model: torch.func.grad(lambda x: (x @ model.head.weight).sum())(torch.ones(3, TOKENS)), "copies"),
    "pickle": (lambda model: torch.save(model, io.BytesIO()), "save_pretrained"),
    "copy": (copy.deepcopy, "cannot be copied"),
    "double": (lambda model: model.layers.to(torch.float64), "cannot become torch.float64"),
    "data of another dtype": (lambda model: setattr(model.scale, "data", torch.zeros((), dtype=torch.half)), "float16"),
    "data of another shape": (lambda model: setattr(model.head.bias, "data", torch.zeros(3)), "shape"),
    "AdamW": (_use_the_optimizer(torch.optim.AdamW), r"memascend\.AdamW\(model\.parameters\(\)"),
    "fused AdamW": (_use_the_optimizer(torch.optim.AdamW, fused=True), r"memascend\.AdamW"),
    "foreach SGD": (_use_the_optimizer(torch.optim.SGD, foreach=True), r"memascend\.SGD"),
    "Adagrad": (_use_the_optimizer(torch.optim.Adagrad), r"memascend\.AdamW"),
    "create_graph": (lambda model: loss_of(model).backward(create_graph=True), r"torch\.autograd\.grad"),
    "assign": (lambda model: model.load_state_dict(model.state_dict(), assign=True), "assign=False"),
    "address": (lambda model: model.head.weight.data_ptr(), "clone"),
    "storage": (lambda model: model.head.weight.untyped_storage(), "clone"),
    "a view trained": (lambda model: memascend.AdamW([nn.Parameter(model.head.weight.data)]), "model.parameters"),
    "a gradient after its step": (lambda model: _after_the_step(model, lambda _, kept: kept.norm()), "consumed"),
    "adding after the step": (lambda model: _after_the_step(model, lambda m, _: loss_of(m, 1).backward()), "zero_grad"),
    "stepping twice": (
        lambda model: _after_the_step(model, lambda m, kept: memascend.AdamW(m.parameters()).step()),
        "zero_grad",
    ),
    "head.weight changed": (lambda model: _change_between(model, model.head.weight), r"head\.weight changed"),
    "layers.0.0.weight changed": (
        lambda model: _change_between(model, model.layers[0][0].weight),
        r"layers\.0\.0\.weight changed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_changes_nothing(pair: Callable[..., tuple[nn.Module, nn.Module]], name: str) -> None:
    expected, model = pair()
    act, reason = REFUSED[name]
    with pytest.raises(memascend.MemascendError, match=reason):
        act(model)
    if name.endswith(" changed"):
        with torch.no_grad():
            expected.get_parameter(name.removesuffix(" changed")).mul_(2)
    model.zero_grad()
    if "step" in name:
        optimizer = memascend.AdamW(expected.parameters())
        loss_of(expected).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(expected, model)
    for run in (expected, model):
        step(run, memascend.SGD(run.parameters(), lr=0.1), 3)
    assert_same(expected, model)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    expected, model = tiny.build("llama"), tiny.build("llama")
    memascend.offload(model, store=tmp_path / "store", host_memory="64MiB", keep_store=False)
    for refused in (lambda: model.resize_token_embeddings(model.config.vocab_size + 8), model.model.float):
        with pytest.raises(memascend.MemascendError, match=r"model\.embed_tokens\.weight is on SSD as .*before"):
            refused()
    read = memascend.stats(model)["ssd_bytes_read"]
    assert (
        model.to("cpu").eval().train().dtype == expected.dtype and model.num_parameters() == expected.num_parameters()
    )
    assert [p._version for p in model.parameters()] == [p._version for p in expected.parameters()]
    assert memascend.stats(model)["ssd_bytes_read"] == read  # nothing of that takes a weight
    for directory, part in ("whole", lambda model: model), ("part", lambda model: model.model):
        part(model).save_pretrained(tmp_path / directory)
        saved = load_file(tmp_path / directory / "model.safetensors")
        tiny.assert_same_weights(saved, dict(part(expected).named_parameters()))
    assert torch.equal(model(**tiny.batch("llama", 0)).loss, expected(**tiny.batch("llama", 0)).loss)
    memascend.close(model)


def test_an_inplace_error_is_refused_as_in_memory(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    for model in pair():
        output = torch.sigmoid(model(torch.zeros(1, 3, dtype=torch.long)))
        output.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_arrays_of_weights_are_read_only(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    _, model = pair()
    with pytest.raises(ValueError, match="read-only"):
        model.head.weight.detach().numpy()[0] = 1


def test_a_gradient_is_not_shown_by_what_stood_for_an_earlier_one(pair: Callable[..., Any]) -> None:
    _, model = pair()
    loss_of(model).backward()
    earlier = model.head.weight.grad
    part = earlier[0]
    model.zero_grad()
    loss_of(model, 1).backward()
    for stale in (earlier, part):
        with pytest.raises(memascend.MemascendError, match="later backward pass has replaced it"):
            stale.sum()


def test_a_closed_model_is_not_read(pair: Callable[..., tuple[nn.Module, nn.Module]]) -> None:
    _, model = pair()
    memascend.close(model)
    for use in (lambda: model.head.weight.norm(), lambda: model.scale.data.zero_(), lambda: model.embed(torch.ones(1))):
        with pytest.raises(memascend.MemascendError, match="closed"):
            use()
    assert model.head.weight.shape == (TOKENS, WIDTH)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_two_uses_in_one_autocast_block(pair: Callable[..., Any], twice: bool, cached: bool) -> None:
    """Where PyTorch adds gradients in bfloat16, because both uses share a converted weight, the second is refused."""
    results = []
    models = pair()
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            loss = loss_of(model)
            if twice and cached and model is models[1]:
                with pytest.raises(memascend.MemascendError, match="cache_enabled=False"):
                    loss_of(model, 1)
                return
            if twice:
                loss = loss + loss_of(model, 1)
        loss.backward()
        results.append([loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]])
    assert equal(*results)


def test_a_parameter_that_is_not_contiguous_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"0\.weight has strides .*contiguous_format"):
        memascend.offload(model, store=tmp_path, host_memory="1GiB")


def test_a_lazy_parameter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight has no shape yet: run one forward pass"):
        memascend.offload(nn.LazyLinear(3), store=tmp_path, host_memory="1GiB")
