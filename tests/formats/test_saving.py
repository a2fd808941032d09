"""A model is saved as it is now: replaced and added modules, parts of it, buffers on a device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import flushes
import pytest
import requirements
import tiny_models
import torch
from safetensors.torch import load_file
from torch import nn

import memascend
from memascend.formats.saving import saver_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_saved_alike(ours: Path, theirs: Path) -> None:
    """Check that tensors, names and configuration are the same."""
    tiny_models.assert_same_weights(tensors_in(ours), tensors_in(theirs))
    for name in ("config.json", "generation_config.json"):
        assert (ours / name).exists() == (theirs / name).exists(), name
        if (theirs / name).exists():
            assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())


def new_head(model: Any) -> None:
    torch.manual_seed(1)
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, dtype=torch.bfloat16)


def added_module(model: Any) -> None:
    torch.manual_seed(2)
    model.score = nn.Linear(model.config.hidden_size, 2)
    model.register_buffer("seen", torch.tensor([3, 4]))


def new_parameter(model: Any) -> None:
    torch.manual_seed(3)
    layer = model.model.layers[1]
    layer.input_layernorm.weight = nn.Parameter(torch.randn(model.config.hidden_size))
    layer.self_attn.q_proj.bias = nn.Parameter(torch.randn(layer.self_attn.q_proj.out_features))


def new_experts(model: Any) -> None:
    torch.manual_seed(4)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(
        torch.randn_like(tiny_models.build("mixtral").model.layers[1].mlp.experts.down_proj)
    )


def layer_left_out(model: Any) -> None:
    del model.model.layers[1]


CHANGES = [
    ("llama", new_head),
    ("qwen3", new_head),  # which was tied to the embedding
    ("llama", added_module),
    ("qwen2", new_parameter),
    ("mixtral", new_experts),
    ("llama", layer_left_out),
]


@pytest.mark.parametrize(("architecture", "change"), CHANGES)
@pytest.mark.parametrize("limit", ["5GB", "300KB"])
def test_what_was_replaced_or_added_after_offload_is_saved(
    tmp_path: Path, offloaded: Callable[..., nn.Module], architecture: str, change: Callable[[Any], None], limit: str
) -> None:
    model, twin = offloaded(tiny_models.build(architecture)), tiny_models.build(architecture)
    for one in (model, twin):
        change(one)
    memascend.save_pretrained(model, tmp_path / "ours", max_shard_size=limit)
    twin.save_pretrained(tmp_path / "theirs")
    assert_saved_alike(tmp_path / "ours", tmp_path / "theirs")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(twin.named_parameters()))


def test_a_head_trained_beside_the_store_is_saved(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    model, twin = offloaded(tiny_models.build("llama", torch.float32)), tiny_models.build("llama", torch.float32)
    for one in (model, twin):
        torch.manual_seed(1)
        one.lm_head = nn.Linear(tiny_models.WIDE, tiny_models.VOCABULARY, bias=False)
        tiny_models.step(one, memascend.AdamW(one.parameters(), lr=1e-2), "llama", 0)
    memascend.save_pretrained(model, tmp_path / "ours")
    twin.save_pretrained(tmp_path / "theirs")
    assert_saved_alike(tmp_path / "ours", tmp_path / "theirs")


PARTS = {
    "the model without its head": lambda model: model.model,
    "a list of layers": lambda model: model.model.layers,
    "one layer": lambda model: model.model.layers[1],
    "the head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("of", PARTS)
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_part_of_an_offloaded_model_is_saved_under_its_own_names(
    tmp_path: Path, offloaded: Callable[..., nn.Module], architecture: str, of: str
) -> None:
    model, twin = offloaded(tiny_models.build(architecture)), tiny_models.build(architecture)
    for one in (model, twin):
        tiny_models.step(one, memascend.AdamW(one.parameters(), lr=1e-2), architecture, 0)
    part, other = PARTS[of](model), PARTS[of](twin)
    memascend.save_pretrained(part, tmp_path / "ours", max_shard_size="300KB")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(part)), dict(other.named_parameters()))
    if hasattr(other, "save_pretrained"):
        other.save_pretrained(tmp_path / "theirs")
        assert_saved_alike(tmp_path / "ours", tmp_path / "theirs")
    else:
        tiny_models.assert_same_weights(tensors_in(tmp_path / "ours"), other.state_dict())


def test_the_least_budget_saves_a_part(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    twin = tiny_models.build("llama")
    model = offloaded(tiny_models.build("llama"), host_memory=tiny_models.smallest_budget(twin))
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(3))
    memascend.save_pretrained(model.model, tmp_path / "ours")
    saved = tensors_in(tmp_path / "ours")
    assert torch.equal(saved.pop("layers.0.mlp.up_proj.bias"), torch.ones(3))
    tiny_models.assert_same_weights(saved, dict(twin.model.named_parameters()))


def test_a_closed_model_has_no_parts(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))
    memascend.close(model)
    for part in (model, model.model, model.lm_head):
        with pytest.raises(memascend.MemascendError, match="the model was closed"):
            memascend.save_pretrained(part, tmp_path / "out")
        with pytest.raises(memascend.MemascendError, match="the model was closed"):
            next(memascend.parameters_of(part))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["offloaded", "in memory", "converted"])
@pytest.mark.parametrize("there", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_model_that_is_there_is_not_overwritten_unasked(
    tmp_path: Path, offloaded: Callable[..., nn.Module], kind: str, there: str
) -> None:
    model = tiny_models.build("llama") if kind == "in memory" else offloaded(tiny_models.build("llama"))
    out = tmp_path / "out"
    out.mkdir()
    (out / there).write_bytes(b"precious")
    (out / "tokenizer.json").write_text("beside it")
    dtype = "float32" if kind == "converted" else None
    with pytest.raises(OSError, match=f"{there} exists: give another directory, or overwrite=True"):
        memascend.save_pretrained(model, out, dtype)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        there: b"precious",
        "tokenizer.json": b"beside it",
    }
    memascend.save_pretrained(model, out, dtype, overwrite=True)
    assert type(model).from_pretrained(out).lm_head.weight.shape == model.lm_head.weight.shape
    # The model's own method replaces earlier files, as it does in transformers.
    model.save_pretrained(out)


def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))
    out = tmp_path / "out"
    (tmp_path / "out").mkdir()
    (out / "tokenizer.json").write_text("mine")
    for limit, files in (("500KB", None), ("5GB", ["model.safetensors"]), ("500KB", None), ("1MB", None)):
        memascend.save_pretrained(model, out, max_shard_size=limit, overwrite=True)
        found = sorted(file.name for file in out.glob("*.safetensors"))
        index = out / "model.safetensors.index.json"
        assert index.exists() == (files is None)
        named = set(json.loads(index.read_text())["weight_map"].values()) if files is None else set(files)
        assert found == sorted(named)
        tiny_models.assert_same_weights(tensors_in(out), dict(tiny_models.build("llama").named_parameters()))
    assert (out / "tokenizer.json").read_text() == "mine"


def test_what_is_saved_survives_a_power_failure(
    tmp_path: Path, offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may close the model next, which removes its store."""
    model, out = offloaded(tiny_models.build("llama")), tmp_path / "new" / "out"
    operations = flushes.recorded(monkeypatch)
    memascend.save_pretrained(model, out, max_shard_size="500KB")
    flushed = flushes.flushed(operations)
    files = [str(file) for file in out.iterdir()]
    assert len(files) > 4 and all(file in flushed or file + ".tmp" in flushed for file in files), (files, flushed)
    last = max(at for at, (what, _) in enumerate(operations) if what == "rename")
    assert {str(out), str(out.parent), str(tmp_path)} <= flushes.flushed(operations[last:])


