"""Mixtures of experts with a megabyte of weights, by name of the architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tiny_models
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

EXPERTS = 8
#: An expert of this width does not fill whole pages.
ODD = {"hidden_size": 72}
DECODER = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}


def _deepseek(**changed: Any) -> nn.Module:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = {key: value for key, value in DECODER.items() if key != "head_dim"} | latent | changed
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    config |= {"moe_intermediate_size": 104, "num_key_value_heads": 4, "n_routed_experts": EXPERTS}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config, **groups))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "qwen3_moe": lambda **changed: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**DECODER | {"moe_intermediate_size": 104} | changed, num_experts=EXPERTS)
    ),
    "mixtral": lambda **changed: MixtralForCausalLM(MixtralConfig(**DECODER | changed, num_local_experts=EXPERTS)),
    "gpt_oss": lambda **changed: GptOssForCausalLM(
        GptOssConfig(**DECODER | changed, num_local_experts=EXPERTS, sliding_window=8)
    ),
    "deepseek_v3": _deepseek,
}


def _llama4(**changed: Any) -> nn.Module:
    sizes = {"intermediate_size": 104, "intermediate_size_mlp": 208, "num_local_experts": EXPERTS}
    return Llama4ForCausalLM(Llama4TextConfig(**DECODER | sizes | changed, pad_token_id=0))


#: Those that give all tokens to every expert.
BATCHED: dict[str, Callable[..., nn.Module]] = {"llama4": _llama4}


def build(
    architecture: str, implementation: str = "grouped_mm", dtype: torch.dtype = torch.bfloat16, **changed: Any
) -> Any:
    """Return a model to be trained."""
    torch.manual_seed(0)
    model = (MODELS | BATCHED)[architecture](**changed).to(dtype)
    if architecture in MODELS:
        model.set_experts_implementation(implementation)  # type: ignore[operator]
    return model.train()


def batch(number: int, rows: int = 2, columns: int = 16) -> dict[str, torch.Tensor]:
    """Return tokens to be predicted, the same for a number."""
    ids = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def assert_same(actual: Any, expected: Any) -> None:
    """Fail unless losses and weights have the same bits."""
    assert all(torch.isfinite(loss) for loss in expected[0])
    assert [loss.item() for loss in actual[0]] == [loss.item() for loss in expected[0]]
    tiny_models.assert_same_weights(actual[1], expected[1])
