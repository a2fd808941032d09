"""Models of images and of speech: the Trainer over their directories has the bits of the same Trainer in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from bit_equality import differing
from trainer_runs import logged, weights
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import memascend
from memascend.integrations.transformers import MemascendArguments, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

requirements.package("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
IMAGE = 100  # the token that stands for a patch


def vision_and_language() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return a model that reads images of 4 patches, and rows: an image, its patches' tokens, and a text."""
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**widths, image_size=16, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**widths, vocab_size=128, num_key_value_heads=2),
        image_token_id=IMAGE,
        image_token_index=IMAGE,
    )
    rows = []
    for _ in range(4):
        ids = torch.cat([torch.full((4,), IMAGE), torch.randint(1, IMAGE, (8,))])
        labels = ids.masked_fill(ids == IMAGE, -100)
        rows.append({"input_ids": ids, "labels": labels, "pixel_values": torch.randn(3, 16, 16)})
    return LlavaForConditionalGeneration(config), rows


def speech() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return a model that writes down speech, and rows: a spectrogram and the text's tokens."""
    config = WhisperConfig(
        **{f"{half}_{what}": size for half in ("encoder", "decoder") for what, size in LAYERS.items()},
        vocab_size=128,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = [torch.randn(8, 32).to(torch.bfloat16) for _ in range(4)]  # as the weights are
    rows = [{"input_features": one, "labels": torch.randint(3, 128, (8,))} for one in features]
    return WhisperForConditionalGeneration(config), rows


LAYERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


@pytest.mark.parametrize("make", [vision_and_language, speech])
def test_it_has_the_bits_of_the_trainer_in_memory(make: Callable[[], tuple[Any, Any]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = make()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    whole = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    expected = Trainer(whole, TrainingArguments(str(tmp_path / "in memory"), **ARGUMENTS), train_dataset=rows)
    expected.train()
    args = MemascendArguments(str(tmp_path / "out"), host_memory="64MiB", **ARGUMENTS)
    trainer = Trainer(str(tmp_path / "model"), args, train_dataset=rows)
    trainer.train()
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    memascend.close(trainer.model)
