"""Gradual unfreezing: a weight that was frozen when the model was offloaded gets states when it starts to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from bit_equality import difference
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn


AMPLE = "200MiB"
#: The modules that start to train before each step, and those that are frozen again.
STAGES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("lm_head",), ()),
    (("model.layers.2",), ()),
    (("model.embed_tokens", "model.layers.0", "model.norm"), ()),
    (("model.layers.1",), ("model.layers.2", "model.embed_tokens")),
    (("model.layers.2", "model.embed_tokens"), ()),
]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": memascend.AdamW,
    "8-bit AdamW": lambda params: memascend.AdamW(params, states="8bit", master=False),
    "momentum": lambda params: memascend.SGD(params, lr=1e-2, momentum=0.9),
    "APOLLO": lambda params: memascend.Apollo(
        [{"params": [p for p in params if p.ndim == 2], "rank": 4}, {"params": [p for p in params if p.ndim < 2]}]
    ),
}


def frozen(model: nn.Module) -> nn.Module:
    """Return the model as it is when it is offloaded: its head is trained, and a norm among frozen weights."""
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model.model.layers[1].input_layernorm.requires_grad_(True)
    return model


def least(model: nn.Module, **options: Any) -> int:
    """Return the least host memory in which a model can be trained whole."""
    return smallest_plan(partition(model), **options).total


class Program:
    """Training in stages, as a program with callbacks does it: the same for a model in memory and an offloaded one."""

    def __init__(self, model: nn.Module, make: Callable[..., Any], by_groups: bool, optimizer: Any = None) -> None:
        self.model, self.by_groups = model, by_groups
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad or not by_groups]
        self.optimizer = optimizer or make(parameters)
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def set_stage(self, number: int) -> None:
        trained, frozen_again = STAGES[number]
        for name in trained:
            module = self.model.get_submodule(name).requires_grad_(True)
            known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
            new = [parameter for parameter in module.parameters() if id(parameter) not in known]
            if self.by_groups and new:
                self.optimizer.add_param_group({"params": new, "lr": 1e-2 / (number + 1)})
        for name in frozen_again:
            self.model.get_submodule(name).requires_grad_(False)

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        loss = self.model(**tiny_models.batch("llama", number)).loss
        loss.backward()
        self.losses.append(loss.detach().clone())
        self.norms.append(self.optimizer.clip_grad_norm_(1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def go(self, stages: range = range(len(STAGES))) -> Program:
        for number in stages:
            self.set_stage(number)
            self.step(number)
        return self

    def results(self) -> dict[str, Any]:
        """Return the whole outcome."""
        weights = dict(memascend.parameters_of(self.model))
        return {"weights": weights, "states": self.optimizer.state_dict(), "losses": self.losses, "norms": self.norms}


def reference(make: Callable[..., Any], by_groups: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the same in memory."""
    return Program(frozen(tiny_models.build("llama", dtype)), make, by_groups).go().results()


# APOLLO takes matrices alone in a group with a rank.
@pytest.mark.parametrize(
    ("optimizer", "by_groups"), [*((name, True) for name in OPTIMIZERS), ("AdamW", False), ("8-bit AdamW", False)]
)
def test_later_states_have_the_bits_of_memory(tmp_path: Path, optimizer: str, by_groups: bool) -> None:
    make = OPTIMIZERS[optimizer]
    model = frozen(tiny_models.build("llama"))
    memascend.offload(model, store=tmp_path / "store", host_memory=AMPLE, keep_store=False)
    plan = memascend.offload_of(model).plan
    before = plan.total
    ours = Program(model, make, by_groups).go().results()
    assert plan.later.total == plan.total - before > 0, "the gradients of norms lie beside the arena"
    memascend.close(model)
    assert difference(ours, reference(make, by_groups)) is None


@pytest.mark.parametrize("options", [{"recompute": False}, {"update": "backward"}, {"durability": "none"}], ids=str)
def test_other_options(tmp_path: Path, options: dict[str, Any], small_tables: None) -> None:
    """Embedding and head are tables, which are read by blocks, in the least memory in which all can be trained."""
    model = tiny_models.build("llama", torch.float32)
    budget = least(model, **{name: value for name, value in options.items() if name == "update"})
    model.requires_grad_(False).lm_head.requires_grad_(True)
    memascend.offload(model, store=tmp_path / "store", host_memory=budget, keep_store=False, **options)
    ours = Program(model, memascend.AdamW, True).go().results()
    plan, stats = memascend.offload_of(model).plan, memascend.stats(model)
    assert plan.later.total == stats["host_bytes_outside"] and plan.total <= budget
    tensors = [tensor for unit in memascend.offload_of(model).units for tensor in unit.tensors]
    assert any(t.packed and t.trained_later and not t.gradient_outside for t in tensors), "some lie in staging buffers"
    memascend.close(model)
    in_memory = memascend.fuse_loss(tiny_models.build("llama", torch.float32))
    in_memory.requires_grad_(False).lm_head.requires_grad_(True)
    assert difference(ours, Program(in_memory, memascend.AdamW, True).go().results()) is None


