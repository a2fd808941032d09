"""`memascend finetune --task`: the bits of the same trainer over a model in memory, and refusals."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import faults
import pytest
import requirements
import torch
from bit_equality import differing
from chat_models import folder_of, tokenizer
from commands import command, listing
from safetensors.torch import load_file
from trainer_runs import weights
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, TrainingArguments, set_seed

from memascend.cli import main, space
from memascend.errors import DataError
from memascend.integrations.transformers import Trainer, TrainerMixin
from memascend.recovery.resume import read_record

if TYPE_CHECKING:
    from collections.abc import Callable

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
#: Of runs that are ended before: long beside the time that a look at their metrics takes.
STEPS = 16
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


def end_by(number: signal.Signals, chosen: list[str], room: Path, steps: int = 2) -> faults.Ended:
    """Run a command, and end it by a signal after so many more steps."""
    metrics = room / "out" / "metrics.jsonl"
    before = taken(room) if metrics.exists() else []
    with faults.Child(room, command, chosen) as child:
        while not metrics.exists() or len(taken(room)) < len(before) + steps:
            assert child.alive(), child.wait().err
            time.sleep(0.005)
        os.kill(child.pid, number)
        return child.wait()


def taken(room: Path) -> list[int]:
    """Return the steps in the metrics file, those lines that are whole."""
    lines = (room / "out" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [record["step"] for record in records if record["record"] == "step"]


@pytest.mark.parametrize(
    ("task", "others"),
    [
        ("classify", ["--eval", "0.25", "--eval-steps", "2", "--durability", "every:50"]),
        ("dpo", ["--lora-rank", "4"]),
        ("orpo", []),
    ],
    ids=["evaluated", "adapters", "orpo"],
)
def test_a_task_goes_on_after_every_kind_of_end(
    room: Path, capfd: pytest.CaptureFixture[str], task: str, others: list[str]
) -> None:
    """Ended by SIGTERM, SIGKILL and Ctrl-C in turn, a task ends with the bits of the run that nothing ended."""
    again = [*words(room, task, *others, steps=STEPS), "--resume"]
    name = "adapter_model.safetensors" if "--lora-rank" in others else "model.safetensors"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        ended = end_by(number, again, room)
        assert ended.code == (-number if number == signal.SIGKILL else 128 + number), ended.err
        assert "Traceback" not in ended.err
        if number != signal.SIGKILL:
            assert f"holds the model after step {taken(room)[-1]}" in ended.err
            assert f"holds the run after step {taken(room)[-1]}: --resume goes on" in ended.err
            assert json.loads((room / "out" / "interrupted.json").read_text())["steps"] == taken(room)[-1]
            assert "--lora-rank" in others or read_record([room / "store"])["steps"] == taken(room)[-1]
        assert (room / "out" / name).is_file()  # The model so far stays through SIGKILL.
    assert main.main(again[:-1]) == main.BAD_INPUT
    assert "--resume" in capfd.readouterr().err
    assert main.main(again) == 0, capfd.readouterr().err
    assert main.main(again) == 0
    assert "the run has finished" in capfd.readouterr().out
    assert main.main(words(room, task, *others, out="whole", steps=STEPS)) == 0
    assert not differing(load_file(room / "out" / name), load_file(room / "whole" / name))
    assert listing(room / "out").keys() == listing(room / "whole").keys()
    assert taken(room) == list(range(1, STEPS + 1))


def test_a_resumed_task_needs_the_options_that_it_had(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = ["--keep-store"]
    assert main.main(words(room, "orpo", *kept, steps=2)) == 0
    for changed, told in (
        (["--lr", "1e-3"], "--lr is 0.001, but the run in the store has 0.01: --resume needs the same, and --resume"),
        (["--trainer-options", "beta=0.3"], "--trainer-options is {'beta': 0.3}, but the run in the store has {}"),
        (["--seed", "1"], "--seed is 1, but"),
    ):
        refused = [*words(room, "orpo", *kept, *changed, out="other", steps=2), "--resume"]
        assert main.main(refused) == main.BAD_INPUT
        assert told in capfd.readouterr().err and not (room / "other").exists()
    # A batch of another size would begin elsewhere in the data.
    refused = [*words(room, "orpo", *kept, "--grad-accum", "1", out="other", steps=2), "--resume", "--change"]
    assert main.main(refused) == main.BAD_INPUT
    assert "--grad-accum is 1, but the run in the store has 2: --resume needs the same\n" in capfd.readouterr().err
    (room / "dpo.jsonl").write_text((room / "orpo.jsonl").read_text() * 2)
    refused = words(room, "orpo", *kept, "--resume", out="other", steps=2)
    assert main.main([word.replace("orpo.jsonl", "dpo.jsonl") for word in refused]) == main.BAD_INPUT
    assert "the data is not that of the run in the store" in capfd.readouterr().err
    sft = ["finetune", str(room / "model"), "--data", str(room / "dpo.jsonl"), "--out", str(room / "other"), "--resume"]
    assert main.main([*sft, "--store", str(room / "store"), "--host-memory", "64MiB"]) == main.BAD_INPUT
    assert "holds a run of another trainer" in capfd.readouterr().err


def test_a_task_goes_on_with_changed_options(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words(room, "orpo", "--keep-store", steps=2)) == 0
    longer = [*words(room, "orpo", "--keep-store", steps=4), "--resume", "--change"]
    assert main.main(longer) == 0, capfd.readouterr().err
    assert "note: --steps 2 -> 4: 4 steps in all" in capfd.readouterr().err
    assert taken(room) == [1, 2, 3, 4]
    assert main.main([*words(room, "orpo", out="whole", steps=4), "--replace-store"]) == 0
    assert not differing(written(room), written(room, "whole"))


def test_a_task_goes_on_with_another_rate(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words(room, "orpo", "--keep-store", steps=2)) == 0
    other = [*words(room, "orpo", "--keep-store", "--lr", "1e-3", steps=3), "--resume", "--change"]
    assert main.main(other) == 0, capfd.readouterr().err
    assert "note: --lr 0.01 -> 0.001: from step 3 on" in capfd.readouterr().err
    records = map(json.loads, (room / "out" / "metrics.jsonl").read_text().splitlines())
    assert [one["lr"] for one in records if one["record"] == "step"] == [1e-2, 1e-2, 1e-3]


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
    ("task", "copies", "others", "told"),
    [
        ("dpo", 0.9, [], "the store takes at least"),
        ("reward", 0.4, [], "the store takes at least"),
        ("dpo", 1.2, [], None),
        ("dpo", 1.2, ["--durability", "step"], "leave out --durability"),
    ],
)
def test_room_for_the_store_is_looked_for_first(
    room: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    task: str,
    copies: float,
    others: list[str],
    told: str | None,
) -> None:
    assert main.main(["plan", str(room / "model"), "--seq-len", "64", "--dtype", "bfloat16", "--json"]) == 0
    free = int(copies * json.loads(capfd.readouterr().out)["ssd_space"]["second_slot_bytes"])
    monkeypatch.setattr(space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=1 << 40))
    ended = main.main(words(room, task, *others, steps=1))
    assert ended == (0 if told is None else main.BAD_INPUT)
    if told is not None:
        assert told in capfd.readouterr().err
        assert not (room / "out").exists() and not (room / "store").exists()


def test_a_copied_reference_needs_room_where_it_lies(tmp_path: Path) -> None:
    free = space.shutil.disk_usage(tmp_path).free
    copy = tmp_path / "store-reference"
    assert space._taken_by(copy, 1 << 20, [tmp_path]) == 1 << 20
    assert space._taken_by(copy, 1 << 20, [Path("/dev/shm")]) == 0
    with pytest.raises(DataError, match=r"the model before the training would be copied to .*store-reference"):
        space._taken_by(copy, 2 * free, [Path("/dev/shm")])


def test_a_model_of_another_kind_is_judged_as_it_is_opened(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = LlamaForSequenceClassification.from_pretrained(room / "model", dtype=torch.bfloat16, num_labels=2)
    model.save_pretrained(room / "model")
    assert main.main(words(room, "classify", steps=1)) == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_text('{"prompt": "a", "chosen": "b"}\n'), "has no column rejected"),
        (lambda path: path.write_text("{not json"), "cannot be read"),
        (lambda path: path.write_text(""), "is empty: give a file with rows"),
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
