"""The metrics file of a run that goes on: records up to its step stay, once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import tiny_models
from commands import words_of

from memascend.cli import main
from memascend.cli.run_log import RunLog, recorded_bytes
from memascend.errors import OutputError

if TYPE_CHECKING:
    from pathlib import Path

RUN = {"parameters": 7, "tokens": 100, "blocks": 3}


def lines(*steps: int, first: str = "start", **fields: int) -> str:
    records = [{"record": first, "steps": 100} | RUN | fields, *({"record": "step", "step": step} for step in steps)]
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (lines(*range(1, 71)), lines(*range(1, 64))),
        (lines(*range(1, 64)), lines(*range(1, 64))),
        (lines(*range(1, 64)) + '{"record": "step", "st', lines(*range(1, 64))),
        (lines(*range(1, 40)) + "\0\0\n" + lines(*range(40, 64)), lines(*range(1, 40))),
        (
            lines(*range(1, 31)) + lines(*range(31, 71), first="resume"),
            lines(*range(1, 31)) + lines(*range(31, 64), first="resume"),
        ),
        (lines(1) + json.dumps({"record": "end", "steps": 1}) + "\n", None),
        ("", ""),
        ('{"record": "start", "se', ""),
    ],
)
def test_what_is_kept_up_to_a_step(tmp_path: Path, text: str, kept: str | None) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    log = RunLog(file, go_on=True)
    log.keep(63, RUN, before=None, named=True)
    log.write({"record": "resume"})
    assert file.read_text() == (text if kept is None else kept) + '{"record": "resume"}\n'


@pytest.mark.parametrize("text", ["precious", "precious\n", lines(1, parameters=8), "[1]\n", '{"record": "start"}\n'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    log = RunLog(file, go_on=True)
    with pytest.raises(OutputError, match=r"metrics\.jsonl holds no records of the run"):
        log.keep(63, RUN, before=None, named=True)
    assert file.read_text() == text
    # One that memascend itself has found beside --out is only left aside.
    log.keep(63, RUN, before=None, named=False)
    assert file.read_text() == ""


def test_a_run_that_begins_anew_leaves_another_file_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model_dir = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    notes = tmp_path / "notes.txt"
    notes.write_text("what was bought\n")
    chosen = words_of(model_dir, tmp_path / "out", tmp_path / "store", metrics=notes)
    assert main.main([*chosen, "--resume"]) == main.BAD_INPUT
    assert f"--metrics {notes} holds no records of the run" in capfd.readouterr().err
    assert notes.read_text() == "what was bought\n"


def test_records_that_lie_elsewhere_are_copied(tmp_path: Path) -> None:
    before, file = tmp_path / "before.jsonl", tmp_path / "metrics.jsonl"
    before.write_text(lines(*range(1, 71)))
    for steps, expected in ((63, lines(*range(1, 64))), (0, "")):
        RunLog(file, go_on=True).keep(steps, RUN, before=before, named=True)
        assert file.read_text() == expected
    RunLog(file, go_on=True).keep(63, RUN | {"tokens": 1}, before=before, named=True)
    assert file.read_text() == ""
    assert recorded_bytes(before, 63, RUN) == len(lines(*range(1, 64)))


def test_the_first_step_of_a_run_that_goes_on_has_figures_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.llama_directory(tmp_path, hidden=64, layers=1)
    assert main.main([*words_of(model, tmp_path / "out", tmp_path / "store", steps=5), "--keep-store"]) == 0
    go_on = words_of(model, tmp_path / "again", tmp_path / "store", steps=7)
    assert main.main([*go_on, "--resume", "--change"]) == 0, capfd.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["record"] == "step"]
    assert [step["step"] for step in steps][-2:] == [6, 7]
    for step in steps[-2:]:
        assert step["tokens_per_s"] * step["seconds"] == pytest.approx(32)
