"""`--save-every`: checkpoints in the store as a run goes on."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models
import torch
from commands import command, in_memory, words_of
from safetensors.torch import load_file

import memascend
from memascend.cli import main
from memascend.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64, layers=1)


def checkpoints(store: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, int]:
    capfd.readouterr()
    assert main.main(["inspect", str(store), "--json"]) == 0
    return {one["tag"]: one["steps"] for one in json.loads(capfd.readouterr().out)["checkpoints"]}


def test_steps_are_kept_and_gone_back_to(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    store = room / "store"
    words = words_of(model_dir, room / "out", store, steps=7, save_every=2)
    assert main.main([*words, "--keep-last", "2"]) == 0, capfd.readouterr().err
    assert f"kept the store in {store}" in capfd.readouterr().out
    assert checkpoints(store, capfd) == {"step-4": 4, "step-6": 6}
    # The kept state belongs to that step: the run that goes on from it ends as the whole one.
    assert main.main(["checkpoints", str(store), "--restore", "step-4"]) == 0
    again = words_of(model_dir, room / "again", store, steps=7, save_every=3)
    assert main.main([*again, "--resume"]) == 0, capfd.readouterr().err
    weights = load_file(room / "out" / "model.safetensors")
    assert all(torch.equal(v, weights[name]) for name, v in load_file(room / "again" / "model.safetensors").items())
    assert checkpoints(store, capfd) == {"step-4": 4, "step-6": 6}


def test_checkpoints_of_other_names_stay(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent
    words = words_of(model_dir, room / "out", room / "store", steps=1)
    assert main.main([*words, "--keep-store"]) == 0
    run = memascend.resume(room / "store", allocator="pageable")
    memascend.save_checkpoint(run.model, "before-rl")
    memascend.close(run.model)
    words = words_of(model_dir, room / "more", room / "store", steps=4, save_every=1, keep_last=1)
    assert main.main([*words, "--resume", "--change"]) == 0, capfd.readouterr().err
    assert checkpoints(room / "store", capfd) == {"before-rl": 1, "step-4": 4}


def test_a_store_without_room_for_another_does_not_end_the_run(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StoreError(28, "no room")

    monkeypatch.setattr(memascend, "save_checkpoint", full)
    room = model_dir.parent
    assert main.main(words_of(model_dir, room / "out", room / "store", steps=2, save_every=2)) == 0
    assert "note: step 2 is not kept as a checkpoint: no room" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep-last", "2"], "--keep-last needs checkpoints: give --save-every"),
        (["--save-every", "2", "--durability", "none"], "--save-every keeps durable steps"),
        (["--save-every", "0"], "'0' is not"),
        (["--replace-store", "--resume"], "--replace-store deletes the run in the store"),
    ],
)
def test_what_does_not_go_together(
    model_dir: Path, capfd: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    words = words_of(model_dir, model_dir.parent / "out", model_dir.parent / "store")
    assert main.main([*words, *flags]) == main.BAD_INPUT
    assert says in capfd.readouterr().err
    assert main.main([*in_memory(words), "--save-every", "1"]) == main.BAD_INPUT


def test_a_run_that_is_there_is_refused_and_replaced(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    room = model_dir.parent

    def run(out: str, *flags: str) -> int:
        return main.main([*words_of(model_dir, room / out, room / "store", steps=2), *flags])

    assert run("first", "--keep-store") == 0
    assert run("second") != 0
    assert "holds a run of LlamaForCausalLM after step 2" in (err := capfd.readouterr().err)
    assert "--resume); to delete it and begin anew" in err and "--replace-store" in err
    assert run("second", "--replace-store", "--keep-store") == 0, capfd.readouterr().err
    assert run("third", "--replace-store") == 0, capfd.readouterr().err
    assert list((room / "store").iterdir()) == []
    expected, found = (load_file(room / name / "model.safetensors") for name in ("first", "third"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_signal_while_the_model_is_written_abandons_that_and_keeps_the_run(model_dir: Path) -> None:
    room = model_dir.parent
    with faults.Child(room, interrupted_in_writing, words_of(model_dir, room / "out", room / "store")) as child:
        ended = child.wait()
    assert ended.code == 130, ended.err
    assert "holds the run after step 2: --resume goes on with it" in ended.err
    assert not (room / "out").exists()
    assert main.main([*words_of(model_dir, room / "again", room / "store"), "--resume"]) == 0
    assert main.main(words_of(model_dir, room / "whole", room / "other")) == 0
    expected, found = (load_file(room / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert list((room / "store").iterdir()) == []


def interrupted_in_writing(pipe: Any, words: list[str]) -> None:
    """Run a command that gets Ctrl-C while it writes the model."""
    save = memascend.save_pretrained

    def interrupted(*given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save(*given, **named)

    memascend.save_pretrained = interrupted
    command(pipe, words)
