"""Seeded tiny models of many architectures, and the training loop they all go through."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: An embedding of VOCABULARY x WIDE is 524,288 elements: two chunks of an update, two of a spilled gradient.
VOCABULARY = 2048
WIDE = 256
NARROW = 128

SMALL_DECODER: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": NARROW,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: For models that are built by the dozen.
SMALLEST_DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = SMALL_DECODER | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "intermediate_size": 192}


class Block(nn.Module):
    """A residual block of an architecture that transformers does not have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.mlp(self.norm(x))


class Plain(nn.Module):
    """No Hugging Face model: parameters at the root, a ModuleList, a Sequential, LayerNorms with biases."""

    def __init__(self, width: int = WIDE, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width) * 0.02)
        self.mix = nn.Parameter(torch.eye(width) + torch.randn(width, width) * 0.02)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> CausalLMOutput:
        x = (self.embedding(input_ids) + self.shift) @ self.mix
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.tail(x)) + 0.1 * self.shift.sum()
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def _t5(dropout: float) -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=1024,
            d_model=NARROW,
            d_kv=32,
            d_ff=320,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL_DECODER | {"vocab_size": VOCABULARY, "hidden_size": WIDE, "intermediate_size": 512})
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL_DECODER)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL_DECODER, head_dim=32, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL_DECODER, sliding_window=8)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL_DECODER, head_dim=32)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=1024,
            n_positions=64,
            n_embd=NARROW,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MOE, head_dim=32, num_experts=4, moe_intermediate_size=192, decoder_sparse_step=1)
    ),
    "t5": lambda: _t5(0.0),
    "t5_dropout": lambda: _t5(0.1),
    "plain": Plain,
}
ARCHITECTURES = list(BUILDERS)
HUGGING_FACE = [name for name in ARCHITECTURES if name not in ("plain", "t5_dropout")]
VOCABULARIES = {"llama": VOCABULARY, "plain": VOCABULARY}


