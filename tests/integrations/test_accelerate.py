"""Accelerate's loop over an offloaded model gives the bits of the same loop in memory, or a refusal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch
from torch.utils.data import DataLoader

import memascend

accelerate = requirements.package("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)

from memascend.integrations.accelerate import Accelerator  # noqa: E402
from memascend.integrations.named_checkpoints import MANIFEST  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

KINDS = {"ours": Accelerator, "plain": accelerate.Accelerator}
BF16 = {"mixed_precision": "bf16"}


def _reset() -> None:
    """Reset accelerate's state of the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def loader() -> Any:
    """Return seven batches, shuffled."""
    batches = [tiny_models.batch("qwen2", number) for number in range(7)]
    return DataLoader(batches, shuffle=True, collate_fn=lambda rows: rows[0])


class Loop:
    """The loop of accelerate's own examples."""

    def __init__(
        self, model: nn.Module, kind: Any = Accelerator, optimizer: Any = None, lr: float = 1e-2, **options: Any
    ) -> None:
        self.accelerator = kind(cpu=True, **options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = memascend.AdamW(trained, lr=lr) if optimizer is None else optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(), scheduler
        )
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def run(self, epochs: int = 1, batches: range | None = None, by_value: bool = False) -> Loop:
        """Train; with `batches`, on those in order instead of the loader's."""
        for _ in range(epochs):
            for inputs in (
                self.loader if batches is None else [tiny_models.batch("qwen2", number) for number in batches]
            ):
                self.step(inputs, by_value)
        return self

    def step(self, inputs: dict[str, torch.Tensor], by_value: bool = False) -> None:
        accelerator, model = self.accelerator, self.model
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and by_value:
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            elif accelerator.sync_gradients:
                self.norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.detach().clone())

    def assert_same(self, expected: Loop, last: int | None = None) -> None:
        """Compare all losses with the last ones of another loop, and the weights."""
        theirs = expected.losses if last is None else expected.losses[-last:]
        assert len(self.losses) == len(theirs) > 0
        assert [bool(torch.equal(one, other)) for one, other in zip(self.losses, theirs, strict=True)] == [True] * len(
            theirs
        )
        assert self.scheduler.get_last_lr() == expected.scheduler.get_last_lr()
        weights = dict(memascend.parameters_of(self.model))
        tiny_models.assert_same_weights(weights, dict(memascend.parameters_of(expected.model)))


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bfloat16", "no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_loop_is_that_of_memory(
    offloaded: Callable[..., nn.Module], kind: str, precision: str, accumulate: int
) -> None:
    # Seven batches: the last step of an epoch has one.
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    mixed = {"mixed_precision": precision.replace("bfloat16", "no"), "gradient_accumulation_steps": accumulate}

    def loop(model: nn.Module) -> Loop:
        _reset()
        torch.manual_seed(3)
        return Loop(model, KINDS[kind], **mixed).run(epochs=2)

    expected = loop(tiny_models.build("qwen2", dtype))
    model = tiny_models.build("qwen2", dtype)
    ours = loop(offloaded(model, host_memory=tiny_models.smallest_budget(model)))
    ours.assert_same(expected)
    assert all(torch.equal(one, other) for one, other in zip(ours.norms, expected.norms, strict=True))
    assert len(ours.norms) == 2 * -(-7 // accumulate)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loss_in_pieces(offloaded: Callable[..., nn.Module], precision: str) -> None:
    def loop(model: nn.Module) -> Loop:
        _reset()
        return Loop(model, mixed_precision=precision).run(batches=range(3))

    expected = loop(memascend.fuse_loss(tiny_models.build("qwen2", torch.float32)))
    loop(offloaded(tiny_models.build("qwen2", torch.float32), fused_loss=True)).assert_same(expected)


def test_clipping_by_value(offloaded: Callable[..., nn.Module]) -> None:
    expected = Loop(tiny_models.build("qwen2")).run(batches=range(3), by_value=True)
    Loop(offloaded(tiny_models.build("qwen2"))).run(batches=range(3), by_value=True).assert_same(expected)


@pytest.mark.parametrize("where", ["store", "memory"])
def test_clipping_by_norm_is_the_optimizers_where_it_has_all_gradients(
    offloaded: Callable[..., nn.Module], where: str
) -> None:
    model = tiny_models.build("qwen2")
    loop = Loop(offloaded(model) if where == "store" else model)
    loop.accelerator.backward(loop.model(**tiny_models.batch("qwen2", 0)).loss)
    before = dict(tiny_models.gradients_of(model))
    norm = loop.accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm > 1e-3
    # Within the update: the gradients are as they were.
    assert all(torch.equal(gradient, before[name]) for name, gradient in tiny_models.gradients_of(model))
    largest = loop.accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))
    assert largest == max(gradient.abs().max() for gradient in before.values())
    loop.optimizer.zero_grad()
    loop.accelerator.backward(loop.model(**tiny_models.batch("qwen2", 0)).loss)
    some = list(model.parameters())[:3]
    loop.accelerator.clip_grad_norm_(some, 1e-9)  # not all of the optimizer's: accelerate's own
    assert all(parameter.grad.abs().max() <= 1e-9 for parameter in some)
    loop.optimizer.step()


