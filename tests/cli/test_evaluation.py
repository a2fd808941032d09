"""`--eval`: the loss on held-out data as a run goes on, and the best model at its end."""

from __future__ import annotations

import json
import os
import re
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models
import torch
import transformers
from commands import command, in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import memascend
from memascend.cli import main, space
from memascend.cli.data import ByteTokenizer
from memascend.cli.dataset import Reader
from memascend.cli.settings import Settings
from memascend.common import progress
from memascend.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

RUN: dict[str, Any] = {"steps": 9, "lr": 1e-2, "schedule": "constant", "eval_steps": 2}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    made = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    documents = tmp_path / "documents"
    documents.mkdir()
    lines = (tmp_path / "text.txt").read_text().splitlines()
    for number in range(40):
        (documents / f"{number:02}.txt").write_text("\n".join(lines[number * 5 : number * 5 + 5]))
    # The training data has none of these bytes: the loss on them rises.
    (tmp_path / "other.txt").write_text("".join(chr(192 + number % 64) for number in range(300)))
    return made


def words(model_dir: Path, out: str, **changed: Any) -> list[str]:
    room = model_dir.parent
    evaluated = {"data": room / "documents", "eval": room / "other.txt"}
    return words_of(model_dir, room / out, room / "store", **RUN | evaluated | changed)


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["record"] == kind]


def loss_of(model_dir: Path, weights: Path) -> float:
    """Return the loss of written weights on held-out data, without anything of the Trainer's."""
    room = model_dir.parent
    scratch = room / f"scratch-{weights.name}"
    scratch.mkdir()
    chosen: dict[str, Any] = {"seq_len": 32, "evaluation": [room / "other.txt"], "boundaries": "on"}
    settings = Settings(model_dir=model_dir, data=[], out=room, **chosen)
    reader = Reader(settings, ByteTokenizer(), 256 + 2, scratch)
    _, held_out = reader.divided(reader.documents([room / "documents"]), None, reader.documents([room / "other.txt"]))
    assert held_out is not None
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    batches = [held_out.padded([held_out.row(row)]) for row in range(len(held_out))]
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    with torch.no_grad():
        losses = [model(**batch).loss.item() * count for batch, count in zip(batches, tokens, strict=True) if count]
    reader.close()
    return sum(losses) / sum(tokens)


def test_an_evaluation_shows_how_far_it_is(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.0)
    assert main.main(in_memory(words(model_dir, "out", steps=1))) == 0
    told = capfd.readouterr().err
    shown = re.findall(r"^training 0/1  evaluating (\d+)/(\d+)", told, re.MULTILINE)
    batches = int(shown[0][1])
    assert [int(done) for done, _ in shown] == list(range(1, batches)), told
    assert re.search(rf"^training 1/1  evaluating {batches - 1}/{batches}", told, re.MULTILINE)


