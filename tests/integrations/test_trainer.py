"""transformers' Trainer over an offloaded model gives the bits of the same Trainer over a model in memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
import trainer_runs
from bit_equality import differing
from torch import nn
from trainer_runs import InterruptAt, build, interrupted, logged, make, weights
from transformers import EarlyStoppingCallback, LlamaForCausalLM, TrainingArguments
from transformers import Trainer as PlainTrainer

import memascend
from memascend.integrations.named_checkpoints import MANIFEST
from memascend.integrations.transformers import MemascendArguments, Trainer, TrainerMixin
from memascend.integrations.transformers import _tokens_in as tokens_in

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one batch a step, by epochs": {
        "gradient_accumulation_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "max_grad_norm": 0.0,
    },
    "bfloat16 and checkpointing": {"bf16": True, "gradient_checkpointing": True, "weight_decay": 0.1},
    "label smoothing, noise, best": {
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5.0,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    },
    "8 bits": {"optim": "adamw_8bit"},
    "lion": {"optim": "lion_32bit", "learning_rate": 1e-3},
    "sgd with momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "bfloat16 states": {"optim_args": "states=bfloat16, master=False, seed=3"},
    "on a plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_on_start": True},
}


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    build().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def load(folder: str) -> nn.Module:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_a_run_is_that_of_a_model_in_memory(
    arguments: dict[str, Any], offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    expected = make(build(), tmp_path / "in memory", **arguments)
    expected.train()
    trainer = make(offloaded(build()), tmp_path / "out", **arguments)
    trainer.train()
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    assert trainer.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]
    assert not differing(weights(trainer.model), weights(expected.model))


def test_a_checkpoint_is_small_and_goes_with_its_folder(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    trainer = make(offloaded(build()), tmp_path / "out", save_total_limit=2)
    trainer.train()
    folders = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [folder.name for folder in folders] == ["checkpoint-12", "checkpoint-9"]
    assert {tag for tag, _, _ in memascend.checkpoints(trainer.model)} == {"checkpoint-9", "checkpoint-12"}
    assert all(sum(file.stat().st_size for file in folder.iterdir()) < 20_000 for folder in folders)
    trainer.save_model(str(tmp_path / "final"))
    final = type(build()).from_pretrained(tmp_path / "final", dtype="auto")
    assert not differing(dict(final.named_parameters()), weights(trainer.model))


@pytest.mark.parametrize(
    ("step", "event"),
    [
        *((4, event) for event in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")),
        *((6, event) for event in ("on_log", "on_evaluate", "on_save", "on_epoch_end")),
        (1, "on_step_begin"),
        (12, "on_save"),
        (12, "on_train_end"),
    ],
)
def test_an_interrupted_run_goes_on_with_the_same_bits(
    step: int, event: str, model_folder: str, tmp_path: Path
) -> None:
    expected = make(load(model_folder), tmp_path / "in memory")
    expected.train()
    interrupted(make(model_folder, tmp_path / "out", offload=True, callbacks=[InterruptAt(step, event)]))
    trainer = make(model_folder, tmp_path / "out", offload=True)
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    names = {f"checkpoint-{number}" for number in (3, 6, 9, 12)}
    assert {tag for tag, _, _ in memascend.checkpoints(trainer.model)} == names
    assert {path.parent.name for path in (tmp_path / "out").glob(f"*/{MANIFEST}")} == names
    memascend.close(trainer.model)


def test_layers_take_micro_batches_of_a_step(model_folder: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    in_memory = memascend.run_in_tiles(memascend.run_in_slices(load(model_folder), 1), 12)
    expected = make(in_memory, tmp_path / "in memory", **arguments, per_device_eval_batch_size=2)
    expected.train()
    arguments |= {"offload": True, "micro_batch_size": 1, "tile_tokens": "12", "per_device_eval_batch_size": 2}
    interrupted(make(model_folder, tmp_path / "out", callbacks=[InterruptAt(4, "on_step_begin")], **arguments))
    trainer = make(model_folder, tmp_path / "out", **arguments)
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    memascend.close(trainer.model)


def test_the_last_batch_of_an_iterable_data_set_counts_as_in_memory(model_folder: str, tmp_path: Path) -> None:
    """10 samples in batches of 4: accelerate has to know that the last batch has two."""

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(trainer_runs.data(10))

    losses = []
    for offload in (False, True):
        model = model_folder if offload else load(model_folder)
        trainer = make(model, tmp_path / str(offload), offload=offload, per_device_eval_batch_size=4)
        losses.append(trainer.evaluate(Stream())["eval_loss"])
    assert losses[1] == losses[0]
    memascend.close(trainer.model)


def test_a_budget_that_follows_the_machine_needs_no_call(model_folder: str, tmp_path: Path) -> None:
    trainer = make(model_folder, tmp_path / "auto", offload=True, host_memory="auto")
    trainer.train()
    assert memascend.stats(trainer.model)["host_memory_auto"]
    fixed = make(model_folder, tmp_path / "fixed", offload=True)
    fixed.train()
    assert logged(trainer) == logged(fixed)
    for one in (trainer, fixed):
        memascend.close(one.model)


def test_a_run_that_is_there_is_not_trained_as_a_new_one(model_folder: str, tmp_path: Path) -> None:
    interrupted(make(model_folder, tmp_path / "out", offload=True, callbacks=[InterruptAt(5, "on_step_begin")]))
    trainer = make(model_folder, tmp_path / "out", offload=True)
    with pytest.raises(ValueError, match=r"holds a run after step 4: train\(resume_from_checkpoint=True\)"):
        trainer.train()
    memascend.close(trainer.model)


def test_its_figures_are_reported(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    from memascend.report.run import read_run

    trainer = make(offloaded(build()), tmp_path / "out")
    trainer.train()
    logged_first = trainer.state.log_history[0]
    assert logged_first["memascend/ssd_bytes_written"] > 0 and logged_first["memascend/tokens"] == 2 * 2 * 16
    assert logged_first["memascend/seconds_compute"] > 0
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    run = read_run(tmp_path / "out" / "metrics.jsonl")
    assert [record["record"] for record in run.openings] == ["start", "resume"]
    assert list(run.records) == [2, 4, 6, 8, 10, 12] and list(run.evaluations) == [3, 6, 9, 12]
    assert all(value and value > 0 for value in run.column("seconds") if value is not None)
    assert run.moved("bytes_written") and not run.unreadable


def test_it_goes_back_to_a_checkpoint(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    trainer = make(offloaded(build()), tmp_path / "out")
    trainer.train()
    expected, expected_log = weights(trainer.model), logged(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert logged(trainer) == expected_log
    assert not differing(weights(trainer.model), expected)
    memascend.delete_checkpoint(trainer.model, "checkpoint-6")
    with pytest.raises(memascend.StoreError, match="checkpoint-6"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))


def test_early_stopping_takes_the_best_model(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_steps": 1,
        "save_steps": 1,
        "learning_rate": 0.5,
    }

    def stopping() -> list[Any]:
        return [EarlyStoppingCallback(early_stopping_patience=2)]

    expected = make(build(), tmp_path / "in memory", callbacks=stopping(), **options)
    expected.train()
    trainer = make(offloaded(build()), tmp_path / "out", callbacks=stopping(), **options)
    trainer.train()
    assert trainer.state.global_step == expected.state.global_step < 12
    assert trainer.state.best_global_step == expected.state.best_global_step
    assert not differing(weights(trainer.model), weights(expected.model))


def test_a_plain_checkpoint_is_taken_up(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    before = make(build(), tmp_path / "in memory")
    before.train()
    trainer = make(offloaded(build()), tmp_path / "out")
    trainer.train(resume_from_checkpoint=str(tmp_path / "in memory" / "checkpoint-9"))
    assert not differing(weights(trainer.model), weights(before.model))


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ({"optim": "adafactor"}, {}, "optim='adafactor'"),
        ({"fp16": True}, {}, "bf16=True"),
        ({"bf16_full_eval": True}, {}, "bf16_full_eval"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({}, {"durability": "none"}, "durability='step'"),
        ({"push_to_hub": True, "hub_strategy": "every_save"}, {}, "hub_strategy='end'"),
    ],
)
def test_what_cannot_be_done_is_refused_first(
    arguments: dict[str, Any], options: dict[str, Any], named: str, offloaded: Callable[..., nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        make(offloaded(build(), **options), tmp_path / "out", **arguments)


def test_compiling_a_model_says_that_its_layers_are_not_compiled(
    offloaded: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("BACKEND", "MODE", "USE_DYNAMIC"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")  # which the arguments set for the whole process
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    expected = make(build(), tmp_path / "in memory")
    expected.train()
    trainer = make(offloaded(build()), tmp_path / "out", torch_compile_backend="aot_eager")
    trainer.train()
    assert logged(trainer) == logged(expected)
    told = [record.getMessage() for record in caplog.records if "does not compile its layers" in record.getMessage()]
    assert [text.split(": ", 1)[1] for text in told] == ["for layer in model.model.layers: layer.compile()"]


def test_an_optimizer_of_pytorch_is_refused(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(build())
    args = TrainingArguments(str(tmp_path / "out"), **trainer_runs.ARGUMENTS)
    with pytest.raises(ValueError, match="AdamW of PyTorch keeps states in memory"):
        Trainer(model, args, optimizers=(torch.optim.AdamW(model.parameters()), None))


def test_a_budget_has_to_be_given(model_folder: str, tmp_path: Path) -> None:
    args = MemascendArguments(str(tmp_path / "out"), use_cpu=True)
    with pytest.raises(ValueError, match="host_memory is not given"):
        Trainer(model_folder, args)


def test_a_model_of_the_hub_is_taken_by_its_name(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, **_: Any) -> str:
        assert repo_id == "org/small"
        return model_folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    trainer = make("org/small", tmp_path / "out", offload=True)
    assert not differing(weights(trainer.model), weights(load(model_folder)))
    memascend.close(trainer.model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: os.stat(tmp_path / "none"))
    with pytest.raises(memascend.CheckpointError, match="org/small is no directory, and cannot be downloaded"):
        make("org/small", tmp_path / "other", offload=True)


def test_a_trainer_that_cannot_be_made_leaves_no_store(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adafactor"):
        make(model_folder, tmp_path / "out", offload=True, optim="adafactor")
    assert not list((tmp_path / "out" / "store").iterdir())
    memascend.close(make(model_folder, tmp_path / "out", offload=True).model)


def test_any_other_trainer_takes_the_mixin(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    class Halved(PlainTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return (found[0] / 2, found[1]) if isinstance(found, tuple) else found / 2

    class HalvedTrainer(TrainerMixin, Halved): ...

    expected = make(build(), tmp_path / "in memory", cls=HalvedTrainer)
    expected.train()
    trainer = make(offloaded(build()), tmp_path / "out", cls=HalvedTrainer)
    trainer.train()
    assert not differing(weights(trainer.model), weights(expected.model))


def test_apollo_by_its_name(tmp_path: Path) -> None:
    named = {"optim": "apollo_adamw", "optim_args": "rank=8,scale=2", "optim_target_modules": ["mlp"]}
    trainer = make(build(), tmp_path / "out", offload=True, max_steps=2, weight_decay=0.1, **named)
    trainer.train()
    matrices, rest, vectors = trainer._own_optimizer().param_groups
    assert isinstance(trainer._own_optimizer(), memascend.Apollo)
    assert (matrices["rank"], matrices["scale"], matrices["weight_decay"], len(matrices["params"])) == (8, 2, 0.1, 6)
    assert (rest["rank"], rest["weight_decay"], vectors["rank"], vectors["weight_decay"]) == (None, 0.1, None, 0.0)
    memascend.close(trainer.model)


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_module_of_ones_own_is_saved(tmp_path: Path, save_only_model: bool) -> None:
    """transformers has safetensors write its `state_dict()`, and looks for shared memory there."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.last(torch.relu(self.first(x)))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": torch.full((8,), float(i)), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = {"use_cpu": True, "report_to": [], "max_steps": 2, "save_steps": 1, "disable_tqdm": True}
    saved = []
    for name in ("in memory", "on SSD"):
        model: nn.Module = Own()
        if name == "on SSD":
            model = memascend.offload(model, store=tmp_path / "store", host_memory="64MiB", keep_store=False)
        out = TrainingArguments(str(tmp_path / name), save_only_model=save_only_model, **arguments)
        trainer = Trainer(model, out, train_dataset=rows)
        trainer.train()
        trainer.save_model(tmp_path / name / "saved")
        folders = ["saved", *(["checkpoint-1", "checkpoint-2"] if save_only_model else [])]
        saved.append([(tmp_path / name / folder / "model.safetensors").read_bytes() for folder in folders])
        memascend.close(model)
    assert saved[1] == saved[0]


