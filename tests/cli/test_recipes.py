"""`memascend finetune --task`: the bits of the same trainer over a model in memory, and refusals."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import faults
import pytest
import requirements
import torch
from bit_equality import differing
from chat_models import folder_of, tokenizer
from commands import command
from safetensors.torch import load_file
from trainer_runs import weights
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, TrainingArguments, set_seed

from memascend.cli import main
from memascend.integrations.transformers import Trainer, TrainerMixin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

datasets = requirements.package("trl", "datasets")
trl = requirements.package("trl")
requirements.package("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(8)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS,
    "kto": [{"prompt": f"{n}+{n}=", "completion": str(2 * n + n % 2), "label": n % 2 == 0} for n in range(8)],
    "orpo": PAIRS,
    "reward": [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PAIRS],
    "classify": [{"text": f"{n}+{n}={2 * n + n % 2}", "label": "wrong" if n % 2 else "right"} for n in range(8)],
}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "seed": 0,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture
def room(tmp_path: Path) -> Path:
    folder_of(tmp_path / "model")
    for task, rows in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def words(room: Path, task: str, *others: str, out: str = "out", steps: int = 3) -> list[str]:
    chosen = ["finetune", str(room / "model"), "--task", task, "--data", str(room / f"{task}.jsonl")]
    chosen += ["--out", str(room / out), "--store", str(room / "store"), "--host-memory", "64MiB"]
    chosen += ["--steps", str(steps), "--batch-size", "2", "--grad-accum", "2", "--lr", "1e-2"]
    return [*chosen, "--schedule", "constant", "--seq-len", "64", "--dtype", "bfloat16", *others]


def in_memory(room: Path, task: str) -> dict[str, torch.Tensor]:
    """Return the weights that the same trainer gives a model in memory."""
    rows, source, named = datasets.Dataset.from_list(ROWS[task]), room / "model", {}
    folder = str(room / "in memory")
    set_seed(0)
    if task in ("reward", "classify"):
        labels = 1 if task == "reward" else 2
        model: Any = LlamaForSequenceClassification.from_pretrained(source, dtype=torch.bfloat16, num_labels=labels)
    else:
        model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if task in ("dpo", "kto"):
        named["ref_model"] = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if task == "classify":
        codes = [tokenizer()(row["text"]) for row in ROWS[task]]
        rows = datasets.Dataset.from_list(
            [dict(code) | {"labels": int(row["label"] == "wrong")} for code, row in zip(codes, ROWS[task], strict=True)]
        )
        cls, arguments = Trainer, TrainingArguments(folder, **ARGUMENTS)
    elif task == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        cls = type("InMemory", (TrainerMixin, ORPOTrainer), {})
        arguments = ORPOConfig(folder, **ARGUMENTS, max_length=64)
    else:
        title = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}[task]
        cls = type("InMemory", (TrainerMixin, getattr(trl, f"{title}Trainer")), {})
        arguments = getattr(trl, f"{title}Config")(folder, **ARGUMENTS, max_length=64)
    trainer: Any = cls(model, args=arguments, train_dataset=rows, processing_class=tokenizer(), **named)
    trainer.train()
    return weights(trainer.model)


def written(room: Path, out: str = "out") -> dict[str, torch.Tensor]:
    return load_file(room / out / "model.safetensors")


@pytest.mark.parametrize("task", ROWS)
def test_a_task_has_the_bits_of_its_trainer_in_memory(room: Path, task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words(room, task)) == 0, capfd.readouterr().err
    assert not differing(written(room), in_memory(room, task))
    assert (room / "out" / "tokenizer.json").is_file()
    # Neither store is left.
    assert not [path for name in ("store", "store-reference") for path in (room / name).glob("*")]


def test_adapters_and_options_of_the_trainer(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = words(room, "dpo", "--lora-rank", "4", "--trainer-options", "beta=0.5", "loss_type=ipo", "--eval", "0.25")
    assert main.main(chosen) == 0, capfd.readouterr().err
    assert (room / "out" / "adapter_model.safetensors").is_file()
    assert not (room / "store-reference").exists()


def test_what_is_there_is_not_replaced(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (room / "out").write_text("mine")
    assert main.main(words(room, "orpo", "--resume")) == main.BAD_INPUT
    assert "already exists" in capfd.readouterr().err
    assert (room / "out").read_text() == "mine"


def test_a_killed_task_goes_on_to_the_same_bits(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = words(room, "orpo", steps=12)
    metrics = room / "out" / "metrics.jsonl"
    with faults.Child(room, command, chosen) as child:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            assert child.alive(), child.wait().err
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert main.main(chosen) == main.BAD_INPUT
    assert "--resume" in capfd.readouterr().err
    assert main.main([*chosen, "--resume"]) == 0, capfd.readouterr().err
    assert main.main([*chosen, "--resume"]) == 0
    assert "the run has finished" in capfd.readouterr().out
    assert main.main(words(room, "orpo", out="whole", steps=12)) == 0
    assert not differing(written(room), written(room, "whole"))


@pytest.mark.parametrize(
    ("task", "others", "told"),
    [
        ("dpo", ["--in-memory"], "--in-memory works only with the tasks sft and pretrain"),
        ("dpo", ["--trainer-options", "betta=0.1"], "DPOConfig has no betta: did you mean beta?"),
        ("dpo", ["--trainer-options", "learning_rate=1"], "is what --lr says"),
        ("dpo", ["--trainer-options", "beta"], "not of the form NAME=VALUE"),
        ("reward", ["--lora-rank", "4"], "leave out --lora-rank"),
        ("sft", ["--trainer-options", "beta=1"], "--trainer-options works only with the tasks dpo"),
        ("dpo", ["--lora-rank", "4", "--experts", "pieces"], "--experts works only with the tasks sft and pretrain"),
        ("dpo", ["--sample", "Hello"], "--sample works only with the tasks"),
        ("dpo", ["--optimizer", "apollo-mini"], "apollo-mini is not for --task"),
    ],
)
def test_what_does_not_go_together_is_refused(
    room: Path, task: str, others: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (room / "sft.jsonl").write_text((room / "kto.jsonl").read_text())
    assert main.main(words(room, task, *others)) == main.BAD_INPUT
    assert told in capfd.readouterr().err
    assert not (room / "out").exists() and not (room / "store").exists()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_text('{"prompt": "a", "chosen": "b"}\n'), "has no column rejected"),
        (lambda path: path.write_text("{not json"), "cannot be read"),
        (lambda path: path.write_text(""), "cannot be read"),
        (lambda path: path.unlink(), "no such file"),
    ],
    ids=["a column is missing", "no JSON", "empty", "absent"],
)
def test_data_that_does_not_fit_is_named(
    room: Path, make: Callable[[Path], Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make(room / "dpo.jsonl")
    assert main.main(words(room, "dpo")) == main.BAD_INPUT
    err = capfd.readouterr().err
    assert told in err and "dpo.jsonl" in err, err


def test_an_interrupt_keeps_the_last_step(room: Path) -> None:
    chosen = words(room, "orpo", steps=200)
    metrics = room / "out" / "metrics.jsonl"
    with faults.Child(room, command, chosen) as child:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
            assert child.alive(), child.wait().err
        os.kill(child.pid, signal.SIGINT)
        ended = child.wait()
    assert ended.code == 130 and "--resume goes on" in ended.err and "Traceback" not in ended.err
    assert (room / "store").exists(), ended.err
