"""Side effects of a recomputed layer: buffers, writes in place. As in memory, or refused."""

from __future__ import annotations

import itertools
import random
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    Offload = Callable[..., nn.Module]

WIDTH = 32


class Layer(nn.Module):
    """A residual layer around `body`."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.body = body or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.linear(x)).tanh()


class Average(nn.Module):
    """A running average, which is also used, updated by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.mean
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.calls += 1
        return x + self.calls


class DataAverage(Average):
    """Updated in place, in a way that no version counter notices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.mean.clone()


class Attribute(nn.Module):
    """Its state is a plain attribute, made at the first call."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = x.detach().mean(0)
        else:
            self.state += 0.1 * x.detach().mean(0)
        return x + self.state.clone()


class Lazy(nn.Module):
    """Registers its buffer at the first call; the value it keeps of each call has a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
        self.last = x.sin()
        return self.last + self.first


class Views(nn.Module):
    """Two buffers of one storage; one is written."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(2, WIDTH)
        self.register_buffer("both", both)
        self.register_buffer("second", both[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.both.mul_(0.9)
        return x * self.second.clone()


class Counter(nn.Module):
    """Its state is a number, and one that the program sets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.gain = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.gain is None:
            self.gain = 0.5
        return x * self.calls * self.gain


class Lists(nn.Module):
    """Its state is in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.sizes: dict[str, int] = {"rows": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        self.sizes["rows"] += len(x)
        self.seen = [*getattr(self, "seen", []), len(x)]
        return x.sin() * sum(self.calls) + self.sizes["rows"] * sum(self.seen)


class Rolling(nn.Module):
    """Draws from generators that are not PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=self.generator)
        return x.sin() * mask * (1 + random.random()) * (1 + np.random.random())


BODIES: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch_norm_average": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "average": Average,
    "data": DataAverage,
    "attribute": Attribute,
    "lazy": Lazy,
    "views": Views,
    "counter": Counter,
    "lists": Lists,
    "rolling": Rolling,
    "spectral_norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


def layers(body: Callable[[], nn.Module] = nn.Identity, layer: Callable[[nn.Module], nn.Module] = Layer) -> nn.Module:
    """Return three layers, each around a new `body`; the same ones at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer(body()) for _ in range(3)))


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def state_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return every buffer, tensor attribute and count of a model, and every gradient."""
    state = {f"gradient of {name}": gradient for name, gradient in tiny_models.gradients_of(model)}
    for name, module in model.named_modules():
        attributes = {key: value for key, value in module.__dict__.items() if type(value) is torch.Tensor}
        if isinstance(module, Counter):
            attributes["calls"] = torch.tensor(module.calls)
        if isinstance(module, Lists):
            attributes |= {"calls": torch.tensor(module.calls), "seen": torch.tensor(module.seen)}
            attributes["sizes"] = torch.tensor(module.sizes["rows"])
        for key, value in {**module._buffers, **attributes}.items():
            if value is not None and "weight" not in key:
                state[f"{name}.{key}"] = value.detach().clone()
    return state


def assert_as_in_memory(model: nn.Module, expected: nn.Module) -> None:
    actual, wanted = state_of(model), state_of(expected)
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (value is None) == (actual[name] is None), name
        if value is not None:
            assert torch.equal(actual[name], value), name


def once(model: nn.Module) -> None:
    for number in range(3):
        model(inputs(number)).square().sum().backward()


def twice_each(model: nn.Module) -> None:
    for number in range(2):
        loss = model(inputs(number)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()


def out_of_order(model: nn.Module) -> None:
    losses = [model(inputs(number)).square().sum() for number in range(4)]
    model.eval()
    model(inputs(7))
    model.train()
    with torch.no_grad():
        model(inputs(8))
    for number in (2, 0, 3):
        losses[number].backward()


def same_layer_twice(model: nn.Module) -> None:
    for number in range(2):
        x = model(inputs(number))
        (model[1](model[0](x)) + model[1](x)).square().sum().backward()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("use", [once, twice_each, out_of_order, same_layer_twice], ids=lambda use: use.__name__)
def test_buffers_that_a_layer_writes(offloaded: Offload, body: str, use: Callable[[nn.Module], None]) -> None:
    expected, model = layers(BODIES[body]), offloaded(layers(BODIES[body]))
    drawn = []
    for each in (expected, model):
        random.seed(1)
        np.random.seed(1)
        use(each)
        drawn.append((random.random(), np.random.random()))
    assert_as_in_memory(model, expected)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("activations", ["recompute", "ssd"])
def test_buffers_on_a_device(on_device: Offload, activations: str) -> None:
    expected, model = layers(BODIES["batch_norm"]), on_device(layers(BODIES["batch_norm"]), activations=activations)
    for each in (expected, model):
        out_of_order(each)
    assert_as_in_memory(model, expected)


def test_a_buffer_shared_between_layers(offloaded: Offload) -> None:
    def fresh() -> nn.Module:
        shared = Average()
        return layers(lambda: shared)

    expected, model = fresh(), offloaded(fresh())
    for each in (expected, model):
        out_of_order(each)
    assert_as_in_memory(model, expected)


def test_layers_within_layers(offloaded: Offload) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers(lambda: nn.BatchNorm1d(WIDTH))
            self.second = nn.ModuleList([Layer(Average()), Layer(nn.BatchNorm1d(WIDTH))])
            # Calls a layer of the other list within its own.
            self.second[0].other = [self.first[1]]
            self.second[0].register_forward_hook(lambda module, _, output: module.other[0](output))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.second:
                x = layer(x)
            return self.first(x)

    torch.manual_seed(0)
    expected = Outer()
    torch.manual_seed(0)
    model = offloaded(Outer())
    for each in (expected, model):
        out_of_order(each)
    assert_as_in_memory(model, expected)


def test_what_changes_before_the_backward_pass(offloaded: Offload) -> None:
    def fresh() -> nn.Module:
        return layers(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Counter(), nn.Dropout(0.5)))

    expected, model = fresh(), offloaded(fresh())
    for each in (expected, model):
        torch.manual_seed(1)
        loss = each(inputs(0)).square().sum()
        each.eval()
        for layer in each:
            layer.body[1].gain, layer.body[2].p = 7.0, 0.1
        loss.backward()
        assert (each[1].body.training, each[1].body[1].gain, each[1].body[2].p) == (False, 7.0, 0.1)
    assert_as_in_memory(model, expected)


def test_a_generator_that_is_passed(offloaded: Offload) -> None:
    class Masked(Layer):
        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return super().forward(x) * torch.rand(x.shape, generator=generator)

    expected, model = (layers(layer=lambda _: Masked()) for _ in range(2))
    drawn = []
    for each in (expected, offloaded(model)):
        generator = torch.Generator().manual_seed(1)
        each[1](each[0](inputs(0), generator), generator).square().sum().backward()
        drawn.append(torch.rand((), generator=generator))
    assert_as_in_memory(model, expected)
    assert torch.equal(*drawn)


def test_a_module_that_is_replaced_before_the_backward_pass_is_refused(offloaded: Offload) -> None:
    model = offloaded(layers(nn.Tanh))
    loss = model(inputs(0)).sum()
    model[1].body = nn.Sigmoid()
    with pytest.raises(memascend.MemascendError, match="was replaced"):
        loss.backward()


def test_other_tensors_than_the_first_forward_saved_are_refused(offloaded: Offload) -> None:
    class Alternating(nn.Module):
        shapes = itertools.cycle([(4, WIDTH), (2, 2 * WIDTH)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(next(self.shapes)).sin().reshape(x.shape)

    model = offloaded(layers(Alternating))
    with pytest.raises(memascend.MemascendError, match="not deterministic"):
        model(inputs(0)).sum().backward()


class Failing(nn.Module):
    """Writes its buffer, and then fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        # An event, since a recomputation sees plain values and lists as they were.
        self.fail = Event()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.fail.is_set():
            raise KeyboardInterrupt
        return x


def test_a_recomputation_that_fails_leaves_buffers_alone(offloaded: Offload) -> None:
    expected, model = layers(Failing), offloaded(layers(Failing))
    for each in (expected, model):
        loss = each(inputs(0)).square().sum()
        if each is model:
            each[1].body.fail.set()
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            each[1].body.fail.clear()
            each.zero_grad()
        each(inputs(1)).square().sum().backward()
    assert_as_in_memory(model, expected)


class Checkpointed(nn.Module):
    """A layer under checkpointing, by torch or as transformers does it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = layers(lambda: nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointingLayer(GradientCheckpointingLayer):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        self.layer = Layer(body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "fresh",
    [
        lambda: Checkpointed(False),
        lambda: Checkpointed(True),
        lambda: layers(lambda: nn.BatchNorm1d(WIDTH), CheckpointingLayer),
    ],
    ids=["torch", "reentrant", "transformers"],
)
def test_checkpointing_writes_buffers_twice_as_in_memory(offloaded: Offload, fresh: Callable[[], nn.Module]) -> None:
    expected, model = fresh(), offloaded(fresh())
    for each in (expected, model):
        each(inputs(0).requires_grad_()).square().sum().backward()
    assert {buffer.item() for buffer in expected.buffers() if buffer.ndim == 0} == {2}
    assert_as_in_memory(model, expected)


class Large(nn.Module):
    """A buffer too large to be copied; `write` is the forward's write to it."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("queue", torch.ones(257, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.queue[0, :WIDTH].clone()
        replacement = self.write(self.queue)
        if replacement is not None:
            self.queue = replacement
        return x


def _fill(queue: torch.Tensor) -> None:
    queue[1] = 2


def _fill_unnoticed(queue: torch.Tensor) -> None:
    queue.data[0, 0] += 1


@pytest.mark.parametrize("write", [_fill, _fill_unnoticed], ids=["counted", "unnoticed"])
def test_a_large_buffer_that_is_written_is_refused(offloaded: Offload, write: Callable[[torch.Tensor], Any]) -> None:
    model = offloaded(layers(lambda: Large(write)))
    with pytest.raises(memascend.MemascendError, match=r"body\.queue of Layer .*recompute=False"):
        model(inputs(0)).sum().backward()


def test_large_buffers_that_are_read_or_replaced(offloaded: Offload) -> None:
    for write in (lambda queue: None, lambda queue: queue * 0.9):
        expected, model = layers(lambda write=write: Large(write)), offloaded(layers(lambda write=write: Large(write)))
        for each in (expected, model):
            once(each)
        assert_as_in_memory(model, expected)
        memascend.close(model)


def test_a_buffer_written_under_another_name_is_refused(offloaded: Offload) -> None:
    model = layers(Average)
    mean = model[1].body.mean

    def write(*_: Any) -> None:
        mean.add_(1)

    model[1].body.register_forward_hook(write)
    offloaded(model)
    with pytest.raises(memascend.MemascendError, match="recompute=False"):
        model(inputs(0)).sum().backward()


def test_copies_are_shared_by_calls_between_which_nothing_was_written(offloaded: Offload) -> None:
    model = offloaded(layers(lambda: nn.BatchNorm1d(WIDTH)).eval())
    copies = memascend.offload_of(model).inputs.buffers._latest
    model(inputs(0))
    before = [copies[buffer] for buffer in model.buffers()]
    model(inputs(1))
    assert len(before) == 9
    assert all(copies[buffer] is copy for buffer, copy in zip(model.buffers(), before, strict=True))


# ---- writes in place -------------------------------------------------------------------------------


class Writing(nn.Module):
    """A layer around a function that writes in place."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) * self.scale


def _add(h: torch.Tensor) -> torch.Tensor:
    h = torch.sigmoid(h)
    h.add_(1)
    return h


def _square(h: torch.Tensor) -> torch.Tensor:
    squared = h * h
    h.mul_(2)
    return squared


def _without_grad(h: torch.Tensor) -> torch.Tensor:
    h = h.exp()
    with torch.no_grad():
        h.mul_(2)
    return h


def _slice(h: torch.Tensor) -> torch.Tensor:
    h = h.tanh()
    h[:, 0] = 0
    return h


@pytest.mark.parametrize("function", [_add, _square, _without_grad, _slice], ids=lambda function: function.__name__)
def test_a_write_that_pytorch_refuses_is_refused(offloaded: Offload, function: Callable) -> None:
    for model in (layers(layer=lambda _: Writing(function)), offloaded(layers(layer=lambda _: Writing(function)))):
        loss = model(inputs(0)).square().sum()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


LEGAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda h: nn.functional.relu(h, inplace=True),
    "dropout": lambda h: nn.functional.dropout(h, 0.5, inplace=True),
    "before": lambda h: h.mul_(2).tanh(),
    "slice": lambda h: h.index_fill_(1, torch.tensor([1]), 0.0).sin(),
}


@pytest.mark.parametrize("function", LEGAL)
def test_a_write_that_pytorch_allows(offloaded: Offload, function: str) -> None:
    expected, model = (layers(layer=lambda _: Writing(LEGAL[function])) for _ in range(2))
    for each in (expected, offloaded(model)):
        torch.manual_seed(1)
        twice_each(each)
    assert_as_in_memory(model, expected)


def test_writes_after_a_layer_do_not_reach_its_gradients(offloaded: Offload) -> None:
    # In memory both are refused. Recomputed, the layer does not see them.
    def run(model: nn.Module, in_place: bool) -> None:
        hidden = model[0](inputs(0))
        hidden = hidden.add_(1) if in_place else hidden + 1
        loss = model[1](hidden).square().sum()
        if in_place:
            model[1].scale.mul_(3)
        loss.backward()

    expected, model = (layers(layer=lambda _: Writing(torch.exp)) for _ in range(2))
    run(expected, False)
    run(offloaded(model), True)
    gradients = dict(tiny_models.gradients_of(model))
    for name, gradient in tiny_models.gradients_of(expected):
        assert (gradient is None) == (gradients[name] is None)
        assert gradient is None or torch.equal(gradient, gradients[name])


def test_a_layers_input_that_is_written_is_refused(offloaded: Offload) -> None:
    model = offloaded(layers(layer=lambda _: Writing(torch.exp)))
    hidden = model[0](inputs(0))
    loss = model[1](hidden).square().sum()
    hidden.add_(1)
    with pytest.raises(memascend.MemascendError, match="changed in place"):
        loss.backward()
