"""Tables of tokens with another number of rows: the bits of transformers' own resize, resumed and exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import memascend

if TYPE_CHECKING:
    from pathlib import Path

ROWS = tiny_models.SMALLEST_DECODER["vocab_size"]


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    if kind == "t5":
        config: Any = transformers.T5Config(
            vocab_size=ROWS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        model: Any = transformers.T5ForConditionalGeneration(config)
    elif kind == "phi":  # a bias of the head
        model = transformers.PhiForCausalLM(transformers.PhiConfig(**tiny_models.SMALLEST_DECODER))
        torch.nn.init.normal_(model.lm_head.bias)
    else:
        config = transformers.LlamaConfig(**tiny_models.SMALLEST_DECODER, tie_word_embeddings=kind == "tied")
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: str) -> Any:
    cls = AutoModelForSeq2SeqLM if "t5" in folder.name else AutoModelForCausalLM
    return cls.from_pretrained(folder, dtype=getattr(torch, dtype))


def opened(folder: Path, rows: int, dtype: str, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"store": folder.parent / "store", "host_memory": "64MiB", "allocator": "pageable"} | options
    return memascend.from_pretrained(folder, dtype=dtype, resize_token_embeddings=rows, **options)


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[ROWS + 3, 5, 6, 7, ROWS]])
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "rows"), [("tied", ROWS + 8), ("untied", ROWS + 4), ("t5", ROWS + 4), ("phi", ROWS + 5)]
)
def test_a_resized_model_trains_resumes_and_is_exported(tmp_path: Path, kind: str, rows: int, dtype: str) -> None:
    folder = saved(tmp_path / kind, kind)
    expected = loaded(folder, dtype).train()
    torch.manual_seed(3)
    expected.resize_token_embeddings(rows)
    random = torch.get_rng_state()
    model = opened(folder, rows, dtype, keep_store=True)
    assert model.config.get_text_config().vocab_size == rows == model.get_input_embeddings().weight.shape[0]
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    assert torch.equal(torch.get_rng_state(), random)
    for each in (expected, model):
        optimizer = memascend.AdamW(each.parameters(), lr=1e-2)
        torch.manual_seed(4)
        each(**batch(kind)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memascend.close(model)
    resumed = memascend.resume(tmp_path / "store", host_memory="64MiB", allocator="pageable")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(resumed.model)), dict(expected.named_parameters()))
    memascend.save_pretrained(resumed.model, tmp_path / f"out {kind}")
    memascend.close(resumed.model)
    again = loaded(tmp_path / f"out {kind}", dtype)
    tiny_models.assert_same_weights(dict(again.named_parameters()), dict(expected.named_parameters()))


@pytest.mark.parametrize("rows", [ROWS - 4, ROWS + 4])
def test_a_buffer_with_a_value_for_each_token(tmp_path: Path, rows: int) -> None:
    config = transformers.BartConfig(
        **{f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        **{"vocab_size": ROWS, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    )
    torch.manual_seed(0)
    model: Any = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    folder = tmp_path / "bart"
    model.save_pretrained(folder)
    expected = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    expected.resize_token_embeddings(rows)
    model = opened(folder, rows, "float32")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    assert torch.equal(model.final_logits_bias, expected.final_logits_bias)
    memascend.close(model)


def test_fewer_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "untied", "untied")
    expected = loaded(folder, "bfloat16")
    expected.resize_token_embeddings(40)
    model = opened(folder, 40, "bfloat16")
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    memascend.close(model)


def test_what_cannot_be_resized_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "untied", "untied")
    with pytest.raises(ValueError, match="resize_token_embeddings=0: a table has at least one row"):
        opened(folder, 0, "bfloat16")
    with pytest.raises(ValueError, match=r"cannot be had with frozen='files', where .*: resize the model .* once"):
        opened(folder, ROWS + 1, "float32", frozen="files")
    assert not (tmp_path / "store").exists()
