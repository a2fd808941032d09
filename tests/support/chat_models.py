"""Directories of small models with a tokenizer of one token for each character, and a chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

TURNS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<eos>{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one token for each character, and a chat template that marks the assistant's words."""
    from tokenizers import Tokenizer, models

    names = [chr(code) for code in range(32, 127)] + ["<eos>", "<unk>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")
    made.chat_template = TURNS
    return made


def folder_of(path: Path, cls: type = LlamaForCausalLM, **options: Any) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 95,
        }
        | options
    )
    cls(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
