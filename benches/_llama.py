"""Llamas of any shape, with random weights, for the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

SEED = 1


def llama_config(shape, vocabulary: int, positions: int = 2048):
    """Return a configuration; `shape` is (hidden, intermediate, layers, heads, key/value heads)."""
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads = shape
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def parameter_count(shape, vocabulary: int) -> int:
    hidden, intermediate, layers, heads, kv_heads = shape
    kv = hidden // heads * kv_heads
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate + 2 * hidden
    return 2 * vocabulary * hidden + hidden + layers * layer


def write_model(config, out: Path, device: str = "cpu") -> None:
    """Write a seeded random Llama as sharded safetensors; one shard (a layer or an end) is in memory at a time.

    A device draws faster, and other numbers than the CPU does.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        shards.setdefault(".".join(parts[:3]) if parts[1] == "layers" else name, []).append(name)
    out.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(SEED)
    index = {"metadata": {"total_size": 2 * sum(_numel(s) for s in shapes.values())}, "weight_map": {}}
    for number, names in enumerate(shards.values(), start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            if name.endswith("norm.weight"):
                tensors[name] = torch.ones(shapes[name], dtype=torch.bfloat16)
            else:
                drawn = torch.empty(shapes[name], device=device).normal_(0.0, 0.02, generator=generator)
                tensors[name] = drawn.bfloat16().cpu()
            index["weight_map"][name] = file
        save_file(tensors, out / file, metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.save_pretrained(out)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
