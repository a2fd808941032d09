"""PEFT's adapters over an offloaded model: frozen weights are only read, and the bits are the same as in memory."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import tiny_models
import torch

import memascend
from memascend.formats.transformers_models import Conversion

peft = requirements.package("peft")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

# Attributes that PEFT reads of transformers' models are deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STEPS = 3


def config(**options: Any) -> Any:
    """Return the adapters with dropout, so that recomputation must draw the same random numbers."""
    defaults = {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**defaults | options)


def adapt(model: nn.Module, dtype: torch.dtype | None = None, **options: Any) -> nn.Module:
    """Return PEFT's model around `model`; adapters in `dtype`, float32 by PEFT's default."""
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, config(**options))
    for parameter in adapted.parameters():
        if dtype is not None and parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Run:
    """The results of training."""

    def __init__(self, model: nn.Module, steps: range = range(STEPS), optimizer: Any = None) -> None:
        self.optimizer = optimizer or memascend.AdamW(trained(model).values(), lr=1e-2)
        torch.manual_seed(7)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        for step in steps:
            loss = model(**tiny_models.batch("llama", step)).loss
            loss.backward()
            self.losses.append(loss.detach().clone())
            self.gradients.append({name: gradient(parameter) for name, parameter in trained(model).items()})
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.logits = tiny_models.logits(model, "llama")
        self.generated = tiny_models.generated(model, "llama")
        self.weights = dict(memascend.parameters_of(model))

    def assert_same(self, expected: Run) -> None:
        assert all(torch.equal(one, other) for one, other in zip(self.losses, expected.losses, strict=True))
        for ours, theirs in zip(self.gradients, expected.gradients, strict=True):
            assert ours.keys() == theirs.keys() and len(theirs) > 0
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
        assert torch.equal(self.logits, expected.logits) and torch.equal(self.generated, expected.generated)
        tiny_models.assert_same_weights(self.weights, expected.weights)


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy of a gradient, wherever it is."""
    assert parameter.grad is not None
    return parameter.grad.clone()


@cache
def reference(dtype: torch.dtype | None = None, checkpointing: bool = False, **options: Any) -> Run:
    """Return the same in memory."""
    model = tiny_models.build("llama")
    if checkpointing:
        tiny_models.enable_checkpointing(model)
    return Run(adapt(model, dtype, **options))


def written(model: nn.Module) -> int:
    memascend.flush(model)
    return memascend.stats(model)["ssd_bytes_written"]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_adapters_added_to_an_offloaded_model(
    offloaded: Callable[..., nn.Module], recompute: bool, checkpointing: bool
) -> None:
    base = tiny_models.build("llama")
    if checkpointing:
        tiny_models.enable_checkpointing(base)
    offloaded(base, recompute=recompute, host_memory=tiny_models.smallest_budget(base))
    model = adapt(base)
    before = memascend.stats(model)
    Run(model).assert_same(reference(checkpointing=checkpointing))
    after = memascend.stats(model)
    # Frozen weights are read again in every pass, and that is all.
    assert after["ssd_bytes_read"] > before["ssd_bytes_read"] + STEPS * before["ssd_bytes_written"]
    assert after["ssd_bytes_written"] == before["ssd_bytes_written"]
    assert after["store_bytes_used"] == before["store_bytes_used"]
    assert after["generation"] == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False])
def test_offload_of_a_model_with_adapters(
    offloaded: Callable[..., nn.Module], dtype: torch.dtype | None, recompute: bool
) -> None:
    model = adapt(tiny_models.build("llama"), dtype)
    offloaded(model, recompute=recompute, host_memory=tiny_models.smallest_budget(model), durability="none")
    Run(model).assert_same(reference(dtype))


