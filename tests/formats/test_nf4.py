"""`memascend export --format nf4`: directories of bitsandbytes' NF4, and adapters that are trained over them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import quantised_models as models
import requirements
import small_mixtures
import tiny_models
import torch
from commands import words_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import memascend
from memascend.cli import main
from memascend.errors import CheckpointError
from memascend.formats import nf4
from memascend.formats.safetensors import SafetensorsReader

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

_STATE = ".quant_state.bitsandbytes__nf4"


def tensors_of(directory: Path) -> dict[str, Any]:
    """Return the tensors in all files of a directory; the descriptions of quantised ones as values."""
    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= models.load_file(file)
    return {name: json.loads(bytes(value)) if name.endswith(_STATE) else value for name, value in tensors.items()}


def by_bitsandbytes(value: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise a tensor in rows of whole blocks: AVX-512 dequantises others with other scales."""
    functional = requirements.package("bitsandbytes").functional
    packed, state = functional.quantize_4bit(value.reshape(-1, 64), compress_statistics=True, quant_type="nf4")
    return functional.dequantize_4bit(packed, state).view(value.shape)


@pytest.mark.parametrize("kind", ["one file", "several files", "float32"])
def test_tensors_are_those_that_bitsandbytes_saves(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements.package("bitsandbytes")
    theirs = models.bitsandbytes(
        tmp_path / "theirs", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    # Values that bfloat16 has.
    model = models.llama().float() if kind == "float32" else models.llama()
    model.save_pretrained(tmp_path / "plain", max_shard_size="200KB" if kind == "several files" else "1GB")
    monkeypatch.setattr(nf4, "PIECE_ELEMENTS", 4096)  # Some pieces a tensor.
    nf4.write_nf4(tmp_path / "plain", tmp_path / "ours")
    ours, wanted = tensors_of(tmp_path / "ours"), tensors_of(theirs)
    assert ours.keys() == wanted.keys() and any(name.endswith(_STATE) for name in ours)
    for name, value in wanted.items():
        assert ours[name] == value if name.endswith(_STATE) else torch.equal(ours[name], value), name
    # transformers takes the directory, and so do runs.
    loaded = dict(models.dequantised_by_transformers(tmp_path / "ours").named_parameters())
    base = memascend.from_pretrained(
        tmp_path / "ours", store=tmp_path / "store", host_memory="64MiB", frozen="files", dequantize=True
    )
    assert all(torch.equal(value, loaded[name]) for name, value in memascend.parameters_of(base))
    memascend.close(base)
    assert (kind == "several files") == (tmp_path / "ours" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_quantised_as_the_files_have_them(architecture: str, tmp_path: Path) -> None:
    """Those that lie singly are so by themselves, and gathered as they are read; fused ones are as a whole."""
    model = small_mixtures.build(architecture)
    model.save_pretrained(tmp_path / "plain")
    nf4.write_nf4(tmp_path / "plain", tmp_path / "base")
    written = tensors_of(tmp_path / "base")
    quantised = [name.removesuffix(_STATE) for name in written if name.endswith(_STATE)]
    assert any("experts" in name for name in quantised)
    assert not any("mlp.gate." in name or "router" in name or "embed" in name for name in quantised)
    plain = tensors_of(tmp_path / "plain")
    # The same directory with the values that bitsandbytes makes of its tensors.
    for name in quantised:
        plain[name] = by_bitsandbytes(plain[name])
    save_file(plain, tmp_path / "plain" / models.WEIGHTS, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    wanted = dict(loaded.named_parameters())
    where: dict[str, Any] = {"store": tmp_path / "store", "host_memory": "64MiB", "dequantize": True}
    base = memascend.from_pretrained(tmp_path / "base", frozen="files", **where)
    found = {name: value.detach().clone() for name, value in memascend.parameters_of(base)}
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert memascend.stats(base)["ssd_bytes_written"] == 0
    memascend.close(base)


def test_runs_over_it_have_the_adapters_of_base_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is quantised once, and each run reads it in place."""
    plain = tiny_models.llama_directory(tmp_path, hidden=128, layers=2)
    base = plain.parent / "base"
    assert main.main(["export", str(plain), "--format", "nf4", "--out", str(base)]) == 0, capfd.readouterr().err
    assert "--dequantize --lora-rank" in capfd.readouterr().out
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in base.iterdir()}
    assert {file.name for file in base.iterdir()} >= {file.name for file in plain.iterdir()}
    for model_dir, out, flags in ((plain, "each", ["--base-bits", "4"]), (base, "once", ["--dequantize"])):
        words = words_of(model_dir, tmp_path / out, tmp_path / f"store-{out}", lora_rank=4, lr=1e-2)
        assert main.main([*words, *flags]) == 0, capfd.readouterr().err
    each, once = (models.load_file(tmp_path / out / "adapter_model.safetensors") for out in ("each", "once"))
    assert each.keys() == once.keys() and all(each[name].equal(once[name]) for name in each)
    assert before == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in base.iterdir()}


def test_what_cannot_be_written_so_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models.llama().save_pretrained(tmp_path / "plain")
    models.fp8(tmp_path / "fp8", models.llama())
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=96)).save_pretrained(tmp_path / "gpt2")
    infinite: nn.Module = models.llama()
    infinite.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    infinite.save_pretrained(tmp_path / "infinite")
    for source, flags, told in (
        ("fp8", (), "holds weights in FP8 with a scale for blocks of 64x64 (quant_method 'fp8') already"),
        ("gpt2", (), "GPT2LMHeadModel has no linear weights in repeated layers"),
        ("infinite", (), "layers.0.mlp.up_proj.weight in "),
        ("plain", ("--dtype", "float16"), "leave --dtype out"),
        ("nothing", (), "nothing"),
    ):
        words = ["export", str(tmp_path / source), "--format", "nf4", "--out", str(tmp_path / "out"), *flags]
        assert main.main(words) == main.BAD_INPUT
        assert told in capfd.readouterr().err
        assert not (tmp_path / "out").exists()


def test_tensors_that_are_converted_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.llama().save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(nf4.Sources, "stored_as", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"could not be read from there: use --base-bits 4"):
        nf4.write_nf4(tmp_path / "plain", tmp_path / "out")


def test_the_memory_does_not_depend_on_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.llama().save_pretrained(tmp_path / "plain")
    sizes: list[int] = []
    read = SafetensorsReader.read_into

    def counted(self: SafetensorsReader, name: str, target: torch.Tensor, first: int = 0) -> None:
        sizes.append(target.numel())
        read(self, name, target, first)

    monkeypatch.setattr(SafetensorsReader, "read_into", counted)
    monkeypatch.setattr(nf4, "PIECE_ELEMENTS", 512)
    nf4.write_nf4(tmp_path / "plain", tmp_path / "out")
    assert sizes and max(sizes) <= 512
