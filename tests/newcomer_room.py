"""The files that commands of the pages take for granted: small models, chats, texts, results of earlier commands.

Run by the Python of a newcomer's environment, in the directory that it is to fill.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import memascend

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write a small Llama with a tokenizer and a chat template."""
    torch.manual_seed(0)
    bytewise = Tokenizer(models.BPE())  # splits text as SmolLM2's tokenizer does, which `export --format gguf` knows
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytewise.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bytewise.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    bytewise.train_from_iterator([Path(json.__file__).read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def write_data() -> None:
    """Write texts, sources, records and chats."""
    Path("src").mkdir()
    for name in ("json/decoder.py", "textwrap.py", "queue.py"):
        shutil.copy(Path(json.__file__).parents[1] / name, Path("src", Path(name).name))
    text = Path("src/textwrap.py").read_text()
    Path("notes.txt").write_text(text)
    Path("data.txt").write_text(text)
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    turns = [("user", "How many drives?"), ("assistant", "Two of them, and a spare.")]
    chat = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    Path("chats.jsonl").write_text(f"{chat}\n" * 800)
    nvme = {"device": "nvme", "nvme_path": "/local"}
    zero = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}
    configuration = {"zero_optimization": zero, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    Path("ds_config.json").write_text(json.dumps(configuration))
    Path("questions.txt").write_text("How many drives?\nWhich of them?\n")


def write_runs(memascend_command: str) -> None:
    """Make the results of other pages' commands: a model, its store with checkpoints, and adapters."""
    tune = [memascend_command, "finetune", "path/to/hf_model", "--store", "nvme/run1", "--host-memory", "256MiB"]
    small = ["--steps", "3", "--seq-len", "64", "--data", "chats.jsonl"]
    subprocess.run([*tune, *small, "--out", "adapters", "--lora-rank", "4"], check=True)
    subprocess.run([*tune, *small, "--out", "tuned", "--keep-store", "--durability", "step"], check=True)
    shutil.copy("tuned/metrics.jsonl", "metrics.jsonl")
    run = memascend.resume("nvme/run1", host_memory="256MiB")
    for tag in ("epoch-1", "before-rl"):
        memascend.save_checkpoint(run.model, tag)
    memascend.close(run.model)


def main() -> None:
    """Fill the directory."""
    for drive in ("nvme", "nvme0", "nvme1", "backup", "mnt"):
        Path(drive).mkdir()
    write_model(Path("path/to/hf_model"))
    write_data()
    write_runs(sys.argv[1])


if __name__ == "__main__":
    main()
