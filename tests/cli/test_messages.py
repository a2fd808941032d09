"""Messages of the command about mistakes, before anything is made: the option or path, and a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from commands import in_memory, words_of

from memascend.cli import space
from memascend.cli.arguments import parser
from memascend.cli.jobs import conflicts
from memascend.cli.main import BAD_INPUT, main
from memascend.errors import DeviceError
from memascend.recovery import running_store


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "text.txt").write_text("a b c")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/name"}))
    return {
        "model": str(tmp_path / "adapters"),
        "--data": str(tmp_path / "text.txt"),
        "--store": str(tmp_path / "store"),
        "--out": str(tmp_path / "out"),
        "--host-memory": "8Gi",
    }


def error_of(capfd: pytest.CaptureFixture[str], words: dict[str, str]) -> str:
    """Return the one line that a run with these words ends with."""
    flags = [word for flag, value in words.items() if flag != "model" for word in (flag, value)]
    assert main(["finetune", words["model"], *flags]) == BAD_INPUT
    told = capfd.readouterr().err
    assert told.count("error:") == 1, told
    return told


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"--lr": "-1e-4"}, "argument --lr: '-1e-4' is not a number of at least 0"),
        ({"--eval": "500%"}, "argument --eval: 500% is no part of the documents"),
        ({"--batch-sise": "4"}, "there is no option --batch-sise: did you mean --batch-size?"),
        ({"--zzz": "4"}, "there is no option --zzz (see memascend finetune --help)"),
        ({}, "adapters holds adapters, and no model: `memascend export"),
        ({"model": "gpt2"}, "a model of the hub is named with its organisation, as in ORG/gpt2"),
        ({"--out": "{store}"}, "store makes --out"),
        ({"--store": "{out}/in/it"}, "in/it makes --out"),
        ({"--store": "UUID=0123-4567", "--lora-rank": "4"}, "with --lora-rank, --store takes directories"),
    ],
)
def test_mistakes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, words: dict[str, str], changed: dict[str, str], problem: str
) -> None:
    places = {"store": words["--store"], "out": words["--out"]}
    words |= {name: value.format(**places) for name, value in changed.items()}
    seen = sorted(tmp_path.rglob("*"))
    assert problem in error_of(capfd, words)
    assert sorted(tmp_path.rglob("*")) == seen


def test_a_device_that_is_named_by_its_uuid_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    device = Path("UUID=0123-4567")
    assert space.free_bytes([tmp_path]) is not None and space.free_bytes([device]) is None
    assert running_store.holds_store(device) and not running_store.holds_store(tmp_path)


def test_a_command_is_suggested(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fintune", "x"]) == BAD_INPUT
    assert "there is no command 'fintune': did you mean finetune?" in capfd.readouterr().err
    assert main(["xyz"]) == BAD_INPUT
    assert "there is no command 'xyz' (see memascend --help)" in capfd.readouterr().err


@pytest.mark.parametrize("warmup_steps", [1, 2])
def test_a_warm_up_that_does_not_end_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], warmup_steps: int
) -> None:
    run = words_of(tiny_models.llama_directory(tmp_path, hidden=64), tmp_path / "out", tmp_path / "store", steps=2)
    assert main([*in_memory(run), "--warmup-steps", str(warmup_steps)]) == 0
    assert ("the learning rate never reaches --lr" in capfd.readouterr().err) == (warmup_steps == 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there(
    capfd: pytest.CaptureFixture[str], words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DeviceError("no driver is loaded")

    monkeypatch.setattr(conflicts.ComputeOptions, "of", refuse)
    told = error_of(capfd, words | {"--device": "cuda"})
    assert "--device cuda cannot be used here: leave it out to compute on the CPU (no driver is loaded)" in told


def test_percentages_and_sizes(words: dict[str, str]) -> None:
    chosen = parser().parse_args(["finetune", "m", "--data", "d", "--out", "o", "--eval", "5%", "--host-memory", "8Gi"])
    assert chosen.evaluation == [0.05]
    assert chosen.host_memory == 8 << 30