def build(architecture: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """Return the same model for the same seed, in training mode."""
    usual = torch.get_default_device().type == "cpu" and torch.get_default_dtype() is torch.float32
    if not usual:
        return _initialised(architecture, dtype, seed)
    model, random_numbers = _first_of(architecture, dtype, seed)
    torch.manual_seed(seed)  # of devices, too
    torch.set_rng_state(random_numbers)
    return copy.deepcopy(model)


@cache
def _first_of(architecture: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and the state of random numbers after it: a copy takes a fifth of its time."""
    return _initialised(architecture, dtype, seed), torch.get_rng_state()


def _initialised(architecture: str, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BUILDERS[architecture]()
    return model.to(dtype).train()


def enable_checkpointing(model: nn.Module) -> None:
    """Turn on transformers' own gradient checkpointing, by the name that this version has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def batch(architecture: str, number: int, rows: int = 2, columns: int = 16) -> dict[str, torch.Tensor]:
    """Return batch `number`: always the same one."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(3, VOCABULARIES.get(architecture, 1024), (rows, columns), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1) if architecture.startswith("t5") else ids}


@dataclass
class Trace:
    """Everything a run computes that another must reproduce to the bit."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    generated: torch.Tensor | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def gradients_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, copy of the gradient or None), wherever the gradients are."""
    for name, parameter in model.named_parameters():
        yield name, None if parameter.grad is None else parameter.grad.clone()


def train(
    model: nn.Module,
    architecture: str,
    *,
    steps: int = 3,
    accumulate: int = 1,
    max_norm: float | None = 1.0,
    lr: float = 3e-3,
    first: int = 0,
    optimizer: memascend.AdamW | None = None,
    evaluate: bool = True,
    generate: bool = False,
) -> Trace:
    """Train with a scheduler, accumulation and clipping; evaluate in the middle."""
    trace = Trace()
    optimizer = optimizer or memascend.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(7)
    for step in range(steps):
        for micro in range(accumulate):
            inputs = batch(architecture, first + step * accumulate + micro)
            loss = model(**inputs).loss / accumulate
            loss.backward()
            trace.losses.append(loss.detach().clone())
        trace.gradients.append(dict(gradients_of(model)))
        if max_norm is not None:
            trace.norms.append(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if evaluate and step == 0:
            trace.logits.append(logits(model, architecture))
            if generate:
                trace.generated = generated(model, architecture)
    trace.logits.append(logits(model, architecture))
    trace.weights = dict(memascend.parameters_of(model))
    return trace


def step(model: nn.Module, optimizer: memascend.AdamW, architecture: str, number: int) -> torch.Tensor:
    """Take one step on batch `number`, and return its loss."""
    loss = model(**batch(architecture, number)).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def logits(model: nn.Module, architecture: str) -> torch.Tensor:
    """Evaluate without gradients; leaves the model in the mode it was in."""
    training = model.training
    model.eval()
    with torch.no_grad():
        result = model(**batch(architecture, 99)).logits.clone()
    model.train(training)
    return result


def generated(model: nn.Module, architecture: str) -> torch.Tensor:
    """Generate greedily; leaves the model in the mode it was in."""
    training = model.training
    model.eval()
    ids = batch(architecture, 98)["input_ids"]
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train(training)
    return tokens


def assert_same(actual: Trace, expected: Trace) -> None:
    """Bit for bit, and name the first difference."""
    for kind in ("losses", "norms", "logits"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        assert len(ours) == len(theirs) > 0 or kind == "norms"
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), f"{kind}[{index}]: {one} is not {other}"
            assert torch.isfinite(one).all(), f"{kind}[{index}] is not finite, so it proves nothing"
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            if gradient is None:
                assert ours[name] is None, f"step {step}: {name} has a gradient, but not in memory"
            else:
                assert ours[name] is not None, f"step {step}: {name} has no gradient"
                assert torch.equal(ours[name], gradient), f"step {step}: gradient of {name} differs"
    assert (actual.generated is None) == (expected.generated is None)
    if expected.generated is not None:
        assert torch.equal(actual.generated, expected.generated), "generated tokens differ"
    assert_same_weights(actual.weights, expected.weights)


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and the same names."""
    assert actual.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not differing, f"weights differ: {differing[:5]} ({len(differing)} in all)"
    assert all(actual[name].dtype == value.dtype for name, value in expected.items())


#: Lines of text that a few steps can learn from.
TEXT = "".join(f"{n} times {n} is {n * n}.\n" for n in range(300))


def llama_directory(folder: Path, hidden: int, layers: int = 3, positions: int = 128) -> Path:
    """Write a Llama over bytes, two or so times as wide inside, as a Hugging Face directory without a tokenizer.

    Beside it, in text.txt, stands some text. Returns the directory, `folder / "llama"`.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=hidden,
        intermediate_size=5 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "llama")
    (folder / "text.txt").write_text(TEXT)
    return folder / "llama"


def smallest_budget(model: nn.Module) -> int:
    """Return the least host_memory that holds `model`, as BudgetError says it."""
    from memascend.layout.units import partition
    from memascend.memory_plan.host import make_plan

    try:
        make_plan(partition(model), 1)
    except memascend.BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a budget of one byte was accepted")


def overlapping_budget(model: nn.Module) -> int:
    """Return the least host_memory with which the next layer is read while one computes."""
    from memascend.layout.units import partition
    from memascend.memory_plan.host import make_plan

    return make_plan(partition(model), 1 << 40).overlap_bytes


def smallest_device_budget(model: nn.Module, **options: Any) -> int:
    """Return the least device_memory that holds `model`, as BudgetError says it."""
    from memascend.layout.units import partition
    from memascend.memory_plan.device import make_device_plan

    try:
        make_device_plan(partition(model), 1, **{"config": getattr(model, "config", None)} | options)
    except memascend.BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a budget of one byte was accepted")
