"""Runs that go on with other options than before: refused unless asked for, and exact in everything else."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from commands import words_of
from safetensors.torch import load_file

from memascend.cli import main
from memascend.cli.changes import DataPosition
from memascend.cli.data import TokenBlocks
from memascend.cli.settings import Settings
from memascend.recovery.resume import read_record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_models.llama_directory(tmp_path, hidden=64, layers=1)


def finetune(model_dir: Path, out: str, *flags: str, store: str = "store", code: int = 0, **changed: Any) -> Path:
    room = model_dir.parent
    words = words_of(model_dir, room / out, room / store, **{"lr": 1e-3} | changed)
    assert main.main([*words, "--keep-store", *flags]) == code
    return room / out


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [
        record
        for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if record["record"] == kind
    ]


def test_more_steps_of_a_constant_rate_are_the_longer_run(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune(model_dir, "short", steps=2, schedule="constant")
    finetune(model_dir, "refused", "--resume", steps=4, schedule="constant", code=main.BAD_INPUT)
    assert "--steps is 4, but the run in the store has 2: --resume needs the same, and --resume --change goes on" in (
        capfd.readouterr().err
    )
    longer = finetune(model_dir, "longer", "--resume", "--change", steps=4, schedule="constant")
    told = capfd.readouterr().err
    assert "note: --steps 2 -> 4: 4 steps in all; a schedule other than constant has other" in told
    assert "from step 3 on; the first 2 steps stay as they were" in told
    whole = finetune(model_dir, "whole", steps=4, schedule="constant", store="other")
    expected = load_file(whole / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in load_file(longer / "model.safetensors").items())
    assert [step["loss"] for step in records(longer, "step")] == [step["loss"] for step in records(whole, "step")]
    assert records(longer, "resume")[0]["changes"] == {"steps": [2, 4]}
    # From then on the new number holds for the run.
    finetune(model_dir, "again", "--resume", steps=2, schedule="constant", code=main.BAD_INPUT)
    assert "the run in the store has 4" in capfd.readouterr().err
    finetune(model_dir, "again", "--resume", "--change", steps=3, schedule="constant", code=main.BAD_INPUT)
    assert "has taken 4 steps, more than the 3" in capfd.readouterr().err


def test_other_rates_hold_from_the_next_step_on(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune(model_dir, "first", steps=2, schedule="linear", weight_decay=0.1)
    out = finetune(model_dir, "then", "--resume", "--change", steps=6, schedule="cosine", lr=5e-4, weight_decay=0.0)
    rates = [step["lr"] for step in records(out, "step")]
    assert rates[:2] == [1e-3, 5e-4]
    assert rates[2:] == pytest.approx([5e-4 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(2, 6)])
    told = capfd.readouterr().err
    for line in (
        "--lr 0.001 -> 0.0005: from step 3",
        "--schedule linear -> cosine: from",
        "--weight-decay 0.1 -> 0.0:",
    ):
        assert f"memascend: note: {line}" in told
    # The optimizer that was resumed has them too: the run goes on from there without a change.
    again = finetune(model_dir, "again", "--resume", steps=6, schedule="cosine", lr=5e-4, weight_decay=0.0)
    assert len(records(again, "step")) == 6 and records(again, "resume")[-1]["changes"] == {}


def test_steps_of_another_size_go_on_where_the_data_was(
    model_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    number = TokenBlocks.number

    def noting(self: TokenBlocks, position: int) -> int:
        taken.append(position)
        return number(self, position)

    options = {"steps": 2, "schedule": "constant", "batch_size": 3}
    finetune(model_dir, "first", **options)
    monkeypatch.setattr(TokenBlocks, "number", noting)
    options |= {"steps": 3, "batch_size": 1, "grad_accum": 4}
    finetune(model_dir, "second", "--resume", "--change", **options)
    assert taken[-4:] == [6, 7, 8, 9]
    assert "--batch-size 3 -> 1: the data goes on where it was, at sequence 7 of" in capfd.readouterr().err
    options |= {"steps": 5}
    finetune(model_dir, "third", "--resume", "--change", **options)
    assert taken[-8:] == list(range(10, 18))


def test_micro_batches_may_change(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"schedule": "constant", "batch_size": 2}
    finetune(model_dir, "first", steps=1, micro_batch_size=1, tile_tokens=8, **options)
    finetune(model_dir, "second", "--resume", steps=2, code=main.BAD_INPUT, **options)
    assert "--micro-batch-size is None, but the run in the store has 1" in capfd.readouterr().err
    finetune(model_dir, "second", "--resume", "--change", steps=2, **options)
    told = capfd.readouterr().err
    assert "--micro-batch-size 1 -> None: from step 2 on" in told and "--tile-tokens 8 -> None: from" in told
    record = read_record([model_dir.parent / "store"])
    assert record["micro_batch_size"] == 2 and record["tile_tokens"] >= 2 * 8  # the whole batch


def test_what_decides_the_bits_before_cannot_be_changed(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune(model_dir, "first", steps=1)
    for name, value in {"seed": 1, "seq_len": 16, "optimizer": "lion"}.items():
        finetune(model_dir, "second", "--resume", "--change", steps=1, code=main.BAD_INPUT, **{name: value})
        told = capfd.readouterr().err
        assert f"--{name.replace('_', '-')} is {value}, but" in told and "--change" not in told.splitlines()[-1]
    finetune(model_dir, "second", "--change", steps=1, code=main.BAD_INPUT)
    assert "give --resume too" in capfd.readouterr().err


def test_epochs_count_what_was_taken_before(tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path, data=[], out=tmp_path, epochs=2, batch_size=4)
    assert DataPosition().length(settings, 10) == 5
    assert DataPosition(steps=8, sequences=8).length(settings, 10) == 8 + 3
    assert DataPosition(steps=30, sequences=30).length(settings, 10) == 30