def test_a_model_in_memory_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that has changed its import of Trainer alone trains in memory, which nothing else would say."""
    monkeypatch.setattr(logging.getLogger("memascend"), "propagate", True)  # The command has it print by itself.
    caplog.set_level(logging.WARNING, "memascend")
    make(build(), tmp_path / "a")
    assert "Trainer trains the model in memory, as transformers does: nothing of it is on SSD" in caplog.text
    assert "in the place of TrainingArguments" in caplog.text
    caplog.clear()
    trainer = make(build(), tmp_path / "b", offload=True)
    memascend.close(trainer.model)
    assert "in memory" not in caplog.text


def test_tokens_are_counted_under_any_name() -> None:
    ids, embedded = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 5, 8)
    for inputs, tokens in (
        ({"input_ids": ids, "labels": ids, "decoder_input_ids": ids}, 6),
        ({"chosen_input_ids": ids, "rejected_input_ids": ids[:1]}, 9),
        ({"inputs_embeds": embedded}, 10),
        ({"input_features": embedded, "labels": ids}, 6),
        ({"pixel_values": embedded, "labels": ids[0]}, 0),
        ({"x": ids, "y": ids[0], "x_mask": torch.ones(4, 9, dtype=torch.long)}, 6),
        ({"source": ids, "labels": embedded[:, :2, 0]}, 6),
    ):
        assert tokens_in(inputs) == tokens, inputs