# ---- in the place of transformers' save_pretrained ------------------------------------------------------------------


def test_it_takes_the_place_of_save_pretrained_of_transformers(
    tmp_path: Path, offloaded: Callable[..., nn.Module]
) -> None:
    twin = tiny_models.build("llama")
    model: Any = offloaded(tiny_models.build("llama"))
    assert saver_of(model.model.layers[0]) is None and saver_of(tiny_models.Plain()) is None
    for name, part, other in (("whole", model, twin), ("part", model.model, twin.model)):
        save = saver_of(part)
        assert save is not None
        # As Trainer and the examples of accelerate call it.
        save(tmp_path / name, state_dict=None, is_main_process=True, safe_serialization=True, save_function=torch.save)
        other.save_pretrained(tmp_path / f"{name} in memory")
        assert_saved_alike(tmp_path / name, tmp_path / f"{name} in memory")
        save(str(tmp_path / f"{name} in shards"), max_shard_size="500KB", token=None)
        assert len(list((tmp_path / f"{name} in shards").glob("*.safetensors"))) > 1
        save(tmp_path / "another process", False)
    assert not (tmp_path / "another process").exists()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("state_dict", {}, "change them in the model"),
        ("push_to_hub", True, "upload"),
        ("variant", "fp16", "rename"),
        ("save_original_format", False, "original"),
        ("distributed_checkpoint", True, "save_distributed"),
        ("safe_serialization", False, "safetensors"),
        ("repo_id", "mine", "leave it out"),
    ],
)
def test_options_that_cannot_be_followed_are_refused_by_name(
    tmp_path: Path, offloaded: Callable[..., nn.Module], option: str, value: Any, says: str
) -> None:
    save = saver_of(offloaded(tiny_models.build("llama")))
    assert save is not None
    with pytest.raises(ValueError, match=f"{option}=.*{says}"):
        save(tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists()


def test_a_state_dict_is_followed_if_it_is_the_models_own(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    model: Any = offloaded(tiny_models.build("llama"))
    model.save_pretrained(tmp_path / "own", state_dict=model.state_dict())
    tiny_models.assert_same_weights(tensors_in(tmp_path / "own"), dict(tiny_models.build("llama").named_parameters()))
    state = model.state_dict()
    swapped = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    copied = {**state, "model.norm.weight": state["model.norm.weight"].clone()}
    for other in (swapped, copied, dict(list(state.items())[1:])):
        with pytest.raises(ValueError, match=r"state_dict=<dict>: .* change them in the model"):
            model.save_pretrained(tmp_path / "other", state_dict=other)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
@pytest.mark.parametrize("by", ["PEFT", "transformers"])
def test_adapters_on_the_store_are_saved_as_in_memory(
    tmp_path: Path, offloaded: Callable[..., nn.Module], by: str
) -> None:
    peft = requirements.package("peft")
    if by == "transformers":
        requirements.adapters_of_transformers()

    def adapted() -> nn.Module:
        torch.manual_seed(5)
        model: Any = tiny_models.build("llama")
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        if by == "PEFT":
            model = peft.get_peft_model(model, config)
        else:
            model.add_adapter(config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        return model

    model: Any = offloaded(adapted())
    twin: Any = adapted()
    save = saver_of(model)
    assert save is not None
    options = {"save_embedding_layers": True} if by == "PEFT" else {}
    for number, chosen in enumerate(({}, options)):
        save(tmp_path / f"ours{number}", **chosen)
        twin.save_pretrained(tmp_path / f"theirs{number}", **chosen)
        saved = tensors_in(tmp_path / f"theirs{number}")
        assert len(saved) == 12 + 2 * len(chosen)
        tiny_models.assert_same_weights(tensors_in(tmp_path / f"ours{number}"), saved)
    memascend.save_pretrained(model, tmp_path / "again")
    tiny_models.assert_same_weights(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "theirs0"))


# ---- buffers --------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Parameters, and buffers of several dtypes: BatchNorm's, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.tensor([[True, False]]).t())


def test_buffers_on_a_device_are_saved(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    # PyTorch's own second device that needs no hardware; like CUDA it refuses numpy().
    lazy = pytest.importorskip("torch._lazy.ts_backend")
    lazy.init()
    model = offloaded(Normed())
    with torch.no_grad():
        model.norm.running_mean.fill_(0.5)
        model.norm.num_batches_tracked.fill_(7)
    expected = {name: value.clone() for name, value in model.named_buffers() if name != "passing"}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to("lazy")
    memascend.save_pretrained(model, tmp_path / "out")
    saved = tensors_in(tmp_path / "out")
    assert {name: saved[name].tolist() for name in expected} == {n: value.tolist() for n, value in expected.items()}
    assert saved.keys() == {"first.weight", "first.bias", "norm.weight", "norm.bias", *expected}
    assert saved["norm.num_batches_tracked"].dtype == torch.int64
