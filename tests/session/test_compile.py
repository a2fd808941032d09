"""torch.compile of an offloaded model's layers: streaming stays outside of the graphs, and the bits are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import tiny_models
import torch
from torch._dynamo.backends.registry import lookup_backend

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

pytestmark = [
    # Dynamo asks every tensor for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Compiled code calls kernels that tests do not replace.
    pytest.mark.own_products,
]
STEPS = 2
LAYERS = 3


Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


class Backend:
    """A backend of torch.compile that counts how often its graphs run forward."""

    def __init__(self, name: str = "aot_eager") -> None:
        self.compile = lookup_backend(name)
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        compiled = self.compile(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: nn.Module, backend: Backend) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def replace_layers(model: nn.Module, backend: Backend) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)
    return model


def train(model: nn.Module) -> Trained:
    """Return losses and weights, under the names that they had before anything was compiled."""
    trace = tiny_models.train(model, "plain", steps=STEPS, evaluate=False)
    return trace.losses, {name.replace("_orig_mod.", ""): value for name, value in trace.weights.items()}


def assert_same(actual: Trained, expected: Trained) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual[0], expected[0], strict=True))
    tiny_models.assert_same_weights(actual[1], expected[1])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("how", ["before", "after", "replaced", "again"])
def test_compiled_layers(offloaded: Callable[..., nn.Module], how: str, recompute: bool) -> None:
    known = Backend()
    expected = train(compile_layers(tiny_models.build("plain"), known))
    assert known.runs == LAYERS * (STEPS + 1)  # once more to evaluate

    backend, model = Backend(), tiny_models.build("plain")
    options: dict[str, Any] = {"recompute": recompute, "host_memory": tiny_models.smallest_budget(model)}
    if how == "before":
        offloaded(compile_layers(model, backend), **options)
    elif how == "after":
        compile_layers(offloaded(model, **options), backend)
    elif how == "replaced":
        offloaded(replace_layers(model, backend), **options)
    else:
        compile_layers(offloaded(compile_layers(model, Backend()), **options), backend)
    assert_same(train(model), expected)
    assert backend.runs == known.runs + recompute * LAYERS * STEPS
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="was closed"):
        model(**tiny_models.batch("plain", 0))


@pytest.mark.parametrize("first", ["compile", "offload"])
def test_a_compiled_model_streams_outside_of_the_graphs(offloaded: Callable[..., nn.Module], first: str) -> None:
    # Its layers run as they are: the code around them cannot be traced.
    expected, model = train(tiny_models.build("plain")), tiny_models.build("plain")
    if first == "compile":
        model.compile(backend="aot_eager")
        offloaded(model)
    else:
        offloaded(model)
        model.compile(backend="aot_eager")
    assert_same(train(model), expected)


def test_a_layer_compiled_as_a_function_of_its_own(offloaded: Callable[..., nn.Module]) -> None:
    # torch.compile of a module whose forward streams leaves it uncompiled, and says so where it must not.
    model = replace_layers(offloaded(tiny_models.build("plain")), Backend())
    assert_same(train(model), train(tiny_models.build("plain")))
    backend = Backend()
    whole = torch.compile(model.layers[0]._orig_mod, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match="no compiled frames"):
        whole(torch.zeros(1, 2, tiny_models.WIDE, dtype=torch.bfloat16))
    assert backend.runs == 0


def _loss_of_transformers(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _loss_of_its_own(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
    return loss + 0.1 * logits[:, -1].square().mean()


@pytest.mark.parametrize("what", ["model before", "model after", "step", "step with a loss of its own", "layers"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.usefixtures("small_tables")
def test_tables_stay_outside_of_the_graphs(offloaded: Callable[..., nn.Module], architecture: str, what: str) -> None:
    backend, model = Backend(), tiny_models.build(architecture)
    function = _loss_of_its_own if what == "step with a loss of its own" else _loss_of_transformers
    options = {"host_memory": tiny_models.smallest_budget(model)}
    if what == "layers":
        for layer in model.transformer.h if architecture == "gpt2" else model.model.layers:
            layer.compile(backend=backend)
    if what == "model before":
        model.compile(backend=backend)
    offloaded(model, **options)
    if what == "model after":
        model.compile(backend=backend)
    compiled = torch.compile(function, backend=backend) if "step" in what else function
    runs = []
    for run, loss_of in ((memascend.fuse_loss(tiny_models.build(architecture)), function), (model, compiled)):
        computed: dict[str, torch.Tensor | None] = {}
        for step in range(STEPS):
            run.zero_grad()
            loss = loss_of(run, tiny_models.batch(architecture, step))
            loss.backward()
            computed |= {
                f"{step}": loss.detach(),
                **{f"{step} {name}": grad for name, grad in tiny_models.gradients_of(run)},
            }
        runs.append(computed)
    assert not bit_equality.differing(runs[1], runs[0])
    session = model._memascend
    assert any(session.streamer.is_streamed(unit) for unit in session.units)
    assert (backend.runs > 0) == (what == "layers" or "own" in what)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "does not compile its layers" in record.getMessage()]


@pytest.mark.parametrize("how", ["torch.compile", "torch.compile before", "a step", "model.compile", "compile before"])
@pytest.mark.parametrize("architecture", ["plain", "llama"])
def test_a_model_whose_layers_stay_uncompiled_says_so_once(
    offloaded: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture, how: str, architecture: str
) -> None:
    model = tiny_models.build(architecture)
    called: Any = model
    if how == "compile before":
        model.compile(backend="aot_eager")
    if how == "torch.compile before":
        called = offloaded(torch.compile(model, backend="aot_eager"))
    else:
        offloaded(model)
    if how == "model.compile":
        model.compile(backend="aot_eager")
    elif how == "torch.compile":
        called = torch.compile(model, backend="aot_eager")
    elif how == "a step":
        called = torch.compile(lambda **batch: model(**batch), backend="aot_eager")
    for number in range(2):
        called(**tiny_models.batch(architecture, number)).loss.backward()
    (told,) = said(caplog)
    layers = "layers" if architecture == "plain" else "model.layers"
    inner = "_orig_mod." if how == "torch.compile before" else ""
    assert told.endswith(f"for layer in model.{inner}{layers}: layer.compile()")
    assert len(eval(f"model.{layers}")) == LAYERS


@pytest.mark.parametrize("how", ["layers", "replaced", "a step around them", "nothing"])
def test_where_layers_are_compiled_nothing_is_said(
    offloaded: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = offloaded(tiny_models.build("plain"))
    if how != "nothing":
        (replace_layers if how == "replaced" else compile_layers)(model, Backend())
    called: Any = torch.compile(model, backend="aot_eager") if "around" in how else model
    called(**tiny_models.batch("plain", 0)).loss.backward()
    assert said(caplog) == []
