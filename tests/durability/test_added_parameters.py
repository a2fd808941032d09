"""Adapters that are added after `memascend.offload`: durable with each step, and resumed to the bits of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from bit_equality import difference
from torch import nn

import memascend
from memascend.durability import added
from memascend.session.api import find_offload

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 5
MAKERS: dict[str, Callable[..., Any]] = {
    "AdamW": memascend.AdamW,
    "8 bits": lambda parameters, **options: memascend.AdamW(parameters, states="8bit", master=False, **options),
    "momentum": lambda parameters, **options: memascend.SGD(parameters, momentum=0.9, **options),
    "APOLLO": lambda parameters, **options: memascend.Apollo(parameters, rank=2, update_proj_gap=2, **options),
}


def build(trained: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a base that is frozen, but for its norms if they are `trained`."""
    model = tiny_models.build("llama", dtype).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained and "norm" in name)
    return model


def adapt(model: nn.Module, rank: int = 4) -> Any:
    norms = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model, config)
    for parameter in norms:
        parameter.requires_grad_(True)
    return model


class Loop:
    """A training loop that can begin at any step, with dropout, clipping, accumulation and a scheduler."""

    def __init__(self, model: nn.Module, make: Callable[..., Any] | None = None, optimizer: Any = None) -> None:
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer or (make or memascend.AdamW)(trained, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.losses: list[float] = []
        if optimizer is None:
            torch.manual_seed(7)

    def go(self, end: int, start: int = 0) -> Loop:
        for number in range(start, end):
            for micro in range(2):
                loss = self.model(**tiny_models.batch("llama", 2 * number + micro)).loss
                loss.backward()
                self.losses.append(float(loss.detach()))
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def results(self, from_step: int = 0) -> dict[str, Any]:
        trained = {name: p.detach().clone() for name, p in self.model.named_parameters() if "lora" in name}
        trained |= {n: p.clone() for n, p in memascend.parameters_of(self.model) if "norm" in n}
        return {"weights": trained, "states": self.optimizer.state_dict(), "losses": self.losses[2 * from_step :]}


def offload(model: nn.Module, store: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"host_memory": None, "durability": "step", "allocator": "pageable"} | options
    memascend.offload(model, store=store, **options)
    return adapt(model)


def in_memory(make: Callable[..., Any], trained: bool) -> Loop:
    model = build(trained)
    torch.manual_seed(5)
    return Loop(adapt(model), make).go(STEPS)


def resume(store: Path, **options: Any) -> Any:
    options = {"model": build(), "add_adapters": adapt, "allocator": "pageable"} | options
    return memascend.resume(store, **options)


@pytest.mark.parametrize(
    ("name", "durability", "trained"),
    [
        ("AdamW", "step", False),
        ("AdamW", "every:2", True),
        ("8 bits", "step", False),
        ("momentum", "step", True),
        ("APOLLO", "every:2", False),
    ],
)
def test_a_run_that_fails_goes_on_to_the_bits_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, durability: str, trained: bool
) -> None:
    monkeypatch.setattr(added, "_PACK_BYTES", 40_000)  # Several packs, and parameters that are larger.
    expected = in_memory(MAKERS[name], trained)
    model = offload(build(trained), tmp_path / "store", durability=durability)
    loop = Loop(model, MAKERS[name])
    memascend.track(model, scheduler=loop.scheduler)
    loop.go(3)
    model(**tiny_models.batch("llama", 90)).loss.backward()  # Half a step, which is given up.
    find_offload(model).close(failed=True)
    run = resume(tmp_path / "store", model=build(trained))
    try:
        assert run.steps == (3 if durability == "step" else 2)
        loop = Loop(run.model, optimizer=run.optimizer)
        memascend.track(run.model, scheduler=loop.scheduler)
        loop.go(STEPS, run.steps)
        assert difference(loop.results(), expected.results(run.steps)) is None
    finally:
        memascend.close(run.model)


def test_a_store_that_is_kept_has_the_adapters(tmp_path: Path) -> None:
    """Twice over: the second run updates in place, and adds no generation before it is closed."""
    expected = in_memory(memascend.AdamW, False)
    model = offload(build(), tmp_path / "store", keep_store=True)
    loop = Loop(model)
    memascend.track(model, scheduler=loop.scheduler)
    loop.go(2)
    memascend.close(model)
    for durability, end in (("none", 4), ("auto", STEPS)):
        run = resume(tmp_path / "store", durability=durability, keep_store=True)
        loop = Loop(run.model, optimizer=run.optimizer)
        memascend.track(run.model, scheduler=loop.scheduler)
        loop.go(end, run.steps)
        results = loop.results()
        memascend.close(run.model)
    assert difference(results["weights"], expected.results()["weights"]) is None


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    model = offload(build(), store)
    Loop(model).go(1)
    with pytest.raises(memascend.MemascendError, match="add_adapters="):
        memascend.restore_checkpoint(model, None)
    memascend.flush(model)
    find_offload(model).close(failed=True)
    with pytest.raises(memascend.CheckpointError, match=r"lora_A.* give memascend\.resume a function"):
        resume(store, add_adapters=None)
    with pytest.raises(memascend.CheckpointError, match=r"lora_A\.default\.weight is .*\(4, 256\) there and .*\(8,"):
        resume(store, add_adapters=lambda base: adapt(base, 8))
    with pytest.raises(memascend.CheckpointError, match="missing here"):
        resume(store, add_adapters=lambda base: base)
    with pytest.raises(memascend.CheckpointError, match="added to the model after"):
        memascend.reshard(store, tmp_path / "rank{rank}", ranks=2)
    run = resume(store)
    assert run.steps == 1
    memascend.close(run.model)


def test_auto_leaves_adapters_to_the_program(tmp_path: Path) -> None:
    model = offload(build(True), tmp_path / "store", durability="auto")
    Loop(model).go(2)
    assert memascend.stats(model)["generation"] == 0
    assert any("durability='step' makes them durable" in notice for notice in memascend.stats(model)["notices"])
    memascend.close(model)
    model = offload(build(), tmp_path / "store", durability="auto")
    Loop(model).go(2)
    assert memascend.stats(model)["generation"] == 0
    memascend.close(model)


def test_parameters_of_others_cannot_be_durable(tmp_path: Path) -> None:
    model = offload(build(), tmp_path / "store")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(memascend.MemascendError, match="also trains parameters that are not of the offloaded model"):
        memascend.AdamW([*trained, nn.Parameter(torch.ones(3))])
    memascend.close(model)