def test_the_loss_does_not_depend_on_the_batch_size(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of completions of very different lengths, one in each sequence."""
    room = model_dir.parent
    lines = [{"prompt": "a" * (number % 5), "completion": "xyz" * (number**2 % 9 + 1)} for number in range(11)]
    (room / "held.jsonl").write_text("\n".join(map(json.dumps, lines)))
    losses = []
    for batch_size in (1, 4, 11):
        out = f"out{batch_size}"
        run = words(model_dir, out, eval=room / "held.jsonl", steps=1, batch_size=batch_size, dtype="float32")
        assert main.main([*in_memory(run), "--no-packing"]) == 0, capfd.readouterr().err
        losses.append(records(room / out, "eval")[0]["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("free_share", [0.5, 0.9, 1.1])
@pytest.mark.parametrize("durability", ["auto", "step"])
def test_room_for_the_best_model_is_looked_for_first(
    model_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    free_share: float,
) -> None:
    room = model_dir.parent
    assert main.main(["plan", str(model_dir), "--seq-len", "32", "--dtype", "bfloat16", "--json"]) == 0
    alone = json.loads(capfd.readouterr().out)["ssd_space"]
    assert main.main(["plan", str(model_dir), "--seq-len", "32", "--dtype", "bfloat16", "--json", "--eval"]) == 0
    with_best = json.loads(capfd.readouterr().out)["ssd_space"]
    assert with_best["kept_bytes"] == alone["second_slot_bytes"] > 0
    assert with_best["total_bytes"] == alone["total_bytes"] + with_best["kept_bytes"]
    assert alone["total_bytes"] < 0.9 * with_best["total_bytes"]
    free = int(free_share * with_best["total_bytes"])
    monkeypatch.setattr(space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=1 << 40))
    seen = sorted(room.rglob("*"))
    run = [*words(model_dir, "out", steps=1), "--durability", durability]
    # Without --durability such a run does without durable steps, and then keeps nothing in the store.
    refused = free_share == 0.9 or (free_share == 0.5 and durability == "step")
    assert main.main(run) == (main.BAD_INPUT if refused else 0)
    if refused:
        assert "for the best model, as --eval keeps it" in capfd.readouterr().err
        assert sorted(room.rglob("*")) == seen


@pytest.mark.parametrize("where", ["store", "memory", "without-durable-steps"])
def test_the_best_model_is_written(model_dir: Path, capfd: pytest.CaptureFixture[str], where: str) -> None:
    room = model_dir.parent
    chosen = words(model_dir, "out")
    chosen = in_memory(chosen) if where == "memory" else chosen
    chosen += ["--durability", "none"] if where == "without-durable-steps" else []
    assert main.main(chosen) == 0, capfd.readouterr().err
    told = capfd.readouterr()
    evaluations = records(room / "out", "eval")
    assert [one["step"] for one in evaluations] == [0, 2, 4, 6, 8, 9]
    losses = {one["step"]: one["loss"] for one in evaluations}
    best = min((step for step in losses if step), key=lambda step: losses[step])
    assert best < 9, losses  # else nothing was gone back to
    assert f"the best after step {best} (loss {losses[best]:.4f} on held-out data)" in told.out
    assert told.err.count("the least so far") >= 1
    assert loss_of(model_dir, room / "out") == pytest.approx(losses[best], abs=2e-3)
    assert loss_of(model_dir, model_dir) == pytest.approx(losses[0], abs=2e-3)
    assert not (room / "store").exists() or list((room / "store").iterdir()) == []
    # The evaluations change nothing: the steps are as in a run without.
    assert main.main([*words(model_dir, "again", eval_steps=9), "--force"]) == 0
    taken = [[step["loss"] for step in records(room / out, "step")] for out in ("out", "again")]
    assert taken[0] == taken[1]


def test_a_run_that_goes_on_has_the_best_model_of_before(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    assert main.main([*words(model_dir, "whole"), "--keep-store"]) == 0
    best = records(room / "whole", "end")[0]["evaluations"][1]["step"]
    store = room / "store"
    tags = {tag["tag"]: tag["steps"] for tag in memascend_checkpoints(store, capfd)}
    assert tags == {"best": best, "last": 9}
    # The store has gone back to the best step, and goes on from its last one all the same.
    assert main.main(["checkpoints", str(store), "--restore", "last"]) == 0
    run = memascend.resume(store, allocator="pageable")
    assert run.steps == 9
    memascend.close(run.model)
    assert main.main([*words(model_dir, "on", steps=11), "--resume", "--change"]) == 0, capfd.readouterr().err
    assert [one["step"] for one in records(room / "on", "end")[0]["evaluations"]] == [0, best]
    expected, found = (load_file(room / out / "model.safetensors") for out in ("whole", "on"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [one["step"] for one in records(room / "on", "eval")] == [0, 2, 4, 6, 8, 9, 10, 11]


def memascend_checkpoints(store: Path, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capfd.readouterr()
    assert main.main(["inspect", str(store), "--json"]) == 0
    return json.loads(capfd.readouterr().out)["checkpoints"]


def test_a_fraction_to_evaluate_on(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    assert main.main(in_memory(words(model_dir, "out", eval=0.25, steps=20))) == 0, capfd.readouterr().err
    assert "tokenising 30/30" in (told := capfd.readouterr().err) and "tokenising 10/10" in told
    losses = [one["loss"] for one in records(room / "out", "eval")]
    assert losses[-1] < 0.8 * losses[0]
    # The data is another one then.
    assert main.main([*words(model_dir, "kept", eval=0.25, steps=1), "--keep-store"]) == 0
    assert main.main([*words(model_dir, "on", eval=0.5, steps=1), "--resume"]) == main.BAD_INPUT
    assert "--eval is 0.5, but the run in the store has 0.25" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("copies", "durability", "told"),
    [
        (0.9, "auto", "free some space"),
        (1.1, "step", "leave out --durability, free some space"),
        (0.9, "step", "free: free some space"),
    ],
)
def test_room_for_weights_and_states_is_looked_for_first(
    model_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    copies: float,
    durability: str,
    told: str,
) -> None:
    room = model_dir.parent
    assert main.main(["plan", str(model_dir), "--seq-len", "32", "--dtype", "bfloat16", "--json"]) == 0
    free = int(copies * json.loads(capfd.readouterr().out)["ssd_space"]["second_slot_bytes"])
    monkeypatch.setattr(space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=1 << 40))
    seen = sorted(room.rglob("*"))
    run = words_of(model_dir, room / "out", room / "store", data=room / "documents", durability=durability)
    assert main.main(run) == main.BAD_INPUT
    error = capfd.readouterr().err
    assert "the store takes at least" in error and told in error
    assert sorted(room.rglob("*")) == seen


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--eval-steps", "2"], "--eval-steps needs evaluations: give --eval"),
        (["--eval", "1.5"], "1.5 is not a fraction between 0 and 1"),
        (["--eval", "0.1", "text.txt"], "--eval takes one fraction or files"),
        (["--eval", "nowhere"], "nowhere"),
        (["--eval", "0.99"], "leaves none to train on"),
        (["--report-to", "wandb"], "--report-to wandb is not installed: pip install wandb"),
    ],
)
def test_what_cannot_be_evaluated(
    model_dir: Path, capfd: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    room = model_dir.parent
    chosen = in_memory(words_of(model_dir, room / "out", room / "store", data=room / "documents"))
    assert main.main([*chosen, *flags]) == main.BAD_INPUT
    assert told in capfd.readouterr().err
    assert not (room / "out").exists()


def test_data_to_evaluate_on_is_looked_for_before_the_model_is_read(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    room = model_dir.parent
    chosen = words_of(model_dir, room / "out", room / "store", data=room / "documents", eval="nowhere")
    assert main.main(chosen) == main.BAD_INPUT
    told = capfd.readouterr().err
    assert "--eval nowhere: No such file" in told and "loading" not in told and "tokenising" not in told
    assert not (room / "store").exists()


@pytest.mark.parametrize("adapters", [False, True], ids=["model", "adapters"])
def test_a_signal_ends_an_evaluation_which_is_taken_again(model_dir: Path, adapters: bool) -> None:
    room = model_dir.parent
    changed = {"lora_rank": 2} if adapters else {}
    whole = words(model_dir, "whole", steps=3, **changed)
    assert main.main(whole) == 0
    out = words(model_dir, "out", steps=3, **changed)
    with faults.Child(room, interrupted_in_evaluation, out, 2) as child:
        ended = child.wait()
    assert ended.code == 130, ended.err
    assert [one["step"] for one in records(room / "out", "eval")] == [0]
    again = words(model_dir, "again", steps=3, **changed)
    with faults.Child(room, command, [*again, "--resume"]) as child:
        assert (ended := child.wait()).code == 0, ended.err
    for kind in ("step", "eval"):
        found, expected = (
            [(record["step"], record["loss"]) for record in records(room / name, kind)] for name in ("again", "whole")
        )
        assert found == expected and len(found) == 3


@pytest.mark.parametrize("adapters", [False, True], ids=["model", "adapters"])
def test_a_signal_in_a_step_leaves_its_evaluation_to_the_run_that_goes_on(model_dir: Path, adapters: bool) -> None:
    room = model_dir.parent
    changed = {"lora_rank": 2} if adapters else {}
    with faults.Child(room, interrupted_in_step, words(model_dir, "out", steps=3, **changed), 2) as child:
        ended = child.wait()
    assert ended.code == 130, ended.err
    with faults.Child(room, command, [*words(model_dir, "again", steps=3, **changed), "--resume"]) as child:
        assert (ended := child.wait()).code == 0, ended.err
    assert [one["step"] for one in records(room / "again", "eval")] == [0, 2, 3]


def interrupted_in_step(pipe: Any, words: list[str], step: int) -> None:
    """Run a command that gets Ctrl-C while it takes step `step`."""
    from memascend.cli.loop import Loop

    take = Loop.training_step

    def interrupted(self: Any, *others: Any, **named: Any) -> Any:
        if self.state.global_step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *others, **named)

    Loop.training_step = interrupted  # type: ignore[method-assign]
    command(pipe, words)


@pytest.mark.parametrize("flag", ["--keep-store", "--save-every"])
def test_a_store_that_has_gone_back_goes_on_from_there(
    model_dir: Path, capfd: pytest.CaptureFixture[str], flag: str
) -> None:
    room = model_dir.parent
    kept = [flag] if flag == "--keep-store" else [flag, "100"]
    assert main.main([*words(model_dir, "out"), *kept]) == 0
    best = records(room / "out", "end")[0]["evaluations"][1]["step"]
    assert best < 8, best
    assert {tag["tag"]: tag["steps"] for tag in memascend_checkpoints(room / "store", capfd)}["last"] == 9
    assert main.main([*words(model_dir, "on", eval_steps=3), *kept, "--resume"]) == 0, capfd.readouterr().err
    # Each step and evaluation has one record, the latter at the steps that are given now.
    before = list(range(0, best + 1, 2))
    assert [one["step"] for one in records(room / "on", "eval")] == before + [
        step for step in range(0, 10, 3) if step > best
    ]
    assert [one["step"] for one in records(room / "on", "step")] == list(range(1, 10))


def test_a_loss_that_is_not_finite_is_not_the_best(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = transformers.Trainer.prediction_step

    def overflowed(self: Any, *others: Any, **named: Any) -> Any:
        loss, *rest = predict(self, *others, **named)
        return (loss * float("inf"), *rest)

    monkeypatch.setattr(transformers.Trainer, "prediction_step", overflowed)
    assert main.main(words(model_dir, "out", steps=2)) == 0
    assert "the least so far" not in capfd.readouterr().err
    text = (model_dir.parent / "out" / "metrics.jsonl").read_text()
    assert "Infinity" not in text and "NaN" not in text
    assert [one["loss"] for one in records(model_dir.parent / "out", "eval")] == [None, None]


def test_a_signal_in_the_first_evaluation_abandons_the_run(model_dir: Path) -> None:
    room = model_dir.parent
    with faults.Child(room, interrupted_in_evaluation, words(model_dir, "out"), 0) as child:
        ended = child.wait()
    assert ended.code == 130, ended.err
    assert not (room / "out").exists()


def interrupted_in_evaluation(pipe: Any, words: list[str], step: int) -> None:
    """Run a command that gets Ctrl-C while it evaluates after `step`."""
    predict = transformers.Trainer.prediction_step

    def interrupted(self: Any, *others: Any, **named: Any) -> Any:
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return predict(self, *others, **named)

    transformers.Trainer.prediction_step = interrupted  # type: ignore[method-assign]
    command(pipe, words)


def test_a_best_model_without_room_is_not_claimed(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_model: object, _tag: str) -> None:
        raise StoreError(28, "the drive is full")

    monkeypatch.setattr(memascend, "save_checkpoint", full)
    assert main.main(words(model_dir, "out")) == 0, capfd.readouterr().err
    told = capfd.readouterr()
    assert "step 2 is the best so far, and cannot be kept: the drive is full" in told.err
    assert "the best after" not in told.out
    assert [one["step"] for one in records(model_dir.parent / "out", "end")[0]["evaluations"]] == [0]


def test_other_data_to_evaluate_on_is_told(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    assert main.main([*words(model_dir, "out", steps=2), "--keep-store"]) == 0
    (room / "another.txt").write_text("".join(chr(161 + number % 30) for number in range(200)))
    again = words(model_dir, "on", steps=4, eval=room / "another.txt")
    assert main.main([*again, "--resume", "--change"]) == 0, capfd.readouterr().err
    assert "--eval is on other data than before" in capfd.readouterr().err
    assert [one["step"] for one in records(room / "on", "end")[0]["evaluations"]] == [4, 4]
