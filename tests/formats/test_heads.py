"""A model directory opened as a model of another task: the head begins with the bits that transformers gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import transformers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

import memascend
from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_models.SMALLEST_DECODER)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def opened(causal: Path, **options: Any) -> Any:
    torch.manual_seed(5)
    store = causal.parent / "store"
    return memascend.from_pretrained(causal, store=store, host_memory="64MiB", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("named", "expected_class"),
    [
        ("AutoModelForSequenceClassification", LlamaForSequenceClassification),
        (transformers.AutoModelForTokenClassification, LlamaForTokenClassification),
        (LlamaForSequenceClassification, LlamaForSequenceClassification),
    ],
)
def test_a_new_head(causal: Path, named: Any, expected_class: Any, dtype: str) -> None:
    torch.manual_seed(5)
    expected = expected_class.from_pretrained(causal, num_labels=3, dtype=getattr(torch, dtype))
    model = opened(causal, model_class=named, num_labels=3, dtype=dtype)
    assert type(model) is expected_class
    assert model.config.num_labels == 3
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), dict(expected.named_parameters()))
    memascend.close(model)


def test_the_class_is_kept_with_the_run(causal: Path) -> None:
    model = opened(causal, model_class="AutoModelForSequenceClassification", num_labels=3, keep_store=True)
    weights = dict(memascend.parameters_of(model))
    memascend.close(model)
    resumed = memascend.resume(causal.parent / "store", host_memory="64MiB")
    assert type(resumed.model) is LlamaForSequenceClassification
    tiny_models.assert_same_weights(dict(memascend.parameters_of(resumed.model)), weights)
    memascend.close(resumed.model)


def test_values_of_the_configuration(causal: Path) -> None:
    model = opened(causal, attn_implementation="eager", rms_norm_eps=1e-3)
    assert model.config._attn_implementation == "eager" and model.model.norm.variance_epsilon == 1e-3
    memascend.close(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"no_such_option": 1}, TypeError, "no option 'no_such_option', and neither has the configuration of a llama"),
        ({"updte": "forward"}, TypeError, "no option 'updte', .* a llama model: did you mean 'update'"),
        ({"model_class": "NoClass"}, ValueError, "NoClass is no class of transformers"),
        ({"attn_implementation": "org/kernel"}, ValueError, "is code of the hub"),
        ({"model_class": "AutoModelForCTC"}, ValueError, "AutoModelForCTC has no class for a llama model"),
        ({"model_class": "AutoModelForCausalLM", "num_hidden_layers": 3}, CheckpointError, "lacks weights"),
    ],
)
def test_what_cannot_be_opened_so(causal: Path, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opened(causal, **options)


def test_a_head_that_is_missing_unasked_is_refused(causal: Path) -> None:
    config = causal / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(CheckpointError, match=r"lacks weights.*score\.weight"):
        opened(causal)
