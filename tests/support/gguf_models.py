"""Tiny models with tokenizers that are written as GGUF, and llama.cpp's answers to them."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import requirements
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 400
TEXT = (
    "The drive writes what the step has made; it's 2 GiB, 17 files and 1234567 rows.\n\n\tWe'll see: don't we?  "
    "Größe, naïve, 東京 and π ≈ 3.14159!!\r\n" * 3
)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
#: Tokens that llama.cpp knows to end a text, by name.
ENDS = ("<|endoftext|>", "<|im_end|>", "</s>")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Expressions as Qwen's and Llama 3's tokenizer.json have them.
EXPRESSIONS = {
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
    "smaug-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
}
EXPRESSIONS["llama-bpe"] = EXPRESSIONS["smaug-bpe"]


def _splits(kind: str) -> Any:
    if kind in EXPRESSIONS:
        split = pre_tokenizers.Split(Regex(EXPRESSIONS[kind]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, whole]) if kind == "smollm" else whole


def over_bytes(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, which splits texts as llama.cpp's `kind` does."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = _splits(kind)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def with_byte_fallback(*, prefix: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's, or Gemma's, which puts no space before a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special[:3])
    tokenizer.train_from_iterator(TEXT.replace(" ", "▁").splitlines(), trainer)
    described = json.loads(tokenizer.to_str())
    learnt = [token for token in described["model"]["vocab"] if token not in special and len(token.encode()) < 20]
    described["model"]["vocab"] = {token: number for number, token in enumerate([*special, *learnt][:VOCABULARY])}
    vocabulary = described["model"]["vocab"]
    described["model"]["merges"] = [
        merge for merge in described["model"]["merges"] if {*merge, "".join(merge)} <= vocabulary.keys()
    ]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_GEMMA = _SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
#: Name -> the class of the model, its configuration, and its tokenizer.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], PreTrainedTokenizerFast]]] = {
    "llama": ("Llama", _SIZES | {"attention_bias": True}, lambda: with_byte_fallback(prefix=True)),
    "llama3": ("Llama", _SIZES | {"rope_parameters": _LLAMA3}, lambda: over_bytes("llama-bpe")),
    "smollm2": ("Llama", _SIZES | {"tie_word_embeddings": True}, lambda: over_bytes("smollm")),
    "smollm3": ("SmolLM3", _SIZES | {"num_hidden_layers": 4}, lambda: over_bytes("smaug-bpe")),
    "mistral": ("Mistral", _SIZES | {"head_dim": 32}, lambda: with_byte_fallback(prefix=True)),
    "qwen2": ("Qwen2", _SIZES, lambda: over_bytes("qwen2")),
    "yarn": ("Qwen2", _SIZES | {"rope_parameters": _YARN}, lambda: over_bytes("qwen2")),
    "linear": ("Llama", _SIZES | {"rope_parameters": _LINEAR}, lambda: over_bytes("gpt-2")),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 32}, lambda: over_bytes("qwen2")),
    "gemma": ("Gemma", _SIZES | {"head_dim": 32}, lambda: with_byte_fallback(prefix=False)),
    "gemma2": ("Gemma2", _GEMMA, lambda: with_byte_fallback(prefix=False)),
    "gemma3": ("Gemma3", _GEMMA | {"num_hidden_layers": 7}, lambda: with_byte_fallback(prefix=False)),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def write_model(directory: Path, name: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """Write one of MODELS to `directory` in float32, and return it with its tokenizer."""
    kind, options, make = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # Norms are ones or zeros, and biases zeros, which would hide faults.
                parameter.add_(torch.randn_like(parameter) * 0.3)
    tokenizer = make()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def greedy(model: Any, tokenizer: PreTrainedTokenizerFast, ids: list[int], tokens: int) -> list[int]:
    """Return the tokens that transformers finds most likely, one after the other, but for those that end a text."""
    ends = [number for token, number in tokenizer.get_vocab().items() if token in ENDS]
    found = list(ids)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([found])).logits[0, -1]
            logits[ends] = -torch.inf
            found.append(int(logits.argmax()))
    return found[len(ids) :]


def answer_of_llama_cpp(file: Path, prompt: str, ids: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a text, and those that follow `ids`, as llama.cpp has them."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = 256, 1, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # It computes in float16.
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup = False
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    options = {"n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    try:
        read = _ask(server, "tokenize", {"content": prompt, "add_special": True})["tokens"]
        return read, _ask(server, "completion", {"prompt": ids, "cache_prompt": False, **options})["tokens"]
    finally:
        del server


def _ask(server: Any, what: str, question: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.listening_address}/{what}", json.dumps(question).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def write_adapters(model: Any, base: Path, out: Path) -> Any:
    """Write random adapters of a model that lies in `base`, and return the model with them."""
    peft = requirements.package("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(out)
    return adapted
