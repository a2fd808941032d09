"""Caches of keys and values that recomputed layers fill: the bits of the same code in memory, or a refusal."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import tiny_models
import torch
from torch import nn
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    Mamba2Config,
    Mamba2ForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    StaticCache,
    XLMConfig,
    XLMWithLMHeadModel,
)

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

    Offload = Callable[..., nn.Module]

_DECODER = tiny_models.SMALLEST_DECODER | {"num_attention_heads": 2, "pad_token_id": 0}
VOCABULARY = _DECODER["vocab_size"]
#: The argument and the output of models that hold a cache; transformers 5.24 has renamed both.
CACHE = (
    "cache" if "cache" in inspect.signature(inspect.unwrap(GPT2LMHeadModel.forward)).parameters else "past_key_values"
)
_ENCODER_DECODER: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCABULARY}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
CACHING: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "biogpt": lambda: BioGptForCausalLM(BioGptConfig(**_DECODER)),
    "m2m100": lambda: M2M100ForConditionalGeneration(
        M2M100Config(
            **_ENCODER_DECODER,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
        )
    ),
    "mt5": lambda: MT5ForConditionalGeneration(
        MT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ),
    "xlm": lambda: XLMWithLMHeadModel(
        XLMConfig(vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=64)
    ),
    "granitemoe": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**_DECODER | _MOE)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_DECODER | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4})
    ),
    # Its states are written in place.
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16,
            n_groups=1, chunk_size=8,
        )
    ),
}  # fmt: skip


def caching(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return CACHING[name]().train()


def tokens(number: int, columns: int = 7) -> torch.Tensor:
    # An odd number of columns, for which products of contiguous and strided keys differ.
    return torch.randint(3, VOCABULARY, (2, columns), generator=torch.Generator().manual_seed(number))


def gradients_with(model: nn.Module, **options: Any) -> dict[str, torch.Tensor | None]:
    """Return loss and gradients of one pass with dropout, recomputed twice."""
    torch.manual_seed(7)
    loss = model(input_ids=tokens(0), labels=tokens(0), **options).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return {"loss": loss.detach(), **dict(tiny_models.gradients_of(model))}


def assert_same_gradients(actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert bit_equality.differing(actual, expected) == []


#: The cache of XLM has no switch.
SWITCHES = [(name, cache) for name in CACHING for cache in (None, False, True) if name != "xlm" or cache is None]


@pytest.mark.parametrize(("name", "use_cache"), SWITCHES)
def test_models_that_fill_a_cache(offloaded: Offload, name: str, use_cache: bool | None) -> None:
    options = {} if use_cache is None else {"use_cache": use_cache}
    expected = gradients_with(caching(name), **options)
    for recompute in (True, False):
        model = offloaded(caching(name), recompute=recompute)
        assert_same_gradients(gradients_with(model, **options), expected)
        memascend.close(model)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}], ids=["alone", "on"])
@pytest.mark.parametrize("name", ["gpt2", "granitemoe"])
def test_a_cache_under_checkpointing_is_not_filled(offloaded: Offload, name: str, options: dict[str, bool]) -> None:
    expected, model = caching(name), caching(name)
    for each in (expected, model):
        tiny_models.enable_checkpointing(each)
    assert_same_gradients(gradients_with(offloaded(model), **options), gradients_with(expected, **options))


def test_a_cache_that_is_asked_for_is_kept(offloaded: Offload) -> None:
    expected, model = caching("gpt2"), offloaded(caching("gpt2"))
    for options in ({"use_cache": True}, {CACHE: DynamicCache()}):
        caches = []
        for each in (expected, model):
            torch.manual_seed(7)
            if CACHE in options:
                options[CACHE] = DynamicCache()
            first = each(input_ids=tokens(0), labels=tokens(0), **options)
            # The second pass attends to the keys of the first, and its gradients reach them.
            second = each(input_ids=tokens(1), labels=tokens(1), **{CACHE: getattr(first, CACHE)})
            (first.loss + second.loss).backward()
            caches.append(getattr(second, CACHE))
        ours, theirs = ([layer.keys for layer in cache.layers] for cache in reversed(caches))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert ours[0].shape[-2] == 14
    assert_same_gradients(dict(tiny_models.gradients_of(model)), dict(tiny_models.gradients_of(expected)))


def test_a_cache_that_was_not_asked_for_is_dropped(offloaded: Offload) -> None:
    model = offloaded(caching("gpt2"))
    output = model(input_ids=tokens(0), labels=tokens(0))
    cache = getattr(output, CACHE)
    assert cache.get_seq_length() == 7
    keys = cache.layers[1].keys
    assert (keys.shape, keys.dtype, keys.device.type) == ((2, 4, 7, 16), torch.float32, "cpu")
    for use in (keys.sum, keys.tolist, keys.detach, lambda: keys + 1, lambda: torch.cat([keys, keys])):
        with pytest.raises(memascend.MemascendError, match="use_cache=True"):
            use()
    with pytest.raises(memascend.MemascendError, match="use_cache=True"):
        model(input_ids=tokens(1), **{CACHE: cache})
    # A part of the model keeps its own, and a pass without gradients has a cache like any other.
    assert torch.isfinite(getattr(model.transformer(input_ids=tokens(0)), CACHE).layers[1].keys).all()
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(getattr(model(input_ids=tokens(0)), CACHE).layers[1].keys).all()


def test_a_static_cache_is_refused(offloaded: Offload) -> None:
    model = offloaded(caching("gemma2"))
    cache = StaticCache(config=model.config, max_cache_len=2048)
    with pytest.raises((memascend.MemascendError, RuntimeError), match=r"written in place|inplace operation"):
        first = model(input_ids=tokens(0), labels=tokens(0), **{CACHE: cache})
        second = model(input_ids=tokens(1), labels=tokens(1), **{CACHE: cache})
        (first.loss + second.loss).backward()


class Cached(nn.Module):
    """A layer that takes a cache of no class of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        return self.linear(x)


def test_a_cache_of_an_unknown_class_is_refused(offloaded: Offload) -> None:
    model = offloaded(nn.Sequential(Cached(), Cached()))
    with pytest.raises(memascend.MemascendError, match=r"past_key_values, a OwnCache.*use_cache=False"):
        model[0](torch.ones(4, 32), past_key_values=OwnCache())


class OwnCache:
    """A cache of a class of the program's own."""
