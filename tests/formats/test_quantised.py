"""Quantised directories: weights have the bits of the forms' libraries; other forms are refused by name."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import quantised_models as models
import requirements
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import memascend
from memascend._memascend import FILE_WINDOW_BYTES, FILE_WINDOWS
from memascend.errors import CheckpointError, MemascendError
from memascend.formats.config import load_bare_config, load_config
from memascend.formats.quantised import forms, tensors
from memascend.formats.transformers_models import Conversion
from memascend.formats.weight_files import WeightFiles, weights_dtype
from memascend.layout import tables
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Open a model directory with its parameters on SSD."""
    models: list[nn.Module] = []

    def from_pretrained(path: Path, **options: Any) -> nn.Module:
        defaults: dict[str, Any] = {
            "store": tmp_path / f"store{len(models)}",
            "host_memory": "64MiB",
            "allocator": "pageable",
            "dequantize": True,
        }
        models.append(memascend.from_pretrained(path, **defaults | options))
        return models[-1]

    yield from_pretrained
    for model in models:
        memascend.close(model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in memascend.parameters_of(model)}


def assert_same_weights(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    ours = weights_of(model)
    assert ours.keys() == wanted.keys()
    differing = [name for name in wanted if not torch.equal(ours[name], wanted[name])]
    assert not differing, f"weights differ: {differing[:5]} ({len(differing)} in all)"


@pytest.mark.parametrize(
    "kind",
    [
        *models.FORMS,
    ],
)
def test_weights_are_those_of_the_library(
    kind: str, tmp_path: Path, opened: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, wanted = models.made(kind, tmp_path / "model")
    monkeypatch.setattr(tensors, "PIECE_ELEMENTS", 700)  # some rows, and never a whole matrix
    monkeypatch.delattr(Conversion, "convert")  # which would need a layer's experts in memory twice
    model = opened(directory)
    assert_same_weights(model, wanted)
    assert not hasattr(model.config, "quantization_config")
    assert weights_dtype(directory) == torch.bfloat16


def test_a_form_is_read_in_other_dtypes(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    """In float32 a product of FP8 and its scale is not rounded."""
    directory = models.fp8(tmp_path / "model", models.llama())
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(directory / models.WEIGHTS)
    scales = stored[f"{name}_scale_inv"].repeat_interleave(64, 0).repeat_interleave(64, 1)
    value = weights_of(opened(directory, dtype="float32"))[name]
    assert torch.equal(value, stored[name].float() * scales)
    assert not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("block", [128, 80])
def test_blocks_at_the_end_of_a_tensor_are_smaller(
    block: int, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    """192 rows are a block of 128 and one of 64. transformers takes two of 96, and refuses 80, 80 and 32."""
    model = models.llama()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ours = weights_of(opened(models.fp8(tmp_path / "model", model, block)))
    name = "model.layers.1.mlp.gate_proj.weight"
    codes, grid = models.to_blocks(weights[name], block, block)
    scales = grid.repeat_interleave(block, 0)[:192].repeat_interleave(block, 1)[:, :128]
    assert torch.equal(ours[name], (codes.float() * scales).bfloat16())


def test_scales_and_weights_of_a_byte_are_those_of_transformers(tmp_path: Path) -> None:
    """Scales of MXFP8 are exponents, and DeepSeek-V4's experts have two numbers in a byte."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(3, 40, 64, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 140, (3, 40, 2), generator=generator, dtype=torch.uint8)
    packed = torch.randint(-128, 128, (40, 32), generator=generator, dtype=torch.int8)
    pairs = {
        "experts.gate_up_proj": (codes, "experts.gate_up_proj_scale_inv", exponents),
        "a.weight": (codes[0], "a.scale", exponents[0].view(torch.float8_e8m0fnu)),
        "b.weight": (packed, "b.qscale_weight", exponents[1].view(torch.float8_e8m0fnu)),
        "c.weight": (codes[1], "c.weight_scale_inv", torch.tensor(0.3)),
    }
    stored = {name: weight for name, (weight, _, _) in pairs.items()}
    stored |= {key: scales for _, key, scales in pairs.values()}
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / models.WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp8"}}))
    with closing(WeightFiles(tmp_path)) as files:
        assert files.where.keys() == pairs.keys()
        for name, (weight, _, scales) in pairs.items():
            ours = torch.empty(files.where[name].entries[name].shape, dtype=torch.bfloat16)
            files.where[name].read_into(name, ours)
            assert torch.equal(ours, Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)), name


@pytest.mark.parametrize("kind", ["fp8-experts", "mxfp4", "awq"])
def test_any_part_of_a_tensor_can_be_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks read their shares, and tables are read by rows."""
    directory, _ = models.made(kind, tmp_path / "model")
    monkeypatch.setattr(tensors, "PIECE_ELEMENTS", 500)
    draw = random.Random(5)
    with closing(WeightFiles(directory)) as files:
        assert files.quantised is not None
        for name, entry in list(files.quantised.entries.items())[::3]:
            whole = torch.empty(entry.shape, dtype=torch.bfloat16)
            files.where[name].read_into(name, whole)
            for _ in range(4):
                first = draw.randrange(whole.numel())
                part = torch.empty(draw.randint(1, whole.numel() - first), dtype=torch.bfloat16)
                files.where[name].read_into(name, part, first)
                assert torch.equal(part, whole.view(-1)[first : first + part.numel()]), (name, first, part.numel())


# ---- training -------------------------------------------------------------------------------------------------


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("kind", ["fp8-experts", "mxfp4"])
def test_training_is_that_of_the_dequantised_model_in_memory(
    kind: str, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    directory, _ = models.made(kind, tmp_path / "model")
    config = Mxfp4Config(dequantize=True) if kind == "mxfp4" else FineGrainedFP8Config(dequantize=True)
    theirs = models.dequantised_by_transformers(directory, config)
    ours = opened(directory, durability="step", keep_store=True, fused_loss=False)
    wanted = losses_of(theirs, memascend.AdamW(theirs.parameters(), lr=1e-3))
    before = losses_of(ours, memascend.AdamW(ours.parameters(), lr=1e-3), steps=3)
    assert torch.equal(torch.stack(before), torch.stack(wanted))
    memascend.close(ours)
    # The store holds no trace of the form: the run goes on without the directory.
    shutil.rmtree(directory)
    resumed = memascend.resume(tmp_path / "store0", allocator="pageable")
    assert_same_weights(resumed.model, dict(theirs.named_parameters()))
    out = tmp_path / "out"
    memascend.save_pretrained(resumed.model, out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    memascend.close(resumed.model)


@pytest.mark.parametrize(
    "kind",
    [
        *models.FORMS,
        *(f"gptq-{bits}-in-order" for bits in (2, 4, 8)),
    ],
)
def test_weights_read_in_place_are_those_of_the_library(
    kind: str, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    """They stay as they are published: each use reads them so, and dequantises them."""
    directory, wanted = models.made(kind, tmp_path / "model")
    file = directory / models.WEIGHTS
    before = file.read_bytes()
    model = opened(directory, frozen="files")
    assert_same_weights(model, wanted)
    in_16_bits = sum(value.nbytes for value in wanted.values())
    stats = memascend.stats(model)
    read = stats["file_bytes_read"]
    assert 0.9 * len(before) - 2**16 < read < len(before) and read < 0.75 * in_16_bits
    assert stats["ssd_bytes_written"] == stats["store_bytes_used"] == 0 and file.read_bytes() == before


def test_many_pieces_of_many_blocks_are_read_in_place(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    """Matrices of several pieces, in FP8 with blocks that end in another piece, and one scale for all of another."""
    model = models.llama(hidden_size=1152, intermediate_size=1500, num_hidden_layers=1)
    directory = models.fp8(tmp_path / "model", model, block=96)
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = load_file(directory / models.WEIGHTS)
    tensors[f"{name}_scale_inv"] = torch.tensor(0.0123)
    # Qwen's scales are in bfloat16, MXFP8's powers of two.
    for other, change in (("up_proj", torch.Tensor.bfloat16), ("down_proj", lambda grid: (grid * 1e6).byte())):
        scales = f"model.layers.0.mlp.{other}.weight_scale_inv"
        tensors[scales] = change(tensors[scales])
    save_file(tensors, directory / models.WEIGHTS, metadata={"format": "pt"})
    assert tensors[name].numel() > 3 * 2**19
    assert_same_weights(opened(directory, frozen="files"), weights_of(opened(directory, frozen="store")))


def test_the_plan_has_the_zeros_and_scales_of_columns_in_any_order(
    tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    """They are in memory while a matrix is read, beside the window of each thread."""
    beside = {}
    for kind in ("gptq-4", "gptq-4-in-order"):
        directory, _ = models.made(kind, tmp_path / kind)
        stored = load_file(directory / models.WEIGHTS)
        modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
        largest = max(
            # Zeros of four bits take a byte each.
            2 * stored[f"{module}.qzeros"].nbytes
            + sum(stored[f"{module}.{part}"].nbytes for part in ("scales", "g_idx"))
            for module in modules
        )
        windows = offload_of(opened(directory, frozen="files")).plan.windows
        assert windows.count == FILE_WINDOWS
        beside[kind] = (windows.nbytes - FILE_WINDOW_BYTES, largest)
    assert beside["gptq-4"][0] == beside["gptq-4"][1] and beside["gptq-4-in-order"][0] == 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, "float32") for kind in ("fp8", "gptq-4", "compressed:int4-zeros", "compressed:int8-zeros")],
)
def test_other_dtypes_are_not_read_in_place(
    kind: str, dtype: str, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    directory, _ = models.made(kind, tmp_path / "model")
    for options in ({"frozen": "files"}, {"frozen": "store", "frozen_bits": "published"}):
        with pytest.raises(CheckpointError, match=rf"is quantised \(.*not read from there as {dtype}: use frozen='st"):
            opened(directory, dtype=dtype, **options)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
@pytest.mark.parametrize("frozen", ["store", "files", "published"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "bitsandbytes:nf4"])
def test_adapters_train_on_a_quantised_base(
    kind: str, frozen: str, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    peft = requirements.package("peft")
    directory, wanted = models.made(kind, tmp_path / "model")
    theirs = models.gpt_oss() if kind == "mxfp4" else models.llama()
    for name, value in wanted.items():
        theirs.get_parameter(name).data.copy_(value)
    losses, adapters = [], []
    where = {"frozen": "store", "frozen_bits": "published"} if frozen == "published" else {"frozen": frozen}
    ours = opened(directory, fused_loss=False, **where)
    for base in (theirs, ours):
        torch.manual_seed(3)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses.append(torch.stack(losses_of(model, torch.optim.AdamW(trained, lr=1e-2))))
        adapters.append([parameter.detach().clone() for parameter in trained])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *adapters)) and len(adapters[0]) > 0


def test_layers_stay_as_they_are_published_beside_the_store(tmp_path: Path, opened: Callable[..., nn.Module]) -> None:
    """Layers are read from the files, the tables of tokens from the store."""
    directory, wanted = models.made("mxfp4", tmp_path / "model")
    model = opened(directory, frozen="store", frozen_bits="published")
    assert_same_weights(model, wanted)
    layers, rest = {}, 0
    for name, value in wanted.items():
        layers[name] = value.nbytes if ".layers." in name else 0
        rest += value.nbytes if ".layers." not in name else 0
    for name, packed in load_file(directory / models.WEIGHTS).items():
        if name.endswith("_blocks"):
            scales = packed.numel() // 16
            layers[name.removesuffix("_blocks")] = packed.nbytes + scales
    stats, session = memascend.stats(model), offload_of(model)
    assert stats["file_bytes_read"] == sum(layers.values())
    assert sum(unit.stored_nbytes for unit in session.units if unit.published) == sum(layers.values())
    assert rest <= stats["ssd_bytes_written"] < rest + 2**16
    with pytest.raises(MemascendError, match=r"as it is published .*use frozen='store' without frozen_bits"):
        memascend.AdamW(model.model.layers[0].requires_grad_(True).parameters())


def test_a_quantised_table_lies_in_the_store(
    tmp_path: Path, opened: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read by blocks, from the store alone."""
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 1 << 18)
    directory = models.fp8(tmp_path / "model", models.llama(vocab_size=2048))
    tensors = load_file(directory / models.WEIGHTS)
    codes, grid = models.to_blocks(tensors["lm_head.weight"], 64, 64)
    save_file(tensors | {"lm_head.weight": codes, "lm_head.weight_scale_inv": grid}, directory / models.WEIGHTS)
    published = opened(directory, frozen="store", frozen_bits="published")
    assert_same_weights(published, weights_of(opened(directory, frozen="store")))
    (head,) = (unit for unit in offload_of(published).units if unit.is_head)
    assert head.in_store and any(unit.published for unit in offload_of(published).units)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"frozen": None}, "'published' keeps frozen weights as they are published, not those which are trained"),
        ({"durability": "step"}, "leave out durability and keep_store, or frozen_bits"),
        ({"experts": "pieces"}, "does not work yet with experts='pieces'"),
        ({}, "no layers whose weights are quantised, which stay as they are published with frozen_bits='published'"),
    ],
)
def test_what_cannot_stay_as_published_is_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path / "model")
    given = {"store": tmp_path / "store", "host_memory": "64MiB", "frozen": "store", "frozen_bits": "published"}
    with pytest.raises((ValueError, CheckpointError), match=told):
        memascend.from_pretrained(tmp_path / "model", dequantize=True, **given | options)
    assert not (tmp_path / "store").exists()


# ---- refusals -------------------------------------------------------------------------------------------------


def described(directory: Path, **method: Any) -> Path:
    """Make a model directory whose configuration names a method, without weights in its form."""
    models.llama().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": method}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


#: An entry of a configuration -> the text in the refusal.
_READ: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8 with a scale for blocks of 128x128"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "FP8 with a scale per tensor"),
    ({"quant_method": "mxfp8"}, "MXFP8"),
    ({"quant_method": "mxfp4"}, "MXFP4"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes NF4"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes FP4"),
    ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "AWQ in 4 bits, GEMM"),
    ({"quant_method": "gptq", "bits": 8}, "GPTQ in 8 bits"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors' packed integers"),
]
_NOT_READ: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": method}, name) for method, name in forms.NOT_READ.items()),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in 4 bits, GEMV"),
    ({"quant_method": "gptq", "bits": 3}, "GPTQ in 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in 4 bits, marlin"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors' marlin-24"),
    (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "sparsity_config": {"format": "sparse-24"}},
        "compressed-tensors' int8 with sparsity",
    ),
    ({"quant_method": "of tomorrow"}, "a quantised form (quant_method 'of tomorrow')"),
]


def test_every_refusal_names_the_form_and_the_way_out(tmp_path: Path) -> None:
    directory = described(tmp_path / "model")
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    open_ = partial(memascend.from_pretrained, directory, store=tmp_path / "store", host_memory="64MiB")
    for method, name in [*_READ, *_NOT_READ]:
        config_file.write_text(json.dumps(config | {"quantization_config": method}))
        is_read = (method, name) in _READ
        refusing: list[Callable[[], Any]] = [open_, partial(load_config, directory)]
        if not is_read:
            refusing += [partial(open_, dequantize=True), partial(load_config, directory, dequantize=True)]
            refusing += [partial(load_bare_config, path) for path in (directory, config_file)]
        for refused in refusing:
            with pytest.raises(CheckpointError) as caught:
                refused()
            message = str(caught.value)
            assert name in message and str(directory) in message, message
            assert ("dequantize=True (--dequantize)" if is_read else "checkpoint in 16 bits") in message, message
        if is_read:
            for path in (directory, config_file):
                assert not hasattr(load_bare_config(path), "quantization_config")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", sorted(forms.DESCRIPTIONS))
def test_files_of_older_tools_describe_a_form_too(name: str, tmp_path: Path) -> None:
    directory = described(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / name).write_text(json.dumps({"bits": 4, "w_bit": 4}))
    with pytest.raises(CheckpointError, match=r"GPTQ in 4 bits|AWQ in 4 bits|ModelOpt"):
        load_config(directory)


def test_tensors_of_a_form_that_nothing_describes_are_named(tmp_path: Path) -> None:
    directory = models.awq(tmp_path / "model", {})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"lacks weights .* quantised \(AWQ or GPTQ\), and no quantization_config"
    ):
        memascend.from_pretrained(directory, store=tmp_path / "store", host_memory="64MiB", dequantize=True)


def test_numbers_of_a_byte_are_not_taken_for_weights(tmp_path: Path) -> None:
    """FP8 is floating point; without its scales it would be other weights."""
    directory = models.fp8(tmp_path / "model", models.llama())
    config = json.loads((directory / "config.json").read_text())
    for form, wanted in (
        (None, "no quantization_config"),
        ({"quant_method": "mxfp4"}, r"MXFP4 \(quant_method 'mxfp4'\) has no such tensor"),
    ):
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
        with pytest.raises(CheckpointError, match=rf"float8_e4m3fn, as in a quantised checkpoint, and {wanted}"):
            memascend.from_pretrained(directory, store=tmp_path / "store", host_memory="64MiB", dequantize=True)


def test_tensors_that_do_not_fit_their_form_are_named(tmp_path: Path) -> None:
    directory = models.fp8(tmp_path / "model", models.llama())
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(directory / models.WEIGHTS)
    for change, wanted in (
        ({f"{name}_scale_inv": torch.ones(5, 3)}, "fits no blocks"),
        ({f"{name}_scale_inv": torch.ones(3, 2, 2)}, "fits no blocks"),
        ({f"{name}_scale_inv": None}, "without scales"),
    ):
        tensors = {key: value for key, value in (whole | change).items() if value is not None}
        save_file(tensors, directory / models.WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=wanted) as caught:
            memascend.from_pretrained(directory, store=tmp_path / "store", host_memory="64MiB", dequantize=True)
        assert name in str(caught.value)


def test_a_quantised_model_in_memory_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    packed = torch.zeros(32, 1, dtype=torch.uint8)
    model[1].weight = nn.Parameter(packed, requires_grad=False)
    for given in (packed, packed.view(torch.float8_e4m3fn)):
        model[1].weight.data = given
        with pytest.raises(ValueError, match=r"1\.weight has dtype .* quantised weight.*dequantize=True"):
            memascend.offload(model, store=tmp_path / "store", host_memory="64MiB")


def test_the_page_on_forms_counts_them() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/quantised.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert f"Read are {len(rows)} forms" in page
    refused = " ".join(page.partition("Refused are ")[2].partition("```")[0].split())
    # Beside those by name: other packings of AWQ, of GPTQ and of compressed-tensors.
    assert refused.startswith(f"{len(forms.NOT_READ) + 3} forms")
    assert [name for name in forms.NOT_READ.values() if name not in refused] == []