def test_frozen_weights_are_never_written_again(offloaded: Callable[..., nn.Module]) -> None:
    # Adapters in the dtype of the norms: small tensors of both kinds, which packs must not mix.
    model = offloaded(adapt(tiny_models.build("llama"), torch.bfloat16), durability="none")
    state = memascend.offload_of(model)
    tensors = [tensor for unit in state.units for tensor in unit.tensors]
    assert {place.parameter.requires_grad for each in tensors if each.trained for place in each.places} == {True}
    assert {place.parameter.requires_grad for each in tensors if not each.trained for place in each.places} == {False}
    packs = [tensor for tensor in tensors if tensor.packed and tensor.trained]
    assert len(packs) == 3 < sum(tensor.packed for tensor in tensors)
    assert sum(line.count for line in state.plan.packs) == len(packs)  # no room for gradients of frozen weights

    used = memascend.stats(model)["store_bytes_used"]
    optimizer = memascend.AdamW(trained(model).values(), lr=1e-2)
    planes = sum(state.runtime.store.tensor_bytes(kept.id) for tensor in packs for kept in tensor.planes.values())
    assert memascend.stats(model)["store_bytes_used"] == used + planes
    # With an ample budget states and weights stay in memory, where they are updated.
    before = written(model)
    for step in range(2):
        model(**tiny_models.batch("llama", step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    assert written(model) == before


def test_frozen_weights_are_not_written_by_durable_steps(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(adapt(tiny_models.build("llama"), torch.bfloat16), durability="step")
    state = memascend.offload_of(model)
    packs = [tensor for unit in state.units for tensor in unit.tensors if tensor.trained]
    optimizer = memascend.AdamW(trained(model).values(), lr=1e-2)
    planes = sum(state.runtime.store.tensor_bytes(kept.id) for tensor in packs for kept in tensor.planes.values())
    model(**tiny_models.batch("llama", 0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.flush()  # the first commit has the frozen weights' names, and writes none of them
    for step in range(1, 3):
        before = written(model)
        model(**tiny_models.batch("llama", step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        assert written(model) == before + planes + sum(tensor.nbytes for tensor in packs)


def test_a_plan_of_what_is_frozen_has_no_room_for_updates(offloaded: Callable[..., nn.Module]) -> None:
    base = tiny_models.build("llama").requires_grad_(False)
    plan = memascend.offload_of(offloaded(base)).plan
    assert plan.slots.count == plan.staging_cache.count == 0 and plan.packs == []
    Run(adapt(base)).assert_same(reference())
    head = base.lm_head.weight.requires_grad_(True)
    with pytest.raises(memascend.MemascendError, match=r"lm_head\.weight was frozen .* freeze it after that"):
        memascend.AdamW([head])
    with pytest.raises(memascend.MemascendError, match=r"lm_head\.weight was frozen"):
        base(**tiny_models.batch("llama", 0)).loss.backward()


def test_adapters_and_weights_of_the_store_in_one_optimizer(offloaded: Callable[..., nn.Module]) -> None:
    def run(base: nn.Module) -> Run:
        model = adapt(base)
        for name, parameter in model.named_parameters():
            if "norm" in name or "lm_head" in name:
                parameter.requires_grad_(True)
        return Run(model)

    expected = run(tiny_models.build("llama"))
    base = offloaded(tiny_models.build("llama"))
    run(base).assert_same(expected)
    assert "its steps are not durable" in "".join(memascend.stats(base)["notices"])


@pytest.mark.parametrize("first", ["offload", "adapters"])
def test_saved_adapters(offloaded: Callable[..., nn.Module], tmp_path: Path, first: str) -> None:
    base = tiny_models.build("llama")
    model = adapt(offloaded(base)) if first == "offload" else offloaded(adapt(base))
    weights = Run(model).weights
    state = model.state_dict()
    assert state.keys() == weights.keys()
    tiny_models.assert_same_weights({name: value.clone() for name, value in state.items()}, weights)

    model.save_pretrained(tmp_path / "peft")
    memascend.save_pretrained(model, tmp_path / "ours")
    with pytest.raises(OSError, match=r"adapter_model\.safetensors exists"):
        memascend.save_pretrained(model, tmp_path / "ours")
    for directory in ("peft", "ours"):
        assert (tmp_path / directory / "adapter_model.safetensors").stat().st_size < 200_000
        again = peft.PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path / directory)
        tiny_models.assert_same_weights(dict(memascend.parameters_of(again)), weights)
    if first == "offload":
        for part in (base, base.model, base.model.layers):
            with pytest.raises(memascend.CheckpointError, match="save adapters with"):
                memascend.save_pretrained(part, tmp_path / "base")
        with pytest.raises(memascend.CheckpointError, match="save adapters with"):
            memascend.save_pretrained(model, tmp_path / "base", "float32")
        memascend.close(base)
        with pytest.raises(memascend.MemascendError, match="was closed"):
            memascend.stats(model)


def test_adapters_of_transformers(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    requirements.adapters_of_transformers()

    def run(model: nn.Module) -> Run:
        torch.manual_seed(5)
        model.add_adapter(config(task_type=None))
        return Run(model)

    model = offloaded(tiny_models.build("llama"))
    done = run(model)
    done.assert_same(run(tiny_models.build("llama")))
    memascend.save_pretrained(model, tmp_path)
    again = tiny_models.build("llama")
    again.load_adapter(tmp_path)
    adapters = {name: value for name, value in memascend.parameters_of(again) if "lora" in name}
    assert adapters.keys() == done.gradients[0].keys()
    tiny_models.assert_same_weights(adapters, {name: done.weights[name] for name in adapters})


def test_loaded_adapters(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = adapt(tiny_models.build("llama"))
    memascend.AdamW(trained(model).values())
    model.save_pretrained(tmp_path)
    expected = Run(peft.PeftModel.from_pretrained(tiny_models.build("llama"), tmp_path, is_trainable=True))
    base = offloaded(tiny_models.build("llama"))
    Run(peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)).assert_same(expected)


def test_adapters_on_the_store_are_durable(store: Path) -> None:
    where: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable"}
    expected = Run(adapt(tiny_models.build("llama")), range(4))
    model = memascend.offload(adapt(tiny_models.build("llama")), store=store, keep_store=True, **where)
    Run(model, range(2))
    memascend.close(model)
    # Whatever the weights of the module that is given are.
    given = adapt(tiny_models.build("llama", seed=1))
    run = memascend.resume(store, model=given, **where)
    try:
        assert run.steps == 2 and set(trained(run.model)) == set(expected.gradients[0])
        torch.manual_seed(7)
        plain = adapt(tiny_models.build("llama"))
        first = Run(plain, range(2))
        there = Run(run.model, range(2, 4), run.optimizer)
        there.assert_same(Run(plain, range(2, 4), first.optimizer))
    finally:
        memascend.close(run.model)


def test_adapters_beside_parameters_of_others_are_not_durable_and_that_is_said(
    offloaded: Callable[..., nn.Module], store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = offloaded(tiny_models.build("llama"), keep_store=True, durability="step")
    model = adapt(base)
    with pytest.raises(memascend.MemascendError, match=r"lora_A\.default\.weight is trained, but not on the store"):
        memascend.save_checkpoint(model, "one")
    with pytest.raises(memascend.MemascendError, match="cannot be made durable in its store"):
        other = torch.nn.Parameter(torch.ones(3))
        memascend.AdamW([*trained(model).values(), base.lm_head.weight.requires_grad_(True), other])
    memascend.close(model)
    assert "is trained, but not on the store that is kept" in caplog.text


@pytest.mark.parametrize("added", ["before", "after"])
def test_modules_to_save(offloaded: Callable[..., nn.Module], added: str) -> None:
    # A copy of a module, which is trained whole: of one on SSD it is in memory.
    if added == "before":
        model = offloaded(adapt(tiny_models.build("llama"), modules_to_save=["lm_head"]))
    else:
        model = adapt(offloaded(tiny_models.build("llama")), modules_to_save=["lm_head"])
    Run(model).assert_same(Run(adapt(tiny_models.build("llama"), modules_to_save=["lm_head"])))


# ---- weights read from the model's own files ------------------------------------------------------------------


@pytest.fixture
def from_files(tmp_path: Path, store: Path) -> Iterator[Callable[..., nn.Module]]:
    """Save a model in shards of odd lengths, and open it with the weights read from there."""
    models: list[nn.Module] = []

    def open_(architecture: str = "llama", frozen: str = "files", **options: Any) -> nn.Module:
        if not (tmp_path / "model").exists():
            tiny_models.build(architecture).save_pretrained(tmp_path / "model", max_shard_size="1MB")
        where = {"store": store, "host_memory": "64MiB", "allocator": "pageable"}
        models.append(memascend.from_pretrained(tmp_path / "model", frozen=frozen, **where | options))
        return models[-1]

    yield open_
    for model in models:
        memascend.close(model)


def in_memory(directory: Path, architecture: str = "llama") -> nn.Module:
    """Load it as transformers does, which leaves buffers in float32."""
    cls = type(tiny_models.build(architecture))
    return cls.from_pretrained(directory, dtype=torch.bfloat16).train()


@pytest.mark.core
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_weights_read_from_their_files(
    from_files: Callable[..., nn.Module], tmp_path: Path, direct: bool, recompute: bool
) -> None:
    budget = tiny_models.smallest_budget(tiny_models.build("llama").requires_grad_(False)) + 4 * 2**20  # the windows
    base = from_files(direct=direct, recompute=recompute, host_memory=budget)
    state = memascend.offload_of(base)
    assert state.plan.total <= budget and state.plan.windows.total == 4 * 2**20
    files = list((tmp_path / "model").glob("*.safetensors"))
    before = {path: path.read_bytes() for path in files}
    assert len(files) > 3 and {file.direct for file in state.files} <= {direct, False}
    Run(adapt(base)).assert_same(Run(adapt(in_memory(tmp_path / "model"))))
    stats = memascend.stats(base)
    size = sum(map(len, before.values()))
    assert stats["file_bytes_read"] > 2 * STEPS * 0.9 * size
    assert stats["ssd_bytes_written"] == stats["ssd_bytes_read"] == stats["store_bytes_used"] == 0
    assert {path: path.read_bytes() for path in files} == before


def test_several_runs_read_the_files_of_one_model(from_files: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Their steps alternate, and one goes on when the other has ended."""
    first, second = (
        adapt(from_files(store=tmp_path / name), r=r, lora_dropout=0.0) for name, r in (("one", 8), ("two", 4))
    )
    expected = {r: Run(adapt(in_memory(tmp_path / "model"), r=r, lora_dropout=0.0), range(2)) for r in (8, 4)}
    begun = Run(first, range(1))
    Run(second, range(2)).assert_same(expected[4])
    memascend.close(second)
    again = Run(first, range(1, 2), begun.optimizer)
    assert torch.equal(begun.losses[0], expected[8].losses[0])
    assert torch.equal(again.losses[0], expected[8].losses[1])
    tiny_models.assert_same_weights(again.weights, expected[8].weights)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "t5", "mixtral", "qwen3_moe"])
def test_files_of_other_architectures(from_files: Callable[..., nn.Module], tmp_path: Path, architecture: str) -> None:
    model = from_files(architecture)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    expected = in_memory(tmp_path / "model", architecture)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    assert torch.equal(tiny_models.logits(model, architecture), tiny_models.logits(expected, architecture))


def test_frozen_weights_in_the_store(from_files: Callable[..., nn.Module], tmp_path: Path) -> None:
    base = from_files(frozen="store")
    plan = memascend.offload_of(base).plan
    assert plan.slots.count == plan.windows.count == 0
    Run(adapt(base)).assert_same(Run(adapt(in_memory(tmp_path / "model"))))
    assert memascend.stats(base)["file_bytes_read"] == 0 < memascend.stats(base)["ssd_bytes_written"]


def test_what_files_cannot_give_is_refused(from_files: Callable[..., nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not one of None"):
        from_files(frozen="file")
    for option in ({"durability": "step"}, {"keep_store": True}):
        with pytest.raises(ValueError, match="holds nothing that could be kept"):
            from_files(**option)
    with pytest.raises(memascend.CheckpointError, match=r"safetensors is of dtype bfloat16.*use dtype='bfloat16' or"):
        from_files(dtype="float32")
    model = from_files()
    with pytest.raises(memascend.MemascendError, match=r"was frozen when.*the model's own file.*use frozen='store'"):
        memascend.AdamW([model.lm_head.weight.requires_grad_(True)])
    with pytest.raises(memascend.MemascendError, match="no checkpoint can be kept"):
        model.lm_head.weight.requires_grad_(False)
        memascend.save_checkpoint(model, "one")


@pytest.mark.parametrize("where", ["outside of a pass", "in a forward"])
def test_a_refused_write_leaves_the_weights_of_files(from_files: Callable[..., nn.Module], where: str) -> None:
    model = from_files()
    projection = model.model.layers[1].self_attn.q_proj
    before, expected = projection.weight.detach().clone(), tiny_models.logits(model, "llama")
    with pytest.raises(memascend.MemascendError, match="stays as it is"):
        if where == "in a forward":
            hook = projection.register_forward_pre_hook(lambda module, _: module.weight.data.mul_(2))
            tiny_models.logits(model, "llama")
        projection.weight.data.mul_(2)
    if where == "in a forward":
        hook.remove()
        model.train()
    assert torch.equal(projection.weight.detach().clone(), before)
    assert torch.equal(tiny_models.logits(model, "llama"), expected)


def test_adapters_on_experts_that_lie_singly_in_files(from_files: Callable[..., nn.Module], tmp_path: Path) -> None:
    """A layer's experts are gathered at each use from the files of all of them."""
    budget = tiny_models.smallest_budget(tiny_models.build("mixtral").requires_grad_(False)) + 4 * 2**20  # the windows
    base = from_files("mixtral", host_memory=budget)
    before = {path: path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors")}
    ours, theirs = adapt(base), adapt(in_memory(tmp_path / "model", "mixtral"))
    traces = [
        tiny_models.train(model, "mixtral", steps=STEPS, optimizer=memascend.AdamW(trained(model).values(), lr=1e-2))
        for model in (ours, theirs)
    ]
    tiny_models.assert_same(*traces)
    assert memascend.stats(base)["file_bytes_read"] > 4 * sum(map(len, before.values()))
    assert {path: path.read_bytes() for path in before} == before


def test_what_a_file_holds_in_another_order_is_not_read_there(
    from_files: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts whose matrices transformers transposes or interleaves."""
    monkeypatch.setattr(Conversion, "stacked", lambda self: None)
    with pytest.raises(memascend.CheckpointError, match=r"is made of several tensors in .*use frozen='store'"):
        from_files("mixtral")


@pytest.mark.parametrize("change", ["written", "truncated"])
def test_a_file_that_changes_is_noticed(from_files: Callable[..., nn.Module], tmp_path: Path, change: str) -> None:
    model = from_files(
        host_memory=tiny_models.smallest_budget(tiny_models.build("llama").requires_grad_(False)) + 4 * 2**20
    )
    first = tiny_models.logits(model, "llama")
    path = min((tmp_path / "model").glob("*.safetensors"))
    found, contents = path.stat(), path.read_bytes()
    if change == "written":
        path.write_bytes(bytes(len(contents)))  # in place: another file under the name would do no harm
    else:
        os.truncate(path, len(contents) // 2)
    with pytest.raises(memascend.StoreError, match=rf"{path} has changed since the model was opened"):
        tiny_models.logits(model, "llama")
    path.write_bytes(contents)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert torch.equal(tiny_models.logits(model, "llama"), first)


def test_layers_that_are_unfrozen_as_the_run_goes_on_have_the_bits_of_memory(tmp_path: Path) -> None:
    """As Lightning's BaseFinetuning and callbacks do it: trainable while the model is opened, and then frozen."""
    traces = []
    for offloaded in (False, True):
        model = tiny_models.build("llama")
        layer = list(model.model.layers[-1].parameters())  # type: ignore[union-attr]
        model.model.requires_grad_(False)  # type: ignore[union-attr]
        for parameter in layer:
            parameter.requires_grad_(offloaded)
        if offloaded:
            memascend.offload(model, store=tmp_path / "store", host_memory="64MiB", allocator="pageable")
        for parameter in layer:
            parameter.requires_grad_(False)
        optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for number in range(4):
            if number == 2:
                for parameter in layer:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({"params": layer})
            losses.append(tiny_models.step(model, optimizer, "llama", number))
        traces.append((losses, {name: value.clone() for name, value in memascend.parameters_of(model)}))
    assert torch.equal(torch.stack(traces[0][0]), torch.stack(traces[1][0]))
    tiny_models.assert_same_weights(traces[1][1], traces[0][1])
