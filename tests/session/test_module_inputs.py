"""PyTorch's own inputs for its modules: offloaded, every module computes the bits that it computes in memory."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import bit_equality
import pytest
import requirements
import tiny_models
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memascend

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: The outcome of all inputs, with their version of PyTorch.
LISTED = json.loads(Path(__file__).with_name("module_inputs.json").read_text())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: The inputs of each module that `make test` runs, chosen by a fixed seed; `make soak` runs them all.
SAMPLE = {"float32": 12, "bfloat16": 4, "float16": 4}
STEPS = 2
#: As little as holds the largest of these modules.
HOST_MEMORY = "20MiB"


@cache
def modules() -> dict[str, Any]:
    """Return PyTorch's modules by name: internal, and the import needs expecttest."""
    requirements.package("expecttest")
    with warnings.catch_warnings():
        # Ignore its warnings about other packages that PyTorch's tests use.
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.name: info for info in module_db}


class Layers(nn.Module):
    """A module twice in a row of layers, so that its activations are recomputed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([module, copy.deepcopy(module)])

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [layer(*args, **kwargs) for layer in self.layers]


class Case:
    """One input of one module, which is the whole model or two of its layers."""

    def __init__(
        self, module_type: type[nn.Module], dtype: torch.dtype, given: Any, training: bool, layers: bool
    ) -> None:
        self.module_type, self.dtype, self.given = module_type, dtype, given
        self.training, self.layers = training, layers

    def build(self) -> nn.Module:
        """Make the module: the same one every time."""
        made = self.given.constructor_input
        torch.manual_seed(0)
        module = self.module_type(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs)).to(self.dtype)
        return (Layers(module) if self.layers else module).train(self.training)

    def call(self, model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Call the model with copies of the input; return the tensors that went in, and those that came out."""

        def fresh(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().clone().requires_grad_(value.is_floating_point())

        args, kwargs = pytree.tree_map(fresh, (self.given.forward_input.args, self.given.forward_input.kwargs))
        outputs = model(*args, **kwargs)
        return _tensors((args, kwargs)), _tensors(outputs)

    def train(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """Train two steps and evaluate; return copies of all that was computed, by name."""
        seen: dict[str, torch.Tensor | None] = {}

        def note(what: str, values: Any) -> None:
            for key, value in values:
                seen[f"{what} {key}"] = None if value is None else value.detach().clone()

        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            torch.manual_seed(step)  # for dropout
            inputs, outputs = self.call(model)
            _loss(outputs).backward()
            note(f"step {step}: output", enumerate(outputs))
            note(f"step {step}: gradient of input", enumerate(value.grad for value in inputs))
            note(f"step {step}: gradient of", tiny_models.gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
            note(f"step {step}: buffer", model.named_buffers())
        torch.manual_seed(STEPS)
        with torch.no_grad():
            note("evaluated", enumerate(self.call(model.eval())[1]))
        note("parameter", memascend.parameters_of(model))
        note("buffer", model.named_buffers())
        return seen

    def outcome(self, store: Path) -> tuple[str, str]:
        """Return the outcome: "same", "refused", "wrong" or "no parameters"; and why."""
        model, beside = self.build(), self.build()
        if not list(model.parameters()):
            return "no parameters", ""
        options: dict[str, Any] = {"durability": "none", "allocator": "pageable", "engine": "threads", "direct": False}
        try:
            memascend.offload(model, store=store, host_memory=HOST_MEMORY, compute_threads=1, **options)
        except (memascend.MemascendError, ValueError) as error:
            return "refused", _reason(error)
        try:
            expected = self.train(beside)  # every one of these inputs is for training, so nothing may be raised
            actual = self.train(model)
        except memascend.MemascendError as error:
            return "refused", _reason(error)
        finally:
            memascend.close(model)
        wrong = bit_equality.differing(actual, expected)
        return ("wrong", f"{wrong[:4]} differ ({len(wrong)} in all)") if wrong else ("same", "")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return a sum to which every value of every output contributes with a weight of its own."""
    trained = [output.flatten() for output in outputs if output.requires_grad]
    return sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype)).sum().float() for o in trained)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("parameter layers.0.", "parameter ")


@cache
def cases(name: str, dtype: str) -> list[Case]:
    """Return all inputs of a module: for training and for evaluation mode, alone and as recomputed layers."""
    info, made = modules()[name], []
    for training in (True, False):
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=DTYPES[dtype], requires_grad=True, training=training)
        for one in given:
            made += [Case(info.module_cls, DTYPES[dtype], one, training, layers) for layers in (False, True)]
    return made


def run(name: str, dtype: str, chosen: list[Case], room: Path) -> Counter[str]:
    """Run these inputs of a module; return how many had which outcome. None is wrong, and refusals are listed."""
    counts: Counter[str] = Counter()
    for number, case in enumerate(chosen):
        outcome, why = case.outcome(room / "store")
        told = (
            f"{name}, {dtype}, input {number}, {'layers' if case.layers else 'alone'}, training={case.training}: {why}"
        )
        assert outcome != "wrong", told
        assert (outcome == "refused") == (name in LISTED["refused"]), told
        if outcome == "refused":
            assert why == LISTED["refused"][name], told
        counts[outcome] += 1
    print(f"{name} in {dtype}: {dict(counts)}")
    return counts


@pytest.mark.parametrize("name", LISTED["inputs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_of_the_inputs(name: str, dtype: str, room: Path) -> None:
    shuffled = random.Random(15).sample(cases(name, dtype), len(cases(name, dtype)))
    with_parameters = (case for case in shuffled if list(case.build().parameters()))
    assert run(name, dtype, list(islice(with_parameters, SAMPLE[dtype])), room).total() >= 4


@pytest.mark.soak
@pytest.mark.parametrize("name", LISTED["inputs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_input(name: str, dtype: str, room: Path) -> None:
    counts = run(name, dtype, cases(name, dtype), room)
    tested = counts.total() - counts["no parameters"]
    if is_listed_version():
        assert tested == LISTED["inputs"][name]
    assert tested >= 4


def test_every_module_with_parameters_is_listed() -> None:
    found = {name for name in modules() if any(list(case.build().parameters()) for case in cases(name, "float32"))}
    assert len(found) >= 37
    if is_listed_version():
        assert found == LISTED["inputs"].keys()
    assert LISTED["refused"].keys() <= LISTED["inputs"].keys() <= found


def test_the_docs_say_how_many() -> None:
    total = sum(LISTED["inputs"].values())
    refused = sum(LISTED["inputs"][name] for name in LISTED["refused"])
    page = " ".join((Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text().split())
    said = f"{total:,} runs of {len(LISTED['inputs'])} modules on PyTorch's own inputs for them"
    assert f"{said} ({LISTED['torch']}): {total - refused:,} same bits, {refused} refused" in page


def is_listed_version() -> bool:
    """Return whether this PyTorch has the inputs that are listed; another may have more or less of them."""
    return torch.__version__.startswith(f"{LISTED['torch']}.")