@pytest.mark.parametrize(("killed_after", "is_ample"), [(1, True), (2, False), (3, True), (4, False)])
def test_a_killed_run_goes_on(tmp_path: Path, killed_after: int, is_ample: bool) -> None:
    # A unit that is frozen in part at first has one pack more.
    budget = AMPLE if is_ample else least(tiny_models.build("llama")) + 2**16
    store = tmp_path / "store"
    model = frozen(tiny_models.build("llama"))
    memascend.offload(model, store=store, host_memory=AMPLE, keep_store=True)
    before = Program(model, memascend.AdamW, True).go(range(killed_after))
    memascend.flush(model)
    # Its last step is durable, and the one begun then is lost.
    before.set_stage(killed_after)
    before.model(**tiny_models.batch("llama", 0)).loss.backward()
    memascend.offload_of(model).close(failed=True)

    resumed = memascend.resume(store, model=tiny_models.build("llama", seed=5), host_memory=budget, keep_store=True)
    assert resumed.steps == killed_after
    session = memascend.offload_of(resumed.model)
    if killed_after > 1:
        assert session.plan.later.total == 0 and any(t.trained_later for unit in session.units for t in unit.tensors)
    after = Program(resumed.model, memascend.AdamW, True, resumed.optimizer)
    after.losses, after.norms = before.losses, before.norms
    ours = after.go(range(killed_after, len(STAGES))).results()
    memascend.close(resumed.model)
    expected = reference(memascend.AdamW, True)
    for group in expected["states"]["param_groups"] + ours["states"]["param_groups"]:
        group.pop("params")  # resuming numbers them by name
    assert difference(ours["weights"], expected["weights"]) is None
    assert difference([ours["losses"], ours["norms"]], [expected["losses"], expected["norms"]]) is None
    again = memascend.resume(store, model=tiny_models.build("llama", seed=6), host_memory=budget, keep_store=False)
    assert difference(dict(memascend.parameters_of(again.model)), expected["weights"]) is None
    memascend.close(again.model)


def test_going_back_to_a_checkpoint_before_it(tmp_path: Path) -> None:
    model = frozen(tiny_models.build("llama"))
    memascend.offload(model, store=tmp_path / "store", host_memory=AMPLE, keep_store=False)
    program = Program(model, memascend.AdamW, True).go(range(1))
    memascend.save_checkpoint(model, "head alone")
    program.go(range(1, 3))
    resumed = memascend.restore_checkpoint(model, "head alone")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["model.layers.1.input_layernorm.weight", "lm_head.weight"]
    again = Program(model, memascend.AdamW, True, resumed.optimizer).go(range(1, len(STAGES)))
    ours = dict(memascend.parameters_of(again.model))
    memascend.close(model)
    assert difference(ours, reference(memascend.AdamW, True)["weights"]) is None


def deep(layers: int = 12) -> nn.Module:
    """Return a model with a pack of norms in each of many layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **tiny_models.SMALL_DECODER | {"num_hidden_layers": layers, "vocab_size": tiny_models.VOCABULARY}
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train_all(model: nn.Module) -> dict[str, torch.Tensor]:
    """Train the head, then everything."""
    optimizer = memascend.AdamW(model.lm_head.parameters(), lr=1e-2)
    tiny_models.step(model, optimizer, "llama", 0)
    model.model.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.model.parameters())})
    tiny_models.step(model, optimizer, "llama", 1)
    return dict(memascend.parameters_of(model))


def test_a_budget_without_room_names_one_that_fits(tmp_path: Path) -> None:
    model = frozen(deep())
    memascend.offload(model, store=tmp_path / "store", host_memory=tiny_models.smallest_budget(model), keep_store=False)
    optimizer = memascend.AdamW(model.lm_head.parameters(), lr=1e-2)
    tiny_models.step(model, optimizer, "llama", 0)
    used = memascend.stats(model)["store_bytes_used"]
    model.model.requires_grad_(True)
    told = r"model\.embed_tokens\.weight was frozen when .*open the model with host_memory='\d+MiB'"
    with pytest.raises(memascend.BudgetError, match=told) as caught:
        optimizer.add_param_group({"params": list(model.model.parameters())})
    assert memascend.stats(model)["store_bytes_used"] == used, "nothing was allocated"
    model.model.requires_grad_(False)
    tiny_models.step(model, optimizer, "llama", 1)  # The run goes on without them.
    memascend.close(model)

    model = frozen(deep())
    budget = caught.value.smallest_bytes
    memascend.offload(model, store=tmp_path / "store", host_memory=budget, keep_store=False)
    ours = train_all(model)
    assert memascend.offload_of(model).plan.total <= budget
    memascend.close(model)
    assert difference(ours, train_all(frozen(deep()))) is None


def test_a_budget_that_changes_counts_them(tmp_path: Path) -> None:
    model = frozen(tiny_models.build("llama"))
    memascend.offload(model, store=tmp_path / "store", host_memory=AMPLE, host_memory_max="300MiB", keep_store=False)
    program = Program(model, memascend.AdamW, True).go(range(3))
    session = memascend.offload_of(model)
    later = session.plan.later.total
    memascend.set_host_memory(model, "100MiB")
    assert session.plan.later.total == later > 0 and session.plan.total <= 100 * 2**20
    ours = dict(memascend.parameters_of(program.go(range(3, len(STAGES))).model))
    memascend.close(model)
    assert difference(ours, reference(memascend.AdamW, True)["weights"]) is None


def test_what_cannot_train_later_is_refused(tmp_path: Path) -> None:
    model = tiny_models.build("llama").requires_grad_(False)
    memascend.offload(model, store=tmp_path / "store", host_memory=AMPLE, keep_store=False)
    with pytest.raises(memascend.MemascendError, match=r"as everything else was.*have it trainable when"):
        memascend.AdamW(model.lm_head.requires_grad_(True).parameters())
    memascend.close(model)
    model = frozen(tiny_models.build("llama", torch.float32))
    model.model.layers.requires_grad_(False).to(torch.float16)
    memascend.offload(model, store=tmp_path / "store", host_memory=AMPLE, keep_store=False, gradients="bfloat16")
    with pytest.raises(memascend.MemascendError, match=r"in float16, for which gradients='bfloat16' is not"):
        memascend.AdamW(model.model.layers[0].requires_grad_(True).parameters())
    memascend.close(model)
