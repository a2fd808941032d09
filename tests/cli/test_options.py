"""`--options FILE`: the options of a run in a file; options of the command line come before them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import tiny_models

from memascend.cli import main
from memascend.cli.arguments import flags_of, parser
from memascend.cli.options import with_options
from memascend.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


FLAGS = flags_of(parser(), "finetune")


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("steps: 3\nlr: 2e-5\n", [], ["--steps", "3", "--lr", "2e-5"]),
        ('{"host-memory": "4GiB", "no_packing": true, "resume": false}', [], ["--host-memory", "4GiB", "--no-packing"]),
        ("store: [a, b]\ndata: [x, y]", [], ["--store", "a", "--store", "b", "--data", "x", "y"]),
        ("steps: 3\nstore: [a]", ["--steps=5", "--store", "b"], []),
        ("epochs: 3", ["--steps", "5"], []),
        ("metrics: null", [], []),
    ],
)
def test_words_of_a_file(tmp_path: Path, text: str, given: list[str], expected: list[str]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    words = ["finetune", "model", *given, "--options", str(file)]
    assert with_options(words, FLAGS) == words + expected
    words[-2:] = [f"--options={file}"]
    assert with_options(words, FLAGS) == words + expected


def test_the_model_is_one_of_them(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: path/to/model")
    assert with_options(["finetune", "--options", str(file)], FLAGS) == [
        "finetune",
        "path/to/model",
        "--options",
        str(file),
    ]
    words = ["finetune", "other", "--options", str(file)]
    assert with_options(words, FLAGS) == words


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("steps: [", "neither YAML nor JSON"),
        ("just words", "holds no options"),
        ("lr: {max: 1}", "lr holds options of its own"),
        ("options: other.yaml", "another file of options"),
        ("recompute: false", "there is no option 'recompute'"),
    ],
)
def test_files_that_hold_no_options(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=told):
        with_options(["finetune", "model", "--options", str(file)], FLAGS)


def test_a_run_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model_dir = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    options = {
        "model": str(model_dir),
        "data": str(tmp_path / "text.txt"),
        "in_memory": True,
        "steps": 1,
        "seq-len": 32,
        "dtype": "bfloat16",
        "out": str(tmp_path / "out"),
        "report-to": ["tensorboard"],
    }
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    assert main.main(["finetune", "--options", str(file), "--steps", "2"]) == 0, capfd.readouterr().err
    assert "2 of 2 steps" in capfd.readouterr().out
    assert list((tmp_path / "out.tensorboard").glob("events.out.tfevents.*"))
    file.write_text(json.dumps(options | {"stepz": 3}))
    assert main.main(["finetune", "--options", str(file)]) == main.BAD_INPUT
    assert "there is no option 'stepz': did you mean --steps?" in capfd.readouterr().err
