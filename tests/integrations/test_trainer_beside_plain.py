"""A Trainer beside transformers' own: its output, its arguments, and how clipping differs."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bit_equality import differing
from trainer_runs import build, data, weights
from transformers import Trainer as PlainTrainer
from transformers import TrainerCallback, TrainingArguments

import memascend
from memascend.integrations.transformers import MemascendArguments, Trainer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "max_steps": 4,
    "logging_steps": 2,
    "save_strategy": "no",
    "learning_rate": 1e-2,
}


def plain(folder: Path, **arguments: Any) -> PlainTrainer:
    args = TrainingArguments(str(folder), **ARGUMENTS | {"disable_tqdm": True} | arguments)
    return PlainTrainer(build().float(), args, train_dataset=data(8))


def ours(folder: Path, callbacks: Iterable[TrainerCallback] = (), **arguments: Any) -> Trainer:
    args = MemascendArguments(str(folder), host_memory="64MiB", **ARGUMENTS | {"disable_tqdm": True} | arguments)
    return Trainer(build().float(), args, train_dataset=data(8), callbacks=list(callbacks))


class Reporter(TrainerCallback):
    """Notes the calls that a reporter gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        self.logs.append(dict(logs or {}))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_lines_are_as_long_as_transformers_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disable_tqdm: bool
) -> None:
    def printed() -> list[set[str]]:
        lines = re.findall(r"\{.*'loss'.*\}", capsys.readouterr().out)
        return [set(re.findall(r"'([^']+)':", line)) for line in lines]

    plain(tmp_path / "plain", disable_tqdm=disable_tqdm).train()
    expected = printed()
    trainer = ours(tmp_path / "ours", [reporter := Reporter()], disable_tqdm=disable_tqdm)
    trainer.train()
    assert len(expected) == 2 and printed() == expected
    steps = [logs for logs in reporter.logs if "loss" in logs]
    assert len(steps) == 2 and all("memascend/ssd_bytes_read" in logs for logs in steps)
    assert all("memascend/ssd_bytes_read" in entry for entry in trainer.state.log_history if "loss" in entry)
    assert all("on_log" not in vars(callback) for callback in trainer.callback_handler.callbacks)
    memascend.close(trainer.model)


def test_a_class_in_the_place_of_arguments_is_named(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")
    for model in (str(tmp_path / "model"), build()):
        for args in (TrainingArguments, MemascendArguments):
            with pytest.raises(
                TypeError, match=rf"args is the class {args.__name__}.*give {args.__name__}\(output_dir"
            ):
                Trainer(model, args, train_dataset=data(8))
    with pytest.raises(ValueError, match=r"given by its directory, .*model, and nothing says where it goes"):
        Trainer(str(tmp_path / "model"), train_dataset=data(8))


def clip_in_fp64(parameters: Iterable[nn.Parameter], max_norm: float, **_: Any) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_`, with a sum of squares in fp64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32))
    return torch.tensor(norm, dtype=torch.float32)


def test_clipping_differs_by_the_sum_of_the_norm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/trainer.md says so: weights in float32 beside transformers' Trainer with PyTorch's AdamW."""

    def trained(trainer: PlainTrainer) -> dict[str, torch.Tensor]:
        trainer.train()
        found = weights(trainer.model)
        if isinstance(trainer, Trainer):
            memascend.close(trainer.model)
        return found

    def most(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        return max(float((found[name] - value).abs().max()) for name, value in expected.items())

    unclipped = [trained(make(tmp_path / make.__name__, max_grad_norm=0.0)) for make in (plain, ours)]
    assert not differing(*unclipped)
    expected = trained(plain(tmp_path / "clipped", max_grad_norm=0.1))
    found = trained(ours(tmp_path / "ours clipped", max_grad_norm=0.1))
    assert most(found, expected) < 1e-5
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_in_fp64)
    assert not differing(found, trained(plain(tmp_path / "fp64", max_grad_norm=0.1)))
