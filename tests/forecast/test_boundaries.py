"""Which models keep the documents of a packed sequence apart: the forecast's answer, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architecture_runs
import pytest
import small_models
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from memascend.forecast.boundaries import why_without_boundaries
from memascend.formats.transformers_models import why_not_trained_causally

WIDTHS = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
WIDTHS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
#: Models whose documents are apart.
APART: dict[str, dict[str, Any]] = {
    "llama": WIDTHS,
    "gemma3_text": WIDTHS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "qwen3_moe": WIDTHS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
}
#: Others, and the reason.
TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2}, "a state that passes"),
    "bloom": ({"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "no boundaries from position ids"),
    "minimax": (WIDTHS | {"num_local_experts": 4}, "a state that passes"),
    "lfm2": (WIDTHS | {"layer_types": ["conv", "full_attention"]}, "convolutions over tokens"),
}
FIRST, SECOND = 5, 9


def apart(model: Any, attention: str) -> bool:
    """Return whether the second of two documents has the logits that it has alone, whatever the first one is."""
    model.set_attn_implementation(attention)
    model.eval()
    first = torch.randint(3, 60, (2, FIRST))
    second = torch.randint(3, 60, (1, SECOND))
    packed = torch.cat([first, second.expand(2, -1)], 1)
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)]).expand(2, -1)
    with torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits
        found = model(input_ids=packed, position_ids=positions, use_cache=False).logits[:, FIRST:]
    return torch.allclose(found, alone.expand_as(found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_that_are_said_to_be_apart_are(name: str, attention: str) -> None:
    config = AutoConfig.for_model(name, **APART[name])
    assert why_without_boundaries(config, Path()) is None
    torch.manual_seed(0)
    assert apart(AutoModelForCausalLM.from_config(config), attention)


@pytest.mark.parametrize("name", TOGETHER)
def test_others_are_named_with_the_reason(name: str) -> None:
    values, reason = TOGETHER[name]
    problem = why_without_boundaries(AutoConfig.for_model(name, **values), Path())
    assert problem is not None and reason in problem and f"a {name} model" in problem


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())))
def test_no_architecture_is_wrongly_said_to_keep_documents_apart(name: str) -> None:
    model_type = getattr(transformers, name)
    for config in small_models.configurations(model_type):
        torch.manual_seed(0)
        try:
            model = architecture_runs.build(model_type, config)
        except Exception as error:
            pytest.skip(f"not built: {error}")
        config.architectures = [name]
        problem = why_not_trained_causally(config) or why_without_boundaries(config, Path())
        if problem is not None:
            pytest.skip(problem)
        assert apart(model, "eager"), name
        return