# ---- preparing ----------------------------------------------------------------------------------------------------


def test_prepare_moves_no_states(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("qwen2"))
    optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
    tiny_models.step(model, optimizer, "qwen2", 0)
    memascend.flush(model)
    before = memascend.stats(model)
    Accelerator(cpu=True).prepare(model, optimizer)
    after = memascend.stats(model)
    for counter in ("ssd_bytes_read", "ssd_bytes_written"):
        assert after[counter] == before[counter]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_has_stepped(offloaded: Callable[..., nn.Module], kind: str) -> None:
    def loop(model: nn.Module) -> Loop:
        _reset()
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        tiny_models.step(model, optimizer, "qwen2", 9)
        return Loop(model, KINDS[kind], optimizer).run(batches=range(2))

    loop(offloaded(tiny_models.build("qwen2"))).assert_same(loop(tiny_models.build("qwen2")))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'.*use 'bf16'"),
        ({"mixed_precision": "fp16", "cpu": True}, "mixed_precision='fp16' is for a CUDA device"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin: .*leave it out"),
        ({"fsdp_plugin": object()}, "fsdp_plugin: .*leave it out"),
        ({"megatron_lm_plugin": object()}, "megatron_lm_plugin: .*leave it out"),
        ({"parallelism_config": object()}, "parallelism_config: .*leave it out"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(memascend.MemascendError, match=says):
        Accelerator(**options)
    assert not AcceleratorState._shared_state  # nothing is left of it


@pytest.mark.parametrize(
    ("variable", "value"), [("ACCELERATE_USE_FSDP", "true"), ("WORLD_SIZE", "2"), ("ACCELERATE_MIXED_PRECISION", "fp8")]
)
def test_what_accelerate_launch_asks_for_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(memascend.MemascendError, match=variable.replace("ACCELERATE_MIXED_PRECISION", "fp8")):
        Accelerator()


def test_what_prepare_refuses(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("qwen2"))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(memascend.MemascendError, match=r"use memascend\.SGD"):
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    placed: Any = tiny_models.build("qwen2")
    placed.hf_device_map = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(memascend.MemascendError, match="device_map"):
        accelerator.prepare(placed)
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="closed"):
        accelerator.prepare(model)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def tags(model: nn.Module) -> list[str]:
    return [tag for tag, _, _ in memascend.checkpoints(model)]


def kilobytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*")) / 1024


class Counter:
    """An object that is registered for checkpoints."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.core
def test_a_state_is_saved_and_loaded(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    _reset()
    expected = Loop(tiny_models.build("qwen2")).run(batches=range(5))
    _reset()
    model = offloaded(tiny_models.build("qwen2"))
    loop, counter = Loop(model), Counter()
    loop.accelerator.register_for_checkpointing(counter)
    loop.run(batches=range(2))
    counter.value, drawn = 7, torch.get_rng_state()
    loop.accelerator.save_state(tmp_path / "state")
    assert kilobytes(tmp_path / "state") < 100 and len(tags(model)) == 1
    loop.run(batches=range(5, 7))
    torch.rand(3)
    counter.value, weight = 8, model.lm_head.weight

    loop.accelerator.load_state(tmp_path / "state")
    assert counter.value == 7 and torch.equal(torch.get_rng_state(), drawn)
    assert loop.model is model and model.lm_head.weight is weight
    loop.losses.clear()
    loop.run(batches=range(2, 5)).assert_same(expected, last=3)

    # The name in the store goes with the directory that is written over.
    loop.accelerator.save_state(tmp_path / "state")
    assert len(tags(model)) == 1


def test_an_interrupted_run_goes_on_in_another_process(
    offloaded: Callable[..., nn.Module], store: Path, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: Any = None) -> Loop:
        _reset()
        return Loop(model, optimizer=optimizer, gradient_accumulation_steps=2, **BF16)

    build = lambda: tiny_models.build("qwen2", torch.float32)  # noqa: E731
    expected = loop(build()).run(batches=range(6))
    model = offloaded(build())
    first = loop(model).run(batches=range(4))
    first.accelerator.save_state(tmp_path / "state")
    with pytest.raises(ZeroDivisionError):
        first.model.register_forward_hook(lambda *_: 1 / 0)
        first.run(batches=range(4, 6))
    memascend.close(model)

    run = memascend.resume(store, host_memory="64MiB", allocator="pageable")
    try:
        again = loop(run.model, run.optimizer)
        again.accelerator.load_state(tmp_path / "state")
        again.run(batches=range(4, 6)).assert_same(expected, last=2)
    finally:
        memascend.close(run.model)


def test_checkpoints_that_are_named_and_limited(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    model = offloaded(tiny_models.build("qwen2"))
    loop = Loop(model, project_config=config)
    kept = []
    for number in range(4):
        loop.run(batches=range(number, number + 1))
        location = loop.accelerator.save_state()
        kept.append(json.loads((location / MANIFEST).read_text())["models"][0]["tag"])
        assert tags(model) == kept[-2:]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    assert kept[-1].startswith("checkpoint_3-")
    weights = dict(memascend.parameters_of(model))
    loop.run(batches=range(1))
    loop.accelerator.load_state()
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), weights)


def test_a_model_in_memory_beside_it(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model, teacher = offloaded(tiny_models.build("qwen2")), tiny_models.build("gpt2", seed=1)
    accelerator = Accelerator(cpu=True)
    optimizer, other = memascend.AdamW(model.parameters()), torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    teacher, model, optimizer, other = accelerator.prepare(teacher, model, optimizer, other)

    def step(number: int) -> None:
        for each, its in ((model, optimizer), (teacher, other)):
            accelerator.backward(each(**tiny_models.batch("gpt2", number)).loss)
            its.step()
            its.zero_grad()

    step(0)
    accelerator.save_state(tmp_path / "state")
    step(1)
    step(2)
    first = [dict(memascend.parameters_of(each)) for each in (model, teacher)]
    accelerator.load_state(tmp_path / "state")
    step(1)
    step(2)
    for each, weights in zip((model, teacher), first, strict=True):
        tiny_models.assert_same_weights(dict(memascend.parameters_of(each)), weights)
    accelerator._models.pop()
    with pytest.raises(memascend.CheckpointError, match="prepare the same models"):
        accelerator.load_state(tmp_path / "state")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_in_memory_over_a_frozen_model(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    peft = requirements.package("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    expected = Loop(adapted(tiny_models.build("qwen2"))).run(batches=range(4))
    _reset()
    model = adapted(offloaded(tiny_models.build("qwen2").requires_grad_(False)))
    loop = Loop(model).run(batches=range(2))
    loop.accelerator.save_state(tmp_path / "state")
    loop.run(batches=range(6, 7))
    assert tags(model) == []  # nothing on the store is trained
    loop.accelerator.load_state(tmp_path / "state")
    loop.losses.clear()
    loop.run(batches=range(2, 4)).assert_same(expected, last=2)


def test_a_state_that_was_saved_from_memory_is_refused(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    Loop(tiny_models.build("qwen2")).accelerator.save_state(tmp_path / "state")
    _reset()
    loop = Loop(offloaded(tiny_models.build("qwen2")))
    with pytest.raises(memascend.CheckpointError, match=rf"state has no {MANIFEST}"):
        loop.accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_of_the_plain_accelerator_goes_on_to_the_same_bits(
    offloaded: Callable[..., nn.Module], tmp_path: Path, dtype: torch.dtype
) -> None:
    expected = Loop(tiny_models.build("qwen2", dtype), accelerate.Accelerator).run(batches=range(5))
    _reset()
    loop = Loop(offloaded(tiny_models.build("qwen2", dtype)), accelerate.Accelerator).run(batches=range(3))
    loop.accelerator.save_state(tmp_path / "state")
    loop.run(batches=range(3, 5)).assert_same(expected)  # saving has changed nothing
    _reset()
    other = tiny_models.build("qwen2", dtype)
    again = Loop(offloaded(other.requires_grad_(), store=tmp_path / "other"), accelerate.Accelerator)
    again.accelerator.load_state(tmp_path / "state")
    again.run(batches=range(3, 5)).assert_same(expected, last=2)


# ---- models out ---------------------------------------------------------------------------------------------------


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_as_the_examples_do_it(offloaded: Callable[..., nn.Module], tmp_path: Path, kind: str) -> None:
    for name, model in (("ours", offloaded(tiny_models.build("qwen2"))), ("theirs", tiny_models.build("qwen2"))):
        _reset()
        loop = Loop(model, KINDS[kind]).run(batches=range(1))
        loop.accelerator.unwrap_model(loop.model).save_pretrained(
            tmp_path / name,
            is_main_process=loop.accelerator.is_main_process,
            save_function=loop.accelerator.save,
            state_dict=loop.accelerator.get_state_dict(loop.model),
        )
        if kind == "ours":
            loop.accelerator.save_model(loop.model, tmp_path / name / "model", max_shard_size="500KB")
    tiny_models.assert_same_weights(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    if kind == "ours":
        there = tensors_in(tmp_path / "ours" / "model")
        tiny_models.assert_same_weights(there, tensors_in(tmp_path / "theirs" / "model"))
        with pytest.raises(ValueError, match="safe_serialization=False"):
            loop_of = Loop(offloaded(tiny_models.build("gpt2"), store=tmp_path / "other"))
            loop_of.accelerator.save_model(loop_of.model, tmp_path / "out", safe_serialization=False)


def test_a_compiled_model(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    def loop(model: nn.Module) -> Loop:
        _reset()
        return Loop(model, dynamo_backend="eager").run(batches=range(2))

    expected = loop(tiny_models.build("qwen2"))
    ours = loop(offloaded(tiny_models.build("qwen2")))
    ours.assert_same(expected)
    ours.accelerator.save_model(ours.model, tmp_path)
    assert tensors_in(tmp_path).keys() == dict(tiny_models.build("qwen2").named_parameters()).keys()
    with pytest.raises(memascend.MemascendError, match="regional compilation"):
        _reset()
        plugin = accelerate.utils.TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        Loop(offloaded(tiny_models.build("gpt2"), store=tmp_path / "other"), dynamo_plugin=plugin)


def test_free_memory_closes_the_model(offloaded: Callable[..., nn.Module]) -> None:
    loop = Loop(offloaded(tiny_models.build("qwen2"))).run(batches=range(1))
    model, optimizer = loop.accelerator.free_memory(loop.model, loop.optimizer)
    assert (model, optimizer) == (None, None)
    with pytest.raises(memascend.MemascendError, match="closed"):
        memascend.stats(loop.model)


def test_autocast_without_its_cache(offloaded: Callable[..., nn.Module]) -> None:
    def loop(model: nn.Module) -> Loop:
        _reset()
        handlers = [AutocastKwargs(cache_enabled=False)]
        return Loop(model, kwargs_handlers=handlers, **BF16).run(batches=range(2))

    expected = loop(tiny_models.build("qwen3", torch.float32))
    loop(offloaded(tiny_models.build("qwen3", torch.float32))).assert_same(expected)


def test_hooks_of_distributed_data_parallel_are_refused(offloaded: Callable[..., nn.Module]) -> None:
    """Nothing would call them: gradients of an offloaded model do not pass through DistributedDataParallel."""
    _reset()
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model = offloaded(tiny_models.build("qwen2"))
    with pytest.raises(memascend.MemascendError, match=r"comm_hook=FP16.*leave it out"):
        accelerator.prepare_model(model)
    accelerator.ddp_handler.comm_hook = DDPCommunicationHookType.NO
    accelerator.prepare_model(model)
