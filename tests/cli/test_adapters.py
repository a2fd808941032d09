"""`--lora-rank`: adapters over a model in the store, and how such a run goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import faults
import flushes
import peft
import pytest
import tiny_models
import torch
from commands import command, in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from memascend.cli import adapters, main

RUN: dict[str, Any] = {"lora_rank": 4, "steps": 6, "save_every": 2, "lr": 1e-2}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64, layers=2)


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """A little text to evaluate on."""
    path = tmp_path / "held-out.txt"
    path.write_text(tiny_models.TEXT[:500])
    return path


def words(model_dir: Path, out: str, **changed: Any) -> list[str]:
    return words_of(model_dir, model_dir.parent / out, model_dir.parent / "store", **RUN | changed)


def without(words: list[str], flag: str) -> list[str]:
    index = words.index(flag)
    return words[:index] + words[index + 2 :]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter_model.safetensors")


def same(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(out: Path) -> list[float]:
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in found if record["record"] == "step"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adapters_are_those_of_the_run_in_memory(
    model_dir: Path, held_out: Path, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    room = model_dir.parent
    assert main.main(words(model_dir, "out", dtype=dtype, eval=held_out)) == 0, capfd.readouterr().err
    told = capfd.readouterr().err
    # Weights are read from the model's own files where they have the dtype of the computation.
    assert ("frozen weights read where they are" in told) == (dtype == "bfloat16")
    memory = without(in_memory(words(model_dir, "mem", dtype=dtype, eval=held_out)), "--save-every")
    assert main.main(memory) == 0, capfd.readouterr().err
    assert losses(room / "out") == losses(room / "mem") and len(losses(room / "out")) == 6
    assert same(room / "out", room / "mem")
    assert any(tensor.abs().max() > 0 for name, tensor in weights(room / "out").items() if "lora_B" in name)
    assert not (room / "store").exists() or list((room / "store").iterdir()) == []
    # Others read them as adapters of the model they were made for.
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model = peft.PeftModel.from_pretrained(base, room / "out")
    assert model.peft_config["default"].base_model_name_or_path == str(model_dir)
    ids = torch.arange(32).view(1, 32)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
        with model.disable_adapter():
            assert model(input_ids=ids, labels=ids).loss != loss
    assert not (room / "out" / "config.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_run_that_goes_on_ends_as_the_whole_one(
    model_dir: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    room = model_dir.parent
    checkpoints = room / "store" / adapters.FOLDER
    with faults.Child(room, command, words(model_dir, "out", steps=60)) as child:
        while not (checkpoints / "checkpoint-4" / "progress.json").exists():
            assert child.alive(), child.wait().err
            time.sleep(0.002)
        os.kill(child.pid, number)
        ended = child.wait()
    assert (room / "out").exists() == (number == signal.SIGINT), ended.err
    # Beginning anew requires deleting the earlier files.
    assert main.main(words(model_dir, "again")) == main.BAD_INPUT
    assert f"{checkpoints} holds a run after step" in capfd.readouterr().err
    # One that was being written is not gone on with.
    (checkpoints / "checkpoint-99").mkdir()
    assert main.main([*words(model_dir, "again", steps=60), "--resume"]) == 0, capfd.readouterr().err
    assert "going on after step" in capfd.readouterr().err
    assert main.main(words(model_dir, "whole", steps=60)) == 0
    assert losses(room / "again") == losses(room / "whole") and len(losses(room / "whole")) == 60
    assert same(room / "again", room / "whole")
    assert not (room / "store").exists() or list((room / "store").iterdir()) == []


def test_other_checkpoints_beside_the_store_stay(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # transformers' Trainer names its own in the same way.
    theirs = model_dir.parent / "store" / "checkpoints" / "checkpoint-99"
    theirs.mkdir(parents=True)
    (theirs / "model.safetensors").write_text("another run's")
    assert main.main(words(model_dir, "out")) == 0, capfd.readouterr().err
    assert (theirs / "model.safetensors").read_text() == "another run's"


def test_the_best_adapters_go_to_another_filesystem(
    model_dir: Path, held_out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = model_dir.parent
    rename = os.rename

    def across(source: Any, target: Any) -> None:
        if (room / "store" in Path(source).parents) != (room / "store" in Path(target).parents):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", across)
    assert main.main(words(model_dir, "out", eval=held_out)) == 0, capfd.readouterr().err
    assert weights(room / "out")


def test_the_best_adapters_are_those_of_the_checkpoint_that_is_gone_on_from(
    model_dir: Path, held_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    room = model_dir.parent
    changed = {"steps": 6, "save_every": 3, "eval": held_out, "schedule": "constant"}
    with faults.Child(room, killed_with_the_best, words(model_dir, "out", **changed, eval_steps=2), 4) as child:
        assert (ended := child.wait()).code == -signal.SIGKILL, ended.err
    # Step 4 was better than step 2, but the run goes on from step 3 with a rate that makes all later steps worse.
    other = [*words(model_dir, "on", **changed | {"lr": 100.0}, eval_steps=6), "--resume", "--change"]
    assert main.main(other) == 0, capfd.readouterr().err
    assert "the best after step 2" in capfd.readouterr().out
    assert main.main(words(model_dir, "two", **changed | {"steps": 2}, eval_steps=2)) == 0
    assert same(room / "on", room / "two")


def killed_with_the_best(pipe: Any, words: list[str], step: int) -> None:
    """Run a command that is killed as soon as the best model is the one of `step`."""
    from memascend.cli.best import BestModel

    keep = BestModel.save

    def killed(self: BestModel, best_step: int) -> bool:
        kept = keep(self, best_step)
        if best_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept

    BestModel.save = killed  # type: ignore[method-assign]
    command(pipe, words)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--keep-store"], "leave them out with --lora-rank"),
        (["--durability", "step"], "leave them out with --lora-rank"),
    ],
)
def test_what_does_not_go_with_adapters(
    model_dir: Path, capfd: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main.main([*words(model_dir, "out"), *flags]) == main.BAD_INPUT
    assert told in capfd.readouterr().err


def test_a_checkpoint_is_whole_on_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is deleted next."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    operations = flushes.recorded(monkeypatch)
    adapters.finish_checkpoint(folder, {"step": 2}, 5)
    assert adapters.recorded(folder) == ({"step": 2}, 5)
    (renamed,) = (at for at, (what, _) in enumerate(operations) if what == "rename")
    written = {str(folder / "adapter_model.safetensors"), operations[renamed][1]}
    assert flushes.flushed(operations[:renamed]) == written
    assert operations[renamed + 1 :] == [("flush", str(folder)), ("flush", str(tmp_path))]
