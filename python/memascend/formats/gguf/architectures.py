"""The GGUF entries of the supported architectures, and configurations that GGUF cannot express."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The end of each refusal.
INSTEAD = "llama.cpp's convert_hf_to_gguf.py, run on the exported model directory, may know it"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a class of transformers is written."""

    #: The architecture in the file, by the name that `gguf.MODEL_ARCH` gives it.
    name: str
    #: Rotary embeddings turn neighbouring elements of a head there, not its two halves: rows of q and k change places.
    interleaves: bool = False
    #: Norms multiply by one plus the weight here, and by the weight there.
    norm_offset: float = 0.0
    #: The head is the embedding there, whatever the file holds.
    always_tied: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    #: Biases that it has a place for.
    biases: bool = False
    #: Returns further entries of the file; may refuse.
    more: Callable[[Any, Refusal], list[tuple[str, Any]]] | None = None


@dataclass(slots=True)
class Described:
    """The entries of a file about its model, and the conversion of its tensors."""

    architecture: Architecture
    layers: int
    #: Of queries, and of keys and values.
    heads: tuple[int, int]
    head_dim: int
    context: int
    #: (end of the name of a method `add_...` of `gguf.GGUFWriter`, its argument).
    entries: list[tuple[str, Any]] = field(default_factory=list)
    #: Tensors that no file of the model directory holds.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Refusal:
    """Refuses configurations that a file cannot express."""

    def __init__(self, model_dir: Path, what: str) -> None:
        """Take the model directory and the class of its model."""
        self._where = f"{model_dir} holds a {what}"

    def unless(self, holds: bool, problem: str) -> None:
        """Raise CheckpointError with `problem` unless it `holds` that there is none."""
        if not holds:
            raise CheckpointError(f"{self._where} {problem}, which memascend does not write as GGUF: {INSTEAD}")


def describe(config: Any, model_dir: Path) -> Described:
    """Return the entries of a GGUF file for a model with this configuration of transformers.

    Raises CheckpointError for an architecture or a configuration that is not written here.
    """
    named = (config.architectures or [type(config).__name__])[0]
    architecture = ARCHITECTURES.get(named)
    refusal = Refusal(model_dir, named)
    if architecture is None:
        raise CheckpointError(
            f"{model_dir} holds a {named}, which memascend does not write as GGUF: {INSTEAD} (memascend writes "
            f"{', '.join(ARCHITECTURES)})"
        )
    _check(config, architecture, refusal)
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    context = min(config.max_position_embeddings, _window(config, architecture))
    described = Described(architecture, config.num_hidden_layers, (heads, keys), head_dim, context)
    described.entries = [
        ("context_length", context),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("head_count", heads),
        ("head_count_kv", keys),
        ("key_length", head_dim),
        ("value_length", head_dim),
        ("rope_dimension_count", head_dim),
        ("layer_norm_rms_eps", config.rms_norm_eps),
        ("vocab_size", config.vocab_size),
    ]
    _add_rope(described, config, refusal)
    if architecture.more is not None:
        described.entries += architecture.more(config, refusal)
    return described


def _check(config: Any, architecture: Architecture, refusal: Refusal) -> None:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    refusal.unless(activation in architecture.activations, f"with the activation {activation}")
    # A configuration of Qwen2 says nothing of the biases that its class always has.
    biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    refusal.unless(architecture.biases or not biases, "with biases")
    if architecture.always_tied:
        refusal.unless(config.tie_word_embeddings, "whose head is not its embedding")


def _window(config: Any, architecture: Architecture) -> int:
    """Return the tokens that a layer attends to, where the file has no place for a window: no context is longer."""
    window = getattr(config, "sliding_window", None)
    return window if window and architecture.more not in (_gemma2, _gemma3) else 1 << 62


def _rope_of(config: Any, kind: str = "full_attention") -> dict[str, Any]:
    parameters = dict(config.rope_parameters or {})
    return dict(parameters[kind]) if isinstance(parameters.get(kind), dict) else parameters


