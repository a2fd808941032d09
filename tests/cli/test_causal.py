"""Which model directories `memascend finetune` takes: those whose loss is of a next token that was not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

import memascend
from memascend.formats.config import load_bare_config, load_config
from memascend.formats.transformers_models import why_not_trained_causally

if TYPE_CHECKING:
    from pathlib import Path

SMALL = tiny_models.SMALLEST_DECODER
VOCABULARY = SMALL["vocab_size"]
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
XLM = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}
XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", SMALL | {"is_causal": False}),
    ("qwen2", SMALL),
    ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("gpt_neox", SMALL),
    ("gemma3_text", SMALL | {"head_dim": 8}),
    ("gemma3_text", SMALL | {"head_dim": 8, "use_bidirectional_attention": True}),
    ("modernbert-decoder", SMALL | {"pad_token_id": 0}),
    ("bert", SMALL),
    ("bert", SMALL | {"is_decoder": True}),
    ("roberta", SMALL),
    ("electra", SMALL | {"embedding_size": 32}),
    ("electra", SMALL | {"embedding_size": 32, "is_decoder": True}),
    ("bert-generation", SMALL),
    ("bert-generation", SMALL | {"is_decoder": True}),
    ("xlm", XLM),
    ("xlm", XLM | {"causal": True}),
    ("xlnet", XLNET),
    ("bart", BART),
    ("mbart", BART),
    ("trocr", BART),
    ("opt", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
]


def learns_the_next_token(model: Any) -> bool:
    """Return whether logits depend on earlier tokens alone, and the loss is the next token's."""
    ids = torch.randint(4, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 8:] = torch.randint(4, VOCABULARY, (4,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, use_cache=False)
        logits, changed = output.logits[0], model(input_ids=other, use_cache=False).logits[0]
    assert not torch.allclose(logits[8:], changed[8:], atol=1e-3), "it does not look at its tokens"
    next_token = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    same_token = torch.nn.functional.cross_entropy(logits, ids[0])
    assert not torch.isclose(next_token, same_token, rtol=1e-4), "the two losses cannot be told apart"
    return (
        torch.allclose(logits[:8], changed[:8], atol=1e-5) and torch.isclose(output.loss, next_token, rtol=1e-5).item()
    )


@pytest.mark.parametrize(("kind", "options"), MODELS, ids=[f"{kind}-{len(options)}" for kind, options in MODELS])
def test_the_decision_is_what_the_model_computes(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert (why_not_trained_causally(config) is None) == learns_the_next_token(model)
    model.save_pretrained(tmp_path / "model")
    if learns_the_next_token(model):
        assert load_config(tmp_path / "model").model_type == kind
    else:
        with pytest.raises(memascend.CheckpointError, match=f"model holds an? {type(model).__name__}[ ,].*Python API"):
            load_config(tmp_path / "model")
    # Any of them can be forecast.
    assert load_bare_config(tmp_path / "model").model_type == kind


def test_both_kinds_are_among_them() -> None:
    decisions = [why_not_trained_causally(AutoConfig.for_model(kind, **options)) is None for kind, options in MODELS]
    assert decisions.count(True) >= 8 and decisions.count(False) >= 10


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("BertForMaskedLM", "a BertForMaskedLM, which is no causal language model"),
        ("BertModel", "a BertModel, which is no"),
        ("BertLMHeadModel", "is_decoder=false"),
        ("MineForCausalLM", "is_decoder=false"),
        ("LlamaForSequenceClassification", "a LlamaForSequenceClassification, which is no"),
    ],
)
def test_a_directory_of_another_task_is_named(tmp_path: Path, architecture: str, says: str) -> None:
    kind = "llama" if architecture.startswith("Llama") else "bert"
    config = AutoConfig.for_model(kind, **SMALL, architectures=[architecture])
    cls = getattr(transformers, architecture, transformers.BertLMHeadModel)
    cls(config).save_pretrained(tmp_path / "model")
    config.architectures = [architecture]
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(memascend.CheckpointError, match=says):
        load_config(tmp_path / "model")
    model = memascend.from_pretrained(
        tmp_path / "model", store=tmp_path / "store", host_memory="64MiB", allocator="pageable"
    )
    memascend.close(model)
