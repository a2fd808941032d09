"""A hub's cache with stand-ins, for tests that take tiny models and data sets from the hub; nothing is fetched.

A model has the architecture of its namesake, random weights, two layers of width 32 or so, and a byte-level tokenizer
that is trained here. TRL's own scripts (`scripts/generate_*_dataset.py` of the checkout) make the data sets.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from datasets import DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_REVISION = "0" * 40
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1}
#: name on the hub: (class of the model, options of its configuration, TRL's chat template).
MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    f"trl-internal-testing/tiny-{name}": (name.partition("-")[0], options, template)
    for name, options, template in (
        ("Qwen2ForCausalLM-2.5", _GROUPED, "qwen2_5"),
        ("Qwen2ForSequenceClassification-2.5", _GROUPED | {"num_labels": 1}, "qwen2_5"),
        ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}, "qwen3"),
        ("Qwen3MoeForCausalLM", _GROUPED | _EXPERTS | {"head_dim": 8}, "qwen3"),
        ("LlamaForCausalLM-3", _GROUPED, "llama3"),
        ("LlamaForCausalLM-3.1", _GROUPED, "llama3_1"),
        ("LlamaForCausalLM-3.2", _GROUPED, "llama3_2"),
        ("MistralForCausalLM-0.1", _GROUPED, "qwen2_5"),
        ("MistralForCausalLM-0.2", _GROUPED, "qwen2_5"),
        ("CohereForCausalLM", _GROUPED | {"logit_scale": 0.0625}, "cohere"),
        ("Cohere2ForCausalLM", _GROUPED | {"logit_scale": 0.0625}, "cohere2"),
        ("GemmaForCausalLM", _GROUPED | {"head_dim": 8}, "gemma"),
        ("Gemma2ForCausalLM", _GROUPED | {"head_dim": 8}, "gemma"),
        ("GPTNeoXForCausalLM", _SIZES, None),
        ("Olmo3ForCausalLM", _GROUPED, "qwen2_5"),
        ("Glm4MoeForCausalLM", _GROUPED | _ROUTED | {"head_dim": 8}, "glm4moe"),
        ("GptOssForCausalLM", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "gptoss"),
        ("DeepseekV3ForCausalLM", _SIZES | _ROUTED | {"num_key_value_heads": 4}, "deepseekv3"),
        ("Lfm2ForCausalLM", _GROUPED | {"full_attn_idxs": [1], "block_multiple_of": 8}, "lfm2"),
        ("Phi3ForCausalLM", _GROUPED, "phi3"),
    )
} | {
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _SIZES, None),
    "peft-internal-testing/tiny-random-OPTForCausalLM": (
        "OPTForCausalLM",
        {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "word_embed_proj_dim": 32},
        None,
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512},
        None,
    ),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", _GROUPED, None),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _SIZES, None),
    "hf-internal-testing/tiny-random-gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512},
        None,
    ),
}
MODELS["hf-internal-testing/tiny-random-MistralForCausalLM"] = ("MistralForCausalLM", _GROUPED, None)
_SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
]


def make_hub(cache: Path, texts: list[str]) -> None:
    """Write a cache of the hub, as `HF_HUB_CACHE` names it, with a snapshot of every stand-in."""
    tokenizer = _tokenizer(texts)
    for name, (class_name, options, template) in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / _REVISION
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(_REVISION)
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        ids |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model_class(model_class.config_class(**ids | options)).save_pretrained(snapshot)
        templates = Path(trl.__file__).parent / "chat_templates"
        tokenizer.chat_template = None if template is None else (templates / f"{template}.jinja").read_text()
        tokenizer.save_pretrained(snapshot)


def _tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )


def make_datasets(folder: Path, checkout: Path) -> list[str]:
    """Write the data sets that the scripts of TRL's checkout would push to the hub, and return their texts."""
    texts: list[str] = []

    def write(data: Any, name: str, config_name: str = "default", **_: Any) -> None:
        data.save_to_disk(folder / name / config_name)
        for part in data.values():
            texts.extend(part["text"] if "text" in part.column_names else ())

    with mock.patch.object(DatasetDict, "push_to_hub", write):
        for name in ("zen", "toolcall", "harmony"):
            script = runpy.run_path(str(checkout / "scripts" / f"generate_{name}_dataset.py"))
            script["main"](0.1, True, f"trl-internal-testing/{name}")
    return texts