def _add_rope(described: Described, config: Any, refusal: Refusal) -> None:
    """Add the entries of the rotary embeddings, and the tensor that Llama 3's scaling is stored as."""
    rope = _rope_of(config)
    kind = rope.get("rope_type", "default")
    known = {
        "default": set[str](),
        "linear": {"factor"},
        "yarn": {"factor", "original_max_position_embeddings"},
        "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    }
    refusal.unless(kind in known, f"with rotary embeddings of the kind {kind}")
    others = {name for name, value in rope.items() if value is not None} - known[kind] - {"rope_type", "rope_theta"}
    if rope.get("partial_rotary_factor") == 1.0:
        others.discard("partial_rotary_factor")
    refusal.unless(not others, f"whose rotary embeddings have {', '.join(sorted(others))}")
    described.entries.append(("rope_freq_base", float(rope["rope_theta"])))
    if kind == "llama3":
        described.tensors["rope_freqs.weight"] = _llama3_factors(rope, described.head_dim)
    elif kind != "default":
        described.entries += [("rope_scaling_type", kind), ("rope_scaling_factor", float(rope["factor"]))]
    if kind == "yarn":
        described.entries.append(("rope_scaling_orig_ctx_len", rope["original_max_position_embeddings"]))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return the divisors of the frequencies in Llama 3's scaling, float32 of shape (head_dim / 2,).

    Waves of more than `original / low_freq_factor` tokens are divided by `factor`, waves of fewer than `original /
    high_freq_factor` stay, and others are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _smollm3(config: Any, refusal: Refusal) -> list[tuple[str, Any]]:
    without = [layer for layer, turns in enumerate(config.no_rope_layers) if not turns]
    wanted = list(range(3, config.num_hidden_layers, 4))
    refusal.unless(without == wanted, "whose layers without rotary embeddings are not every fourth")
    return []


def _gemma2(config: Any, refusal: Refusal) -> list[tuple[str, Any]]:
    _check_layers(config, refusal, full_every=2)
    _check_scale(config, refusal, layers_of_27b=46)
    return [
        ("sliding_window", config.sliding_window),
        ("attn_logit_softcapping", config.attn_logit_softcapping),
        ("final_logit_softcapping", config.final_logit_softcapping),
    ]


def _gemma3(config: Any, refusal: Refusal) -> list[tuple[str, Any]]:
    _check_layers(config, refusal, full_every=6)
    _check_scale(config, refusal, layers_of_27b=62)
    refusal.unless(not config.attn_logit_softcapping, "with a cap on the logits of its attention")
    refusal.unless(not getattr(config, "use_bidirectional_attention", False), "with bidirectional attention")
    local = _rope_of(config, "sliding_attention")
    refusal.unless(local.get("rope_type", "default") == "default", "whose local rotary embeddings are scaled")
    entries = [("sliding_window", config.sliding_window), ("rope_freq_base_swa", float(local["rope_theta"]))]
    if config.final_logit_softcapping:
        entries.append(("final_logit_softcapping", config.final_logit_softcapping))
    return entries


def _check_layers(config: Any, refusal: Refusal, full_every: int) -> None:
    """llama.cpp knows by the architecture which layers see all tokens."""
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    wanted = list(range(full_every - 1, config.num_hidden_layers, full_every))
    refusal.unless(full == wanted, f"whose layers of full attention are not one in {full_every}")


def _check_scale(config: Any, refusal: Refusal, layers_of_27b: int) -> None:
    """llama.cpp chooses the divisor of attention scores by the number of layers."""
    wanted = config.head_dim
    if config.num_hidden_layers == layers_of_27b:
        wanted = config.hidden_size // config.num_attention_heads
    refusal.unless(config.query_pre_attn_scalar == wanted, f"with query_pre_attn_scalar={config.query_pre_attn_scalar}")


_TANH = ("gelu_pytorch_tanh",)
#: The classes of transformers that are written, each compared with llama.cpp's answers (tests/formats/test_gguf.py).
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("LLAMA", interleaves=True, biases=True),
    "MistralForCausalLM": Architecture("LLAMA", interleaves=True),
    "SmolLM3ForCausalLM": Architecture("SMOLLM3", interleaves=True, more=_smollm3),
    "Qwen2ForCausalLM": Architecture("QWEN2"),
    "Qwen3ForCausalLM": Architecture("QWEN3"),
    "GemmaForCausalLM": Architecture("GEMMA", norm_offset=1.0, always_tied=True, activations=_TANH),
    "Gemma2ForCausalLM": Architecture("GEMMA2", norm_offset=1.0, always_tied=True, activations=_TANH, more=_gemma2),
    "Gemma3ForCausalLM": Architecture("GEMMA3", norm_offset=1.0, activations=_TANH, more=_gemma3),
}
