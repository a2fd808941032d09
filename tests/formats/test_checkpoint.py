"""Models in and out: transformers' files are read, transformers reads ours, and damage is reported."""

from __future__ import annotations

import io
import json
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import IBertConfig, IBertForMaskedLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WEIGHTS = "model.safetensors"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Open a model directory with its parameters on SSD."""
    models: list[nn.Module] = []

    def from_pretrained(path: Path, **options: Any) -> nn.Module:
        store = tmp_path / f"store{len(models)}"
        defaults: dict[str, Any] = {"store": store, "host_memory": "256MiB", "allocator": "pageable"}
        models.append(memascend.from_pretrained(path, **defaults | options))
        return models[-1]

    yield from_pretrained
    for model in models:
        memascend.close(model)


def saved(tmp_path: Path, architecture: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Let transformers save a tiny model; returns the directory."""
    directory = tmp_path / "saved"
    tiny_models.build(architecture, dtype).save_pretrained(directory, **options)
    return directory


def by_transformers(architecture: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model, info = type(tiny_models.build(architecture)).from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


def assert_equal_models(actual: nn.Module, expected: nn.Module, architecture: str) -> None:
    tiny_models.assert_same_weights(dict(memascend.parameters_of(actual)), dict(memascend.parameters_of(expected)))
    buffers = dict(expected.named_buffers())
    assert dict(actual.named_buffers()).keys() == buffers.keys()
    for name, buffer in actual.named_buffers():
        assert torch.equal(buffer, buffers[name]) and buffer.dtype == buffers[name].dtype, name
    assert torch.equal(tiny_models.logits(actual, architecture), tiny_models.logits(expected, architecture))
    assert torch.equal(tiny_models.generated(actual, architecture), tiny_models.generated(expected, architecture))


@pytest.mark.parametrize("architecture", tiny_models.HUGGING_FACE)
@pytest.mark.parametrize(
    ("on_disk", "dtype"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.float32, "bfloat16"),
        (torch.bfloat16, torch.float32),
        (torch.float16, "bf16"),
        (torch.float16, "float16"),
    ],
    ids=["bf16", "fp32", "fp32 as bf16", "bf16 as fp32", "fp16 as bf16", "fp16"],
)
def test_reads_what_transformers_writes(
    tmp_path: Path, opened: Callable[..., nn.Module], architecture: str, on_disk: torch.dtype, dtype: Any
) -> None:
    directory = saved(tmp_path, architecture, on_disk)
    model = opened(directory, dtype=dtype)
    kind = {"float32": torch.float32, torch.float32: torch.float32, "float16": torch.float16}.get(dtype, torch.bfloat16)
    assert_equal_models(model, by_transformers(architecture, directory, kind), architecture)


@pytest.mark.parametrize("architecture", tiny_models.HUGGING_FACE)
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_transformers_reads_what_is_written(
    tmp_path: Path, opened: Callable[..., nn.Module], architecture: str, shards: bool
) -> None:
    # Streamed in, trained (so that no file has the weights), streamed out.
    limit = {"max_shard_size": "500KB"} if shards else {}
    directory = saved(tmp_path, architecture, **limit)
    assert (directory / WEIGHTS).exists() != shards
    model = opened(directory)
    trace = tiny_models.train(model, architecture, steps=1)
    out = tmp_path / "out"
    memascend.save_pretrained(model, out, **limit)
    loaded = by_transformers(architecture, out)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(loaded)), trace.weights)
    assert torch.equal(tiny_models.logits(loaded, architecture), trace.logits[-1])
    assert (out / WEIGHTS).exists() != shards
    assert not list(out.glob("*.tmp"))
    # The very same tensors, names and dtypes as transformers writes for that model.
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    ours = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    tiny_models.assert_same_weights(ours, load_file(again / WEIGHTS))
    if shards:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(ours)
        assert set(index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
    # And round: memascend reads its own.
    assert_equal_models(opened(out), loaded, architecture)


@pytest.mark.parametrize("where", ["offloaded", "in memory"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "written"), [("bfloat16", "fp32"), ("float32", torch.bfloat16), ("float32", "float16")]
)
def test_writes_another_dtype(
    tmp_path: Path, offloaded: Callable[..., nn.Module], where: str, architecture: str, dtype: str, written: Any
) -> None:
    model = tiny_models.build(architecture, getattr(torch, dtype))
    kind = {"fp32": torch.float32, "float16": torch.float16}.get(written, torch.bfloat16)
    expected = {name: value.detach().to(kind) for name, value in model.named_parameters()}
    said = model.config.dtype
    if where == "offloaded":
        offloaded(model)
    memascend.save_pretrained(model, tmp_path / "out", written, max_shard_size="300KB")
    assert model.config.dtype == said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
    tiny_models.assert_same_weights(
        dict(by_transformers(architecture, tmp_path / "out", kind).named_parameters()), expected
    )
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    weights = [value for file in files.values() for value in file.values()]
    assert len(files) > 1 and all(value.dtype == kind for value in weights)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights)


def test_a_weight_beyond_float16(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    model = tiny_models.build("qwen3", torch.float32)
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    with torch.no_grad():
        weight[3, 4] = float("inf")
    offloaded(model)
    memascend.save_pretrained(model, tmp_path / "out", "float16")
    other = tiny_models.build("qwen3", torch.float32)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = 65_520.0
    offloaded(other, store=tmp_path / "other")
    with pytest.raises(memascend.CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has a weight beyond"):
        memascend.save_pretrained(other, tmp_path / "refused", "float16")
    assert not list((tmp_path / "refused").iterdir())
    with pytest.raises(ValueError, match="float8 is not supported"):
        memascend.save_pretrained(other, tmp_path / "refused", "float8")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gemma"])
def test_writes_a_model_that_was_offloaded_from_memory(
    tmp_path: Path, offloaded: Callable[..., nn.Module], architecture: str
) -> None:
    model = offloaded(tiny_models.build(architecture, torch.float32))
    memascend.save_pretrained(model, tmp_path / "out")
    saved(tmp_path, architecture, torch.float32)
    tiny_models.assert_same_weights(load_file(tmp_path / "out" / WEIGHTS), load_file(tmp_path / "saved" / WEIGHTS))
    loaded = by_transformers(architecture, tmp_path / "out", torch.float32)
    tiny_models.assert_same_weights(dict(memascend.parameters_of(loaded)), dict(memascend.parameters_of(model)))


def test_saving_applies_the_deferred_update(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    model, twin = opened(directory), by_transformers("llama", directory).train()
    for one in (model, twin):
        optimizer = memascend.AdamW(one.parameters(), lr=1e-2)
        one(**tiny_models.batch("llama", 0)).loss.backward()
        optimizer.step()
    memascend.save_pretrained(model, tmp_path / "out")
    memascend.save_pretrained(twin, tmp_path / "twin")
    tiny_models.assert_same_weights(load_file(tmp_path / "out" / WEIGHTS), load_file(tmp_path / "twin" / WEIGHTS))
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("architecture", ["llama", "t5", "qwen3_moe"])
def test_training_from_a_directory(tmp_path: Path, opened: Callable[..., nn.Module], architecture: str) -> None:
    directory = saved(tmp_path, architecture)
    expected = tiny_models.train(by_transformers(architecture, directory).train(), architecture)
    model = opened(directory).train()
    tiny_models.assert_same(tiny_models.train(model, architecture), expected)


def test_progress_and_the_smallest_budget(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    seen: list[tuple[int, int]] = []
    with pytest.raises(memascend.BudgetError) as caught:
        opened(directory, host_memory="1MiB", store=tmp_path / "s")
    assert not (tmp_path / "s").exists()
    model = opened(
        directory, host_memory=caught.value.smallest_bytes, progress=lambda done, total: seen.append((done, total))
    )
    assert len(seen) > 3 and seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 4 * 10**6
    assert_equal_models(model, by_transformers("llama", directory), "llama")


def test_other_floats_are_refused(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    for dtype in ("float64", torch.int8, "four"):
        with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
            opened(saved(tmp_path, "llama"), dtype=dtype)


# ---- directories of strangers -----------------------------------------------------------------------------------


DEEP = {
    "lists": "[" * 200_000 + "]" * 200_000,
    "objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "not very": "[" * 100 + "]" * 100,
}


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_json_nested_deeply(tmp_path: Path, opened: Callable[..., nn.Module], name: str, deep: str) -> None:
    directory = saved(tmp_path, "llama")
    file = directory / name
    if name == WEIGHTS:
        rewrite(file, lambda header: b'{"__metadata__":' + DEEP[deep].encode() + b"," + json.dumps(header).encode()[1:])
    else:
        if not file.exists():  # An index is read where there is no whole file.
            (directory / WEIGHTS).rename(directory / "part.safetensors")
        described = json.loads(file.read_text()) if file.exists() else {"weight_map": {"x": "part.safetensors"}}
        file.write_text(json.dumps(described)[:-1] + ',"more":' + DEEP[deep] + "}")
    if (name, deep) == (WEIGHTS, "not very"):
        opened(directory)  # of a header nothing but the tensors is used
    else:
        refused(opened, directory, file)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
        {"model_type": "clip", "architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "mine.Model"}},
    ],
    ids=["configuration", "model"],
)
def test_code_beside_a_model_is_not_run(
    tmp_path: Path, opened: Callable[..., nn.Module], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers asks on the terminal, and runs it when the answer is yes.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    directory = saved(tmp_path, "llama")
    (directory / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | changed))
    refused(opened, directory, directory, "memascend runs none")
    assert not (tmp_path / "ran").exists()


# ---- damage -------------------------------------------------------------------------------------------------


def refused(opened: Callable[..., nn.Module], directory: Path, names: Path | str, says: str = "") -> None:
    """Opening must fail with one clear message that names `names`, and leave no store and no open file."""
    store = directory.parent / "refused"
    with pytest.raises(memascend.CheckpointError) as caught:
        opened(directory, store=store)
    assert str(names) in str(caught.value), caught.value
    assert says in str(caught.value), caught.value
    assert "\n" not in str(caught.value)
    assert not store.exists()
    held = [link for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd)).startswith(str(directory))]
    assert not held


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


def test_not_a_model_directory(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    refused(opened, tmp_path / "absent", tmp_path / "absent", "does not exist")
    file = tmp_path / "file"
    file.write_text("x")
    refused(opened, file, file)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(opened, empty, empty, "config.json")
    for text in (
        "",
        "not json",
        "[]",
        "{}",
        '{"model_type": "of no library"}',
        '{"model_type": "llama", "hidden_size": "x"}',
    ):
        (empty / "config.json").write_text(text)
        refused(opened, empty, empty)


def test_missing_and_foreign_files(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    weights = directory / WEIGHTS
    whole = weights.read_bytes()
    weights.unlink()
    refused(opened, directory, directory, WEIGHTS)
    (directory / "pytorch_model.bin").write_bytes(b"")
    refused(opened, directory, "pytorch_model.bin", "another format")
    for content in (b"", b"abc", b"PK\x03\x04" + bytes(100), bytes(4096), b"\xff" * 4096, whole[:8]):
        weights.write_bytes(content)
        refused(opened, directory, weights)


def test_truncated_anywhere(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    weights = directory / WEIGHTS
    whole = weights.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (7, 8, 9, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        refused(opened, directory, weights)
    weights.write_bytes(whole)
    opened(directory)


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header of a safetensors file."""
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    new = change(header)
    text = new if isinstance(new, bytes) else json.dumps(header if new is None else new).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


NORM = "model.norm.weight"


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[NORM] |= values

    return change


def _shift(start: int, end: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        offsets = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [offsets[0] + start, offsets[1] + end]

    return change


def _drop(key: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        del header[NORM][key]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda header: b"[]",
        lambda header: b"null",
        lambda header: b"7",
        lambda header: b"{",
        lambda header: b"\xff\xfe{}",
        lambda header: b"",
        lambda header: header | {NORM: []},
        lambda header: header | {NORM: None},
        lambda header: header | {NORM: "x"},
        _drop("dtype"),
        _drop("shape"),
        _drop("data_offsets"),
        _set(dtype="F7"),
        _set(dtype=None),
        _set(dtype=["F32"]),
        _set(dtype="F32"),
        _set(dtype="I16"),
        _set(shape=[257]),
        _set(shape=[-256]),
        _set(shape=[16, 16]),
        _set(shape=[-16, -16]),
        _set(shape=[256.0]),
        _set(shape=["256"]),
        _set(shape="256"),
        _set(shape=None),
        _set(shape=[]),
        _set(shape=[1 << 62, 1 << 62]),
        _set(data_offsets=[0]),
        _set(data_offsets=[0, 256, 512]),
        _set(data_offsets=[0.0, 512.0]),
        _set(data_offsets=["0", "512"]),
        _set(data_offsets=[512, 0]),
        _set(data_offsets=[-512, 0]),
        _set(data_offsets=[1 << 60, (1 << 60) + 512]),
        _set(data_offsets=None),
        _shift(0, 2),
        _shift(-2, 0),
        _shift(1 << 40, 1 << 40),
    ],
)
def test_damaged_headers(tmp_path: Path, opened: Callable[..., nn.Module], change: Callable[..., Any]) -> None:
    directory = saved(tmp_path, "llama")
    rewrite(directory / WEIGHTS, change)
    refused(opened, directory, directory / WEIGHTS)


def test_wrong_weights(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    weights = directory / WEIGHTS
    tensors = load_file(weights)
    key = "model.layers.1.mlp.up_proj.weight"
    lacking = {name: value for name, value in tensors.items() if name != key}
    save_file(lacking, weights, metadata={"format": "pt"})
    refused(opened, directory, directory, key)
    save_file(lacking | {key: tensors[key][:-1].clone()}, weights, metadata={"format": "pt"})
    refused(opened, directory, weights, key)
    save_file(lacking | {key: tensors[key].t().contiguous()}, weights, metadata={"format": "pt"})
    refused(opened, directory, weights, key)
    save_file({"foreign": torch.ones(3)}, weights, metadata={"format": "pt"})
    refused(opened, directory, directory, "lacks")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_wrong_experts(tmp_path: Path, opened: Callable[..., nn.Module], architecture: str) -> None:
    # Experts are stored apart and stacked while they are read.
    directory = saved(tmp_path, architecture)
    weights = directory / WEIGHTS
    tensors = load_file(weights)
    key = next(name for name in sorted(tensors) if "experts.2." in name)
    lacking = {name: value for name, value in tensors.items() if name != key}
    save_file(lacking, weights, metadata={"format": "pt"})
    refused(opened, directory, directory)
    save_file(lacking | {key: tensors[key][:-1].clone()}, weights, metadata={"format": "pt"})
    refused(opened, directory, directory)


def test_quantised_checkpoints_are_refused(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    for architecture, key in (("llama", "up_proj"), ("mixtral", "experts.2.")):
        directory = saved(tmp_path, architecture)
        tensors = load_file(directory / WEIGHTS)
        name = next(name for name in tensors if key in name)
        tensors[name] = torch.ones(tensors[name].shape, dtype=torch.int8)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        refused(opened, directory, directory / WEIGHTS, "quantised")
        shutil.rmtree(directory)


def test_bytes_that_no_tensor_owns(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    weights = directory / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole + b"more")
    refused(opened, directory, weights, "follow")
    weights.write_bytes(whole)

    def overlap(header: dict[str, Any]) -> None:
        header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]

    rewrite(weights, overlap)
    refused(opened, directory, weights, "damaged")


def test_damaged_index(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama", max_shard_size="500KB")
    index = directory / "model.safetensors.index.json"
    text = index.read_text()
    for damaged in ("", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        index.write_text(damaged)
        refused(opened, directory, directory)
    index.write_text(text)
    gone = sorted(directory.glob("model-*.safetensors"))[1]
    gone.unlink()
    refused(opened, directory, gone, "missing")


def test_an_index_does_not_lead_out_of_the_directory(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    directory = saved(tmp_path, "llama")
    shutil.move(directory / WEIGHTS, tmp_path / "elsewhere.safetensors")
    names = {name: "../elsewhere.safetensors" for name in load_file(tmp_path / "elsewhere.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(opened, directory, directory)


def test_out_that_cannot_be_written_leaves_nothing_half_done(
    tmp_path: Path, offloaded: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offloaded(tiny_models.build("llama"))
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OSError, match=str(file)):
        memascend.save_pretrained(model, file)
    assert file.read_text() == "mine"

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memascend.formats.safetensors._write", broken)
    with pytest.raises(OSError, match="No space"):
        memascend.save_pretrained(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_plain_modules_have_no_checkpoint_format(tmp_path: Path, offloaded: Callable[..., nn.Module]) -> None:
    with pytest.raises(memascend.CheckpointError, match="parameters_of"):
        memascend.save_pretrained(tiny_models.build("plain"), tmp_path / "out")
    # Offloaded, its weights are written all the same, as safetensors.
    model = offloaded(tiny_models.build("plain"))
    memascend.save_pretrained(model, tmp_path / "out")
    tiny_models.assert_same_weights(load_file(tmp_path / "out" / WEIGHTS), dict(memascend.parameters_of(model)))


def test_buffers_made_from_weights(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    model = IBertForMaskedLM(IBertConfig(**sizes, num_hidden_layers=1, max_position_embeddings=32))
    shift = model.ibert.encoder.layer[0].intermediate.dense.weight_integer  # made as zeros like the weight
    shift.fill_(3)
    directory = tmp_path / "saved"
    model.save_pretrained(directory)
    loaded = opened(directory, dtype="float32")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(loaded)), dict(model.named_parameters()))
    tiny_models.assert_same_weights(dict(loaded.named_buffers()), dict(model.named_buffers()))
    tensors = load_file(directory / WEIGHTS)
    name = next(
        name for name, value in tensors.items() if name.endswith("weight_integer") and value.shape == shift.shape
    )
    del tensors[name]
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(memascend.CheckpointError, match=f"lacks the buffer {name}, which .* makes from its weights"):
        opened(directory, dtype="float32")
